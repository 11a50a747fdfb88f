"""Decides beforehand how much memory of a host a checkpoint may take: `SaveMemory`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice.dlrm.checkpoint.host_pieces import BUFFERS
from sluice.dlrm.checkpoint.meta import CheckpointError
from sluice.ingest.knobs import format_bytes
from sluice.ingest.machine import Machine

if TYPE_CHECKING:
    from sluice.dlrm.run_plan import RunPlan

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


def planned_save(plan: RunPlan, local_ranks: int) -> SaveMemory:
    """Returns what a checkpoint of a planned run needs on its fullest host, if each host is like this one."""
    placed = plan.placement
    ranks = [placed.bytes_on(rank) + placed.host_bytes_on(rank) for rank in range(placed.ranks)]
    hosts = [
        sum(ranks[first : first + local_ranks]) for first in range(0, placed.ranks, local_ranks)
    ]
    # Adam keeps two numbers for each parameter of the dense layers.
    return SaveMemory(
        ranks=local_ranks,
        state_bytes=max(hosts) + 3 * 4 * plan.count.parameters,
        free_bytes=Machine().memory_free(),
    )
