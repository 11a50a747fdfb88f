"""Workers that a stage may not have for a while, as a change that failed taught, or for thinning out: `WorkerCap`.
Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sluice.agent.costs.contention import CONTENDED, Contention
from sluice.agent.costs.rates import PipelineRates
from sluice.agent.costs.stage_cost import StageCost, between
from sluice.agent.policies.planner.trial_change import TrialChange
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

BENT = 0.75  # of a row's cost now was enough with fewer workers: they disturb each other
FORGIVE = 400  # snapshots for which a stage's failed change is not tried again
DOUBT = 30  # the same where others use the cores: they may have been the cause (doubled with each failure in a row)


@dataclass(frozen=True, slots=True)
class WorkerCap:
    """Workers that a stage may have, until that tick."""

    least: int
    most: int
    until: int
    slow: float = 0.0
    """How slow the cores were for us, if that was why, and `before`: the most it may have once they are much freer."""
    before: int = 0

    def eased(self, slow: float, tick: int) -> WorkerCap:
        """As the cores are now. That they are freer may be because there are fewer of us."""
        return WorkerCap(self.least, self.before, tick + DOUBT) if slow * CONTENDED < self.slow else self


def taught(state: PlannerState, before: Knobs, since: PipelineRates) -> dict[str, WorkerCap]:
    """What a failed change taught. Stages that were grown until their workers disturbed each other may have no more
    than half-way to that, by ratio, and so may all if other programs may have been the cause; where there is none such,
    each stage that was moved stays on the side it was."""
    contended = Contention.of(since).slow >= CONTENDED
    held, until = dict(state.held), state.tick + (min(FORGIVE, DOUBT * 2**state.failures) if contended else FORGIVE)
    grown = {n: (before.workers[n], now) for n, now in state.knobs.workers.items() if now > before.workers[n]}
    bent = {n: between(then, now) for n, (then, now) in grown.items()
            if state.services[n].points and state.services[n].busy_s(now) * BENT > state.services[n].busy_s(then)}
    for name, most in (bent or {n: between(*both) if contended else both[0] for n, both in grown.items()}).items():
        held[name] = WorkerCap(state.limits.workers[name][0], most, until)
    for name, now in state.knobs.workers.items():
        if now < before.workers[name]:
            held[name] = WorkerCap(before.workers[name], state.limits.workers[name][1], until)
    return held


WINDOW = 6  # snapshots over which rates are taken
SPARE = 5  # snapshots in a row that must show workers to spare before some are given back


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerState:
    """Times are counted in snapshots."""

    limits: Limits
    knobs: Knobs
    services: Mapping[str, StageCost]
    last: Snapshot | None = None
    window: tuple[Snapshot, ...] = ()
    """The latest snapshots that show the present knobs alone."""
    age: int = 0
    """Snapshots since the last change."""
    tick: int = 0
    other_cpu: float = 0.0
    passed: float = 0.0
    """Cores in use that no stage accounts for, as for the trainer, and rows a second meanwhile: averages of late."""
    demands: tuple[float, ...] = ()
    """What the trainer would have taken lately. The largest counts: a pause for an evaluation is no lack of demand."""
    trial: TrialChange | None = None
    held: Mapping[str, WorkerCap] = field(default_factory=dict)
    """What a failed change taught of a stage, or that it was thinned out."""
    tried: frozenset[tuple[str, int | str]] = frozenset()  # stages at so many workers, or on a back end
    quiet_until: int = 0
    failures: int = 0
    spare: int = 0
    spare_needed: int = SPARE
    released: bool = False
    """The last change of size was a release. If it had to be taken back, the next one waits longer."""

    @property
    def other_cpu_s(self) -> float:
        """Processor seconds a row that no stage accounts for."""
        return self.other_cpu / self.passed if self.passed > 0 else 0.0

    def undecided(self, before: PlannerState) -> PlannerState:
        """What was learned, as though nothing had been changed; `before` is the state before the decision."""
        window = (*before.window, *((self.last,) if self.last else ()))[-WINDOW:]
        return replace(before, services=self.services, last=self.last, tick=self.tick, age=before.age + 1,
                       window=window, other_cpu=self.other_cpu, passed=self.passed)
