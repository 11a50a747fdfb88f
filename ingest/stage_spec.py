"""What is known of each stage of a pipeline before it runs: `StageSpec`. The pipeline, the memory that it needs, the
limits within which it is tuned, and its simulation read these lines; a stage is added here. Standard library only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sluice.ingest.knobs import BACKENDS, PLACES, REMOTE, Limits

ROOMS = ("read_ahead_bytes", "window", "stretch", "prefetch_bytes")


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
    """Whether it is made of a user's or a table's functions."""
    fusable: bool = False
    """Whether the workers of the stage before it can do its work as well (`Knobs.fused`)."""
    begins_fused: bool = False
    """Whether they do so until somebody splits the two."""
    backends: tuple[str, ...] = ("thread",)
    """Where its workers may run, the first being where they begin."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name: {self.name!r} is not a name")
        object.__setattr__(self, "backends", tuple(self.backends))
        if not self.backends or any(b not in PLACES for b in self.backends):
            raise ValueError(
                f"{self.name}: backends: {list(self.backends)!r} are not among {list(PLACES)}"
            )
        if self.room not in ROOMS:
            raise ValueError(f"{self.name}: room: {self.room!r} is not one of {', '.join(ROOMS)}")
        if self.workers < 1 or self.workers_a_core < 0:
            raise ValueError(
                f"{self.name}: workers: {self.workers} and {self.workers_a_core} a core are too few"
            )

    def most_workers(self, cores: int) -> int:
        return max(self.workers, self.workers_a_core * cores)

    def first_workers(self, cores: int) -> int:
        return cores if self.for_each_core else 1

    @property
    def holds_stretches(self) -> bool:
        """Whether what it makes are batches on their way, of which one is done while it works on another."""
        return self.room in ("stretch", "prefetch_bytes")


READ = StageSpec(
    name="read", room="read_ahead_bytes", workers=64, workers_a_core=8, for_each_core=True
)
SHUFFLE = StageSpec(name="shuffle", room="window", fusable=True, begins_fused=True)
BATCH = StageSpec(name="batch", room="stretch")
COLLATE = StageSpec(
    name="collate", room="prefetch_bytes", workers_a_core=0
)  # it only hands batches over


def transform(name: str, *, movable: bool, remote: bool = False) -> StageSpec:
    """A stage of transforms. `remote` says whether workers elsewhere can do its work, too."""
    return StageSpec(
        name=name,
        room="stretch",
        workers=64 if remote else 16,
        workers_a_core=4,
        transforms=True,
        backends=(*(BACKENDS if movable else ("thread",)), *((REMOTE,) if remote else ())),
    )


def pipeline(transforms: Sequence[StageSpec], *, remote: bool = False) -> tuple[StageSpec, ...]:
    """All stages of a pipeline, in order. Transforms that follow each other may do each other's work. `remote` says
    whether there are workers elsewhere that can read."""
    read = replace(READ, backends=(REMOTE, "thread")) if remote else READ
    return (
        read,
        SHUFFLE,
        BATCH,
        *(replace(one, fusable=n > 0) for n, one in enumerate(transforms)),
        COLLATE,
    )


def limits_of(stages: Sequence[StageSpec], cores: int, backends: tuple[str, ...]) -> Limits:
    """The limits of the knobs on so many cores. `backends` are those that the machine has room for."""
    return Limits(
        workers={s.name: (1, s.most_workers(cores)) for s in stages},
        backends={
            s.name: tuple(b for b in s.backends if b in (*backends, REMOTE))
            for s in stages
            if s.backends != ("thread",)
        },
        fusable={
            after.name: before.name for before, after in itertools.pairwise(stages) if after.fusable
        },
    )
