"""Brings tensors to the host in pieces of a limited size: `HostPieces`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

BUFFERS = 2
"""While one piece is used, the next one is on its way."""


class HostPieces:
    """The bytes of tensors. Tensors of the host are read where they are. Others go through two buffers."""

    def __init__(self, size: int = 2**26, lane: CudaHostLane | None = None) -> None:
        """`size`: the bytes of a piece. `lane`: the way from the device, if there is one."""
        self._size = size
        self._lane = lane
        self._buffers: list[Tensor] = []

    def pieces(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yields the bytes of a tensor. A piece is valid until the next one is asked for."""
        parts = torch.split(_as_bytes(tensor), self._size)
        lane = self._lane
        if lane is None or not lane.is_there(tensor):
            yield from parts
            return
        if not self._buffers:
            self._buffers = [lane.buffer(self._size) for _ in range(BUFFERS)]
        started: deque[tuple[Tensor, Callable[[], None]]] = deque()
        for number, part in enumerate(parts):
            buffer = self._buffers[number % BUFFERS][: len(part)]
            started.append((buffer, lane.fetch(part, buffer)))
            if len(started) == BUFFERS:
                yield _arrived(started)
        while started:
            yield _arrived(started)

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a copy on the host."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        rest = _as_bytes(copy)
        for piece in self.pieces(tensor):
            rest[: len(piece)] = piece
            rest = rest[len(piece) :]
        return copy


class CudaHostLane:
    """The way from a GPU, through pinned memory."""

    def is_there(self, tensor: Tensor) -> bool:
        """Whether the tensor lies on the device."""
        return tensor.is_cuda

    def buffer(self, size: int) -> Tensor:
        """Returns a buffer of so many bytes."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def fetch(self, source: Tensor, buffer: Tensor) -> Callable[[], None]:
        """Starts a copy. Returns a function that waits for it."""
        buffer.copy_(source, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(source.device))
        return event.synchronize


def _arrived(started: deque[tuple[Tensor, Callable[[], None]]]) -> Tensor:
    buffer, wait = started.popleft()
    wait()
    return buffer


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
