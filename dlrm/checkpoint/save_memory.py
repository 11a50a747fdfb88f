"""How a save uses the host's memory: `SaveMemory` decides beforehand, and `HostPieces` brings tensors to the host in
pieces of a limited size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sluice.dlrm.checkpoint.meta import CheckpointError
from sluice.ingest.knobs import format_bytes
from sluice.ingest.machine import Machine

if TYPE_CHECKING:
    from sluice.dlrm.footprint import Footprint

BUFFERS = 2
"""While one piece is used, the next one is on its way."""
MOST_PIECE_BYTES = 64 * 2**20
LEAST_PIECE_BYTES = 2**20
COPY_SHARE = 0.5
"""The part of the free memory that a copy may take. The loaders may use the rest while the copy is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveMemory:
    """What the ranks of one host write, and the memory that is free there."""

    ranks: int
    state_bytes: int
    """The bytes that all ranks of the host write."""
    free_bytes: int

    def __post_init__(self) -> None:
        least = self.ranks * BUFFERS * LEAST_PIECE_BYTES
        if self.free_bytes < least:
            raise CheckpointError(
                f"a checkpoint needs {format_bytes(least)} of the host's memory for its {self._who}, and "
                f"{format_bytes(max(0, self.free_bytes))} are free; give the loaders less by --memory-limit, or the "
                "host more"
            )

    @property
    def _who(self) -> str:
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}"

    @property
    def copies(self) -> bool:
        """Whether the host can hold a copy of the state, so that training goes on while the copy is written."""
        return self.state_bytes <= COPY_SHARE * self.free_bytes

    @property
    def piece_bytes(self) -> int:
        """The size of a piece on its way from the device: a power of two that fits for all ranks."""
        room = self.free_bytes // (self.ranks * BUFFERS)
        return min(MOST_PIECE_BYTES, 1 << (room.bit_length() - 1))

    @property
    def text(self) -> str:
        """Says what a checkpoint needs and how it will be written."""
        needs = (
            f"a checkpoint: a host's {self._who} must write {format_bytes(self.state_bytes)}; "
            f"{format_bytes(self.free_bytes)} of its memory are free"
        )
        if self.copies:
            return f"{needs}, so training goes on while a copy is written"
        return (
            f"{needs}, too little for a copy, so training stops while it is written in pieces of "
            f"{format_bytes(self.piece_bytes)}"
        )


def planned_save(plan: Footprint, local_ranks: int) -> SaveMemory:
    """Returns what a checkpoint of a planned run needs on its fullest host, if each host is like this one."""
    placed = plan.placement
    ranks = [
        sum(both) for both in zip(placed.loads("bytes"), placed.loads("host_bytes"), strict=True)
    ]
    hosts = [
        sum(ranks[first : first + local_ranks]) for first in range(0, placed.ranks, local_ranks)
    ]
    # Adam keeps two numbers for each parameter of the dense layers.
    return SaveMemory(
        ranks=local_ranks,
        state_bytes=max(hosts) + 3 * 4 * plan.parameters,
        free_bytes=Machine().memory_free(),
    )


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
