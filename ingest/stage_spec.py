"""What is known of each stage of a pipeline before it runs: `StageSpec`. The pipeline, the memory that it needs, its
limits and what is told of it read these lines; a stage is added here. Standard library only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from sluice.ingest.knobs import Limits

ROOMS = ("read_ahead_bytes", "window", "stretch", "prefetch_bytes")
ONLINE = "online"
"""The stage that applies the operators which a table leaves to the loader; its name begins so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage: how many workers it may have, where they may run, and what may wait behind it."""

    name: str
    room: str
    """What bounds the bytes that wait behind it: the knob of that name, a window of each stream, or one stretch."""
    workers_a_core: int = 2
    """Its most workers, for each core …"""
    workers: int = 1
    """… or, if that is more, whatever the cores: who waits for a store or a service takes none."""
    for_each_core: bool = False
    """Whether it begins with a worker for each core; the others begin with one."""
    transforms: bool = False
    """Whether it is made of a user's or a table's functions. Such stages may do each other's work (`Knobs.fused`)."""
    begins_fused: bool = False
    """Whether the workers of the stage before it do its work until somebody splits the two."""
    movable: bool = False
    """Whether it can also run in processes."""

    def __post_init__(self) -> None:
        if self.room not in ROOMS:
            raise ValueError(f"{self.name}: room: {self.room!r} is not one of {', '.join(ROOMS)}")
        if self.workers < 1 or self.workers_a_core < 0:
            raise ValueError(f"{self.name}: workers: {self.workers} and {self.workers_a_core} a core are too few")

    def most_workers(self, cores: int) -> int:
        return max(self.workers, self.workers_a_core * cores)

    def first_workers(self, cores: int) -> int:
        return cores if self.for_each_core else 1

    @property
    def holds_stretches(self) -> bool:
        """Whether what it makes are batches on their way, of which one is done while it works on another."""
        return self.room in ("stretch", "prefetch_bytes")


READ = StageSpec(name="read", room="read_ahead_bytes", workers=64, workers_a_core=8, for_each_core=True)
SHUFFLE = StageSpec(name="shuffle", room="window", begins_fused=True)
BATCH = StageSpec(name="batch", room="stretch")
COLLATE = StageSpec(name="collate", room="prefetch_bytes", workers_a_core=0)  # it only hands batches over


def transform(name: str, *, movable: bool) -> StageSpec:
    """A stage of transforms."""
    return StageSpec(name=name, room="stretch", workers=16, workers_a_core=4, transforms=True, movable=movable)


def pipeline(transforms: Sequence[StageSpec]) -> tuple[StageSpec, ...]:
    """All stages of a pipeline, in order."""
    return (READ, SHUFFLE, BATCH, *transforms, COLLATE)


def limits_of(stages: Sequence[StageSpec], cores: int, backends: tuple[str, ...]) -> Limits:
    """The limits of the knobs on so many cores; `backends` are those of stages that can be moved."""
    neighbours = [(a, b) for a, b in itertools.pairwise(stages) if b.begins_fused or (a.transforms and b.transforms)]
    return Limits(workers={s.name: (1, s.most_workers(cores)) for s in stages},
                  backends={s.name: backends for s in stages if s.movable},
                  fusable={after.name: before.name for before, after in neighbours})
