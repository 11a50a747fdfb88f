"""The properties of each stage before a pipeline runs: `StageSpec`. To add a stage, begin here.

The pipeline, its memory estimate, its limits for tuning and its simulation use these. Standard library only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from sluice.ingest.knobs import BACKENDS, DECODE, FETCH, REMOTE, Knobs, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage: how many workers it may have, where they may run, and how much may wait after it."""

    name: str
    buffer_limit: str
    """What limits the bytes that wait after it: the knob of this name, or one series. After the last one,
    `prefetch_bytes` limits them. `workers`: what waits and what workers are at is one item for each worker."""
    workers_a_core: int = 2
    """The most workers for each core. The stage's limit is this or `workers`, whichever is more."""
    workers: int = 1
    """The most workers on any number of cores. Workers that wait for a store or a service need no core."""
    for_each_core: int = 0
    """How many workers it starts with for each core. 0: it starts with one worker."""
    transforms: bool = False
    """Whether it runs a user's or a table's functions."""
    backends: tuple[str, ...] = ("thread",)
    """Where its workers may run. They start in the first of these."""

    def first_workers(self, cores: int) -> int:
        return self.for_each_core * cores or 1


_FETCHING = StageSpec(
    name=FETCH, buffer_limit="workers", workers=64, workers_a_core=8, for_each_core=4
)
DECODING = StageSpec(
    name=DECODE, buffer_limit="read_ahead_bytes", workers=64, workers_a_core=8, for_each_core=1
)


def transform(
    name: str,
    *,
    movable: bool,
    limited: bool = False,
    remote: bool = False,
) -> StageSpec:
    """Returns a transform stage. `movable`: processes can do its work. `limited`: only processes can.
    `remote`: remote workers can."""
    here = BACKENDS if movable else ("thread",)
    return StageSpec(
        name=name,
        buffer_limit="series",
        workers=64 if remote else 16,
        workers_a_core=4,
        transforms=True,
        backends=("process",) if limited else (*here, *((REMOTE,) if remote else ())),
    )


def pipeline(
    transforms: Sequence[StageSpec],
    *,
    rows: Sequence[StageSpec] = (),
    fetches: bool = False,
    remote: bool = False,
) -> tuple[StageSpec, ...]:
    """Returns all stages of a pipeline, in order: `rows` are functions over rows. `fetches`: a
    store is far, so decoding never waits. `remote`: remote workers can read."""
    decoding = replace(DECODING, backends=(REMOTE, "thread")) if remote else DECODING
    return (
        *((_FETCHING,) if fetches else ()),
        replace(decoding, workers=1, workers_a_core=1) if fetches else decoding,
        *rows,
        *transforms,
    )


def first_knobs(stages: Collection[StageSpec], cores: int) -> Knobs:
    """Returns the knobs at the start on `cores` cores."""
    return Knobs(
        workers={stage.name: stage.first_workers(cores) for stage in stages},
        backend={
            stage.name: stage.backends[0] for stage in stages if stage.backends[0] != "thread"
        },
    )


def limits_of(stages: Sequence[StageSpec], cores: int, backends: tuple[str, ...]) -> Limits:
    """Returns the limits of the knobs on `cores` cores. `backends` are those that this machine can use. A stage that
    can use none of them keeps its own, because its limits need processes."""
    return Limits(
        workers={s.name: (1, max(s.workers, s.workers_a_core * cores)) for s in stages},
        backends={
            s.name: tuple(b for b in s.backends if b in (*backends, REMOTE)) or s.backends
            for s in stages
            if s.backends != ("thread",)
        },
    )
