"""Copies batches to a device while the previous step runs: `on_device(loader, "cuda")`.

A batch lies in memory that is reused, so it is first copied into pinned memory. A separate stream copies it from there
to the device. The consumer's stream waits for that copy. The consumer itself does not wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch

from sluice.ingest.batch import TENSORS, Batch


class DeviceError(ValueError):
    """A device does not exist. The message lists those that do."""


class CopyMark(Protocol):
    """Marks the end of all copies that were sent so far."""

    def passed(self) -> bool: ...
    def before_use(self, tensors: list[torch.Tensor]) -> None:
        """Makes the consumer's further work on the tensors wait for the mark."""


class Lane(Protocol):
    """A stream to a device. `send` returns at once. Its source must not change until a later mark has passed."""

    def pinned(self, size: int, kind: torch.dtype) -> torch.Tensor: ...
    def send(self, source: torch.Tensor) -> torch.Tensor: ...
    def mark(self) -> CopyMark: ...


class BatchSource(Protocol):
    """The parts of a loader that `OnDevice` uses."""

    def __iter__(self) -> Iterator[Batch]: ...
    def __len__(self) -> int: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class OnDevice:
    """Sends a loader's batches through a lane, `ahead` batches before the consumer asks. Its state belongs to the batch
    that the consumer has."""

    def __init__(self, loader: BatchSource, lane: Lane, ahead: int = 1):
        if ahead < 1:
            raise DeviceError(f"ahead: {ahead} is not a positive number of batches")
        self._loader = loader
        self._lane = lane
        self._ahead = ahead
        self._state: dict[str, Any] | None = None
        self._idle: dict[torch.dtype, list[torch.Tensor]] = {}
        self._lent: deque[tuple[CopyMark, list[torch.Tensor]]] = deque()
        self._constant: tuple[torch.Tensor, torch.Tensor] | None = None
        self.bytes = 0
        """The number of bytes sent so far."""

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        under_way: deque[tuple[Batch, CopyMark, dict[str, Any]]] = deque()
        batches = iter(self._loader)
        try:
            while True:
                while len(under_way) <= self._ahead and (batch := next(batches, None)) is not None:
                    under_way.append((*self._sent(batch), self._loader.state_dict()))
                if not under_way:
                    return
                ready, mark, self._state = under_way.popleft()
                mark.before_use([getattr(ready, name) for name in TENSORS])
                yield ready
        finally:
            batches.close()  # type: ignore[attr-defined] # a loader iterates by a generator

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next batch."""
        return self._loader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state into the loader."""
        self._loader.load_state_dict(state)
        self._state = None

    def _sent(self, batch: Batch) -> tuple[Batch, CopyMark]:
        held: list[torch.Tensor] = []
        tensors: dict[str, Any] = {
            name: self._copy(getattr(batch, name), held) for name in TENSORS if name != "lengths"
        }
        # Without bags, all batches share one tensor.
        if self._constant is None or self._constant[0] is not batch.lengths:
            self._constant = batch.lengths, self._copy(batch.lengths, held)
        mark = self._lane.mark()
        self._lent.append((mark, held))
        return replace(batch, lengths=self._constant[1], **tensors), mark

    def _copy(self, tensor: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        """Copies a tensor through pinned memory. Keeps its layout: dense features lie feature by feature."""
        turned = tensor.dim() == 2 and not tensor.is_contiguous()
        flat = tensor.t() if turned else tensor
        stage = self._stage(flat.numel(), tensor.dtype)
        held.append(stage)
        part = stage[: flat.numel()].view(flat.shape)
        part.copy_(flat)
        self.bytes += part.nbytes
        sent = self._lane.send(part)
        return sent.t() if turned else sent

    def _stage(self, size: int, kind: torch.dtype) -> torch.Tensor:
        """Returns pinned memory that is not in use by a copy."""
        while self._lent and self._lent[0][0].passed():
            for stage in self._lent.popleft()[1]:
                self._idle.setdefault(stage.dtype, []).append(stage)
        idle = self._idle.setdefault(kind, [])
        for at, stage in enumerate(idle):
            if stage.numel() >= size:
                return idle.pop(at)
        return self._lane.pinned(size, kind)


class CudaLane:
    """A side stream to a GPU."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, size: int, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=kind, pin_memory=True)

    def send(self, source: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            return source.to(self._device, non_blocking=True)

    def mark(self) -> CopyMark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaMark(event, self._device)


class _CudaMark:
    def __init__(self, event: torch.cuda.Event, device: torch.device):
        self._event, self._device = event, device

    def passed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def before_use(self, tensors: list[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        for tensor in tensors:
            # The memory is not reused while the consumer's work is queued.
            tensor.record_stream(stream)


def on_device(loader: BatchSource, device: str | torch.device, ahead: int = 1) -> BatchSource:
    """Returns the loader itself for "cpu". For a GPU, returns its batches on the device, sent `ahead` batches early."""
    device = torch.device(device)
    if device.type == "cpu":
        return loader
    if device.type != "cuda" or not torch.cuda.is_available():
        others = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
        raise DeviceError(
            f"device {device}: there is no such device here; take {', '.join(['cpu', *others])}"
        )
    return OnDevice(loader, CudaLane(device), ahead)
