"""Copies tensors to a device without waiting, and a few numbers back: `PinnedStaging` and `fetch`.

A device copies in the background only from pinned memory. So each tensor is first copied into a pinned buffer. The
buffer is used again after the device has taken the tensor from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class Lane(Protocol):
    """Copies to a device on the caller's current stream."""

    def pinned(self, size: int, kind: torch.dtype) -> torch.Tensor: ...
    def send(self, source: torch.Tensor) -> torch.Tensor:
        """Returns at once. The source must not change until a later mark has passed."""

    def mark(self) -> Callable[[], bool]:
        """Returns a function that tells whether all copies sent so far have arrived."""


class PinnedStaging:
    """Sends tensors through pinned buffers. It has as many buffers as are on their way at the same time."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._idle: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        self._lent: deque[tuple[Callable[[], bool], list[torch.Tensor]]] = deque()

    def send(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the tensors on the device, for work on the current stream. The given tensors may change
        afterwards."""
        while self._lent and self._lent[0][0]():
            for buffer in self._lent.popleft()[1]:
                self._idle.setdefault((buffer.dtype, len(buffer)), []).append(buffer)
        buffers: list[torch.Tensor] = []
        sent = [self._send(tensor, buffers) for tensor in tensors]
        self._lent.append((self._lane.mark(), buffers))
        return sent

    def _send(self, tensor: torch.Tensor, buffers: list[torch.Tensor]) -> torch.Tensor:
        """Sends a tensor. Keeps its layout: dense features lie feature by feature."""
        turned = tensor.dim() == 2 and not tensor.is_contiguous()
        flat = tensor.t() if turned else tensor
        # Batches with bags differ in size. With powers of two, there are few sizes of buffers.
        size = 1 << max(0, flat.numel() - 1).bit_length()
        idle = self._idle.get((flat.dtype, size))
        buffer = idle.pop() if idle else self._lane.pinned(size, flat.dtype)
        buffers.append(buffer)
        sent = self._lane.send(buffer[: flat.numel()].view(flat.shape).copy_(flat))
        return sent.t() if turned else sent


class CudaLane:
    """The way to a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pinned(self, size: int, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=kind, pin_memory=True)

    def send(self, source: torch.Tensor) -> torch.Tensor:
        return source.to(self._device, non_blocking=True)

    def mark(self) -> Callable[[], bool]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event.query


def staging_for(device: torch.device) -> PinnedStaging | None:
    """Returns the way to a GPU. None: the device is a CPU, which takes tensors as they are."""
    return PinnedStaging(CudaLane(device)) if device.type == "cuda" else None


def fetch(numbers: torch.Tensor) -> tuple[torch.Tensor, Callable[[], bool]]:
    """Starts a copy to the host. Returns the copy, and a function that tells whether it has arrived."""
    if not numbers.is_cuda:
        return numbers, lambda: True
    copy = torch.empty_like(numbers, device="cpu", pin_memory=True)
    copy.copy_(numbers, non_blocking=True)
    return copy, CudaLane(numbers.device).mark()
