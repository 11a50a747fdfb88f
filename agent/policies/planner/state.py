"""The planner's state, and limits on a stage's workers for a while after a failed change: `WorkerCap`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sluice.agent.costs.contention import Contention
from sluice.agent.costs.rates import PipelineRates
from sluice.agent.costs.stage_cost import StageCost, between
from sluice.agent.planner_settings import DEFAULT, PlannerSettings
from sluice.agent.policies.planner.trial_change import TrialChange
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot


@dataclass(frozen=True, slots=True)
class WorkerCap:
    """The fewest and most workers that a stage may have until a tick."""

    least: int
    most: int
    until: int
    slow: float = 0.0
    """How slow the cores were for us, if that was the cause; `before` is the most workers once the cores are much
    freer."""
    before: int = 0

    def eased(self, slow: float, tick: int, settings: PlannerSettings) -> WorkerCap:
        """The cap as it should be with the cores as they are now. They may be freer only because we have fewer
        workers."""
        freer = slow * settings.contended < self.slow
        return WorkerCap(self.least, self.before, tick + settings.doubt) if freer else self


def caps_after_failure(state: PlannerState, before: Knobs, recent: PipelineRates) -> dict[str, WorkerCap]:
    """The caps that follow from a failed change. Stages that grew until their workers disturbed each other may grow at
    most half-way to that, by ratio, and so may all if other programs may have been the cause. If there are none, each
    stage that was changed stays on the side it was on."""
    settings = state.settings
    contended = Contention.of(recent, settings).slow >= settings.contended
    doubt = min(settings.forgive, settings.doubt * 2**state.failures)
    caps, until = dict(state.caps), state.tick + (doubt if contended else settings.forgive)
    grown = {n: (before.workers[n], count) for n, count in state.knobs.workers.items() if count > before.workers[n]}
    bent = {n: between(count_before, count) for n, (count_before, count) in grown.items()
            if (cost := state.services[n]).points and cost.busy_s(count) * settings.bent > cost.busy_s(count_before)}
    for name, most in (bent or {n: between(*both) if contended else both[0] for n, both in grown.items()}).items():
        caps[name] = WorkerCap(state.limits.workers[name][0], most, until)
    for name, count in state.knobs.workers.items():
        if count < before.workers[name]:
            caps[name] = WorkerCap(before.workers[name], state.limits.workers[name][1], until)
    return caps


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerState:
    """All that the planner knows. Times are counted in snapshots."""

    limits: Limits
    knobs: Knobs
    services: Mapping[str, StageCost]
    settings: PlannerSettings = DEFAULT
    last: Snapshot | None = None
    window: tuple[Snapshot, ...] = ()
    """The latest snapshots that show the present knobs alone."""
    age: int = 0
    """Snapshots since the last change."""
    tick: int = 0
    other_cpu: float = 0.0
    passed: float = 0.0
    """Recent averages: `other_cpu`, the cores in use that no stage accounts for, such as the trainer's, and the rows a
    second meanwhile."""
    demands: tuple[float, ...] = ()
    """What the trainer would have taken lately. The largest counts, as a pause for an evaluation is no lack of
    demand."""
    trial: TrialChange | None = None
    caps: Mapping[str, WorkerCap] = field(default_factory=dict)
    """Stage → limits on its workers, because a change failed or workers were taken away."""
    tried: frozenset[tuple[str, int | str]] = frozenset()  # stages at so many workers, or on a back end
    quiet_until: int = 0
    failures: int = 0
    spare: int = 0
    spare_needed: int = DEFAULT.spare
    released: bool = False
    """Whether the last change of size was a release. If it has to be taken back, the next one waits longer."""

    @property
    def other_cpu_s(self) -> float:
        """Processor seconds a row that no stage accounts for."""
        return self.other_cpu / self.passed if self.passed > 0 else 0.0

    def undecided(self, before: PlannerState) -> PlannerState:
        """This state with all that was learned, but as if nothing had been changed; `before` is the state before the
        decision."""
        window = (*before.window, *((self.last,) if self.last else ()))[-self.settings.window:]
        return replace(before, services=self.services, last=self.last, tick=self.tick, age=before.age + 1,
                       window=window, other_cpu=self.other_cpu, passed=self.passed)
