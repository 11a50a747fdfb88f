"""The planner's state, and limits on a stage's workers for a while after a failed change: `WorkerCap`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sluice.agent.costs.stage_cost import StageCost
from sluice.agent.planner_settings import DEFAULT, PlannerSettings
from sluice.agent.policies.planner.trial_change import TrialChange
from sluice.agent.tunable import Reason
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot


@dataclass(frozen=True, slots=True)
class Look:
    """A snapshot, and the tick at which it was taken."""

    tick: float
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class WorkerCap:
    """The fewest and most workers that a stage may have until a tick."""

    least: int
    most: int
    until: float


def caps_after_failure(state: PlannerState, trial: TrialChange) -> dict[str, WorkerCap]:
    """Returns the caps after a failed change. A stage that grew may not grow again for a while, and one that shrank may
    not shrink."""
    caps, until = dict(state.caps), state.tick + state.settings.cap_ticks
    for name, count in state.knobs.workers.items():
        (least, most), before = state.limits.workers[name], trial.before.workers[name]
        if count > before:
            caps[name] = WorkerCap(least, before, until)
        elif count < before:
            caps[name] = WorkerCap(before, most, until)
    return caps


def caps_of_throttled(state: PlannerState, snapshot: Snapshot) -> Mapping[str, WorkerCap]:
    """Returns the caps after this look. If a store has refused requests since the last look, the stage that sends them
    may not grow for a while."""
    if state.last is None or snapshot.throttled <= state.last.throttled:
        return state.caps
    name = state.limits.asking
    cap = WorkerCap(
        state.limits.workers[name][0],
        state.knobs.workers[name],
        state.tick + state.settings.cap_ticks,
    )
    return {**state.caps, name: cap}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerState:
    """All that the planner knows. Times are counted in ticks (`PlannerSettings`)."""

    limits: Limits
    knobs: Knobs
    services: Mapping[str, StageCost]
    settings: PlannerSettings = DEFAULT
    last: Snapshot | None = None
    reported: Snapshot | None = None
    """`last` as it was reported, if remote workers do a part of the work."""
    start_s: float = 0.0
    """Measured seconds until a remote worker has started. 0: not measured."""
    window: tuple[Look, ...] = ()
    """The latest looks since the last change of knobs."""
    age: float = 0
    """Ticks since the last change."""
    tick: float = 0
    other_cpu: float = 0.0
    average_rows_per_s: float = 0.0
    """Recent averages: `other_cpu`, the cores in use that no stage accounts for, such as the trainer's, and the rows a
    second meanwhile."""
    demands: tuple[float, ...] = ()
    """Recent rates that the trainer could have taken. The largest counts, because an evaluation is no lack of
    demand."""
    trial: TrialChange | None = None
    caps: Mapping[str, WorkerCap] = field(default_factory=dict)
    """Stage → limits on its workers, because a change failed or workers were taken away."""
    tried: frozenset[tuple[str, int | str]] = (
        frozenset()
    )  # stages at so many workers, or on a back end
    unexplained: frozenset[str] = frozenset()
    """Stages whose costs changed soon after the last change of knobs, which may have been the cause."""
    changed: frozenset[str] = frozenset()
    """Stages whose costs have changed by themselves since the last change of knobs."""
    events: int = 0
    """How often costs have changed by themselves, or cores were taken away."""
    quiet_until: float = 0
    failures: int = 0
    release_looks: float = 0
    """Ticks in a row in which fewer workers would have been enough."""
    release_since: float = 0.0
    """When the first of these ticks was, by the snapshots' clock."""
    needed: Mapping[str, int] = field(default_factory=dict)
    """The most remote workers of each stage that were needed since then."""

    def allowed(self, name: str) -> tuple[int, int]:
        """Returns the fewest and most workers that a stage may have, by its limits and its cap."""
        least, most = self.limits.workers[name]
        cap = self.caps.get(name)
        if cap is not None and self.tick < cap.until:
            return max(least, cap.least), min(most, cap.most)
        return least, most

    @property
    def unchanged(self) -> bool:
        """Whether no knob has changed since the run began."""
        return self.age == self.tick

    @property
    def is_starting(self) -> bool:
        """Whether workers of the last change may still be starting."""
        return self.trial is not None and self.age < self.trial.start_up

    @property
    def other_cpu_s(self) -> float:
        """Processor seconds a row that no stage accounts for."""
        return self.other_cpu / self.average_rows_per_s if self.average_rows_per_s > 0 else 0.0


def ticks(seconds: float) -> float:
    """Returns the ticks of a look: its seconds to a hundredth, but one at most.

    A longer interval means that items take long. It has no more information than a second with short items."""
    return min(1.0, round(seconds, 2))


def seen(
    window: tuple[Look, ...], snapshot: Snapshot, tick: float, settings: PlannerSettings
) -> tuple[Look, ...]:
    """Returns the window with one more look, without old ones."""
    return tuple(
        look
        for look in (*window, Look(tick, snapshot))
        if look.tick > tick - (settings.patience_ticks + 1)
    )


Decision = tuple[Knobs, PlannerState, Reason]
"""The knobs from now on, the next state, and why."""
