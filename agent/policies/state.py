"""What the planner remembers from one snapshot to the next: `State`. Frozen: each decision makes a new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agent.attempt import Attempt
from agent.policies.held import Held
from agent.service import Service
from ingest.knobs import Knobs, Limits
from ingest.stats import Snapshot

WINDOW = 6  # snapshots over which rates are taken
SPARE = 5  # snapshots in a row that must show workers to spare before some are given back


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Times are counted in snapshots."""

    limits: Limits
    knobs: Knobs
    services: Mapping[str, Service]
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
    trial: Attempt | None = None
    held: Mapping[str, Held] = field(default_factory=dict)
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

    def undecided(self, before: State) -> State:
        """What was learned, as though nothing had been changed; `before` is the state before the decision."""
        window = (*before.window, *((self.last,) if self.last else ()))[-WINDOW:]
        return replace(before, services=self.services, last=self.last, tick=self.tick, age=before.age + 1,
                       window=window, other_cpu=self.other_cpu, passed=self.passed)
