"""Makes a simulated pipeline of a recorded run: `fit_run` returns it as a scenario that any policy can run in.

Time is the trainer's clock: the time that the consumer waited or computed. Each period of the run has its own costs. A
period ends where the agent noticed a change that it had not made, or where a fault was injected. Each stage keeps the
back end in which it did most of its work, because a run says too little of the others."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sluice.agent.costs.rates import rates
from sluice.agent.report.looks import RecordedLook, Start
from sluice.agent.simulator.calibration import CalibrationError, Sighting, fit
from sluice.agent.simulator.physics import TrueCosts
from sluice.agent.simulator.scenario import Scenario
from sluice.agent.tunable import Policy, Reason
from sluice.ingest.knobs import REMOTE, Knobs, Limits
from sluice.ingest.stats import Snapshot

_SHORTEST_S = 5.0
"""A shorter period belongs to the one before it: an injected fault and the look that noticed it."""
_AWAY = 0.1
"""An interval whose consumer was away for a larger share of the time is not fitted."""
_LONGEST_S = 3600.0
"""The simulator runs at most this much of a run."""


@dataclass(frozen=True, kw_only=True)
class FittedRun(Scenario):
    """The simulated pipeline of a run. Its times are those of the trainer's clock."""

    costs: tuple[tuple[float, TrueCosts], ...]
    """The true costs of each period, with its start."""
    decisions: tuple[tuple[float, Knobs], ...]
    """The recorded knobs, each with the time from which they were in force."""
    known_limits: Limits
    known_knobs: Knobs
    """The knobs at the start."""
    rows_per_s: float
    """The recorded rate."""
    backends: tuple[str, ...]
    """The stages that the run had in processes most of the time. They stay there."""

    def truth_at(self, seconds: float) -> TrueCosts:
        return next(truth for at, truth in reversed(self.costs) if at <= max(0.0, seconds))

    @cached_property
    def limits(self) -> Limits:
        return self.known_limits

    @cached_property
    def first_knobs(self) -> Knobs:
        return self.known_knobs


class RecordedDecisions(Policy):
    """Makes the recorded decisions again, each at its time."""

    name = "recorded decisions"

    def __init__(self, run: FittedRun) -> None:
        self._decisions = run.decisions

    def initial(self, limits: Limits, knobs: Knobs) -> None:
        return None

    def decide(self, snapshot: Snapshot, state: None) -> tuple[Knobs, None, Reason]:
        knobs = next(one for at, one in reversed(self._decisions) if at <= snapshot.at)
        return knobs, None, Reason(text="as recorded")


def fit_run(starts: Sequence[Start], changes: Sequence[float]) -> FittedRun:
    """Returns the simulated pipeline of these looks. `changes` are the times at which a period ends.

    Raises CalibrationError if the looks show too little."""
    looks = _of_longest_pipeline([one for start in starts for one in start.looks])
    if len(looks) < 3:
        raise CalibrationError(
            f"{len(looks)} looks with rows are too few to fit a simulated pipeline; record a longer run"
        )
    backends = _usual_backends(looks)
    if REMOTE in backends.values():
        raise CalibrationError("stages on remote workers cannot be simulated")
    begin = _clock(looks[0].snapshot)
    times = [_clock(one.snapshot) - begin for one in looks]
    seconds = min(times[-1], _LONGEST_S)
    last = max(i for i, at in enumerate(times) if at <= seconds)
    bounds = _periods(looks, times, changes)
    found: list[tuple[float, TrueCosts]] = []
    for first, end in itertools.pairwise([*bounds, len(looks) - 1]):
        sightings = list(_sightings(looks[first : end + 1], backends))
        if sightings:
            found.append((times[first] if found else 0.0, fit(sightings)))
    if not found or seconds <= 0:
        raise CalibrationError(
            "no interval of the run shows rows with unchanged knobs; record a longer run"
        )
    (start,) = (start for start in starts if any(one is looks[0] for one in start.looks))
    limits = replace(start.limits, backends={})
    truth = found[0][1]
    earlier = [one.knobs for one in start.looks if one.at < looks[0].at]
    return FittedRun(
        name="recorded run",
        seconds=max(1.0, round(seconds)),
        machine=truth.machine,
        consumer=truth.consumer,
        stages=truth.stages,
        costs=tuple(found),
        decisions=tuple(
            (at, limits.clamp(one.knobs)) for at, one in zip(times, looks, strict=True)
        ),
        known_limits=limits,
        known_knobs=limits.clamp([start.knobs, *earlier][-1]),
        rows_per_s=(looks[last].snapshot.rows - looks[0].snapshot.rows) / times[last],
        backends=tuple(stage for stage, kind in backends.items() if kind != "thread"),
    )


def _clock(snapshot: Snapshot) -> float:
    return snapshot.consumer_wait_s + snapshot.consumer_compute_s


def _of_longest_pipeline(looks: Sequence[RecordedLook]) -> list[RecordedLook]:
    """Returns the looks with rows at one pipeline. A run that follows a table has several, one after the other."""
    groups: list[list[RecordedLook]] = [[]]
    for one in looks:
        if groups[-1] and not _continues(groups[-1][-1].snapshot, one.snapshot):
            groups.append([])
        if one.snapshot.rows:
            groups[-1].append(one)
    return max(groups, key=len)


def _continues(before: Snapshot, after: Snapshot) -> bool:
    names = [[stage.name for stage in one.stages] for one in (before, after)]
    return names[0] == names[1] and rates(before, after) is not None


def _usual_backends(looks: Sequence[RecordedLook]) -> dict[str, str]:
    """Returns for each stage the back end that it had in most looks."""
    seen = [(stage.name, stage.backend) for one in looks for stage in one.snapshot.stages]
    # The rarest come first, so the most frequent one stays.
    return dict(one for one, _ in reversed(Counter(seen).most_common()))


def _periods(
    looks: Sequence[RecordedLook], times: Sequence[float], changes: Sequence[float]
) -> list[int]:
    """Returns the first look of each period."""
    bounds = [0]
    for change in sorted(changes):
        at = next((i for i, one in enumerate(looks) if one.at >= change), len(looks) - 1)
        if min(times[at] - times[bounds[-1]], times[-1] - times[at]) >= _SHORTEST_S:
            bounds.append(at)
    return bounds


def _sightings(looks: Sequence[RecordedLook], backends: dict[str, str]) -> Iterator[Sighting]:
    """Returns a sighting for each stretch with the same knobs. It leaves out the first interval of a long stretch."""
    usable = [
        (before, after)
        for before, after in itertools.pairwise(looks)
        if _is_usable(before, after, backends)
    ]
    stretches: list[list[tuple[RecordedLook, RecordedLook]]] = []
    for one in usable:
        last = stretches[-1][-1] if stretches else None
        if last is None or last[1] is not one[0] or last[0].knobs != one[0].knobs:
            stretches.append([])
        stretches[-1].append(one)
    for stretch in stretches:
        first = min(1, len(stretch) - 1)
        yield Sighting(
            stretch[0][0].knobs,
            stretch[first][0].snapshot,
            stretch[-1][1].snapshot,
        )


def _is_usable(before: RecordedLook, after: RecordedLook, backends: dict[str, str]) -> bool:
    measured = rates(before.snapshot, after.snapshot)
    return (
        measured is not None
        and measured.rows_per_s > 0
        and measured.away <= _AWAY
        and not any(stage.starting for stage in after.snapshot.stages)
        and all(stage.backend == backends[stage.name] for stage in before.snapshot.stages)
    )
