"""A change on trial: what it should bring, and whether it did: `TrialChange`. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.agent.costs.rates import PipelineRates
from sluice.agent.planner_settings import DEFAULT, PlannerSettings
from sluice.ingest.knobs import Knobs


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialChange:
    """A change whose effect is being measured. `kind` is grow, probe, switch, release or memory."""

    kind: str
    before: Knobs
    rows_per_s: float
    """The rate before the change. `predicted` is the expected rate."""
    predicted: float
    start_up: float = 0
    """Ticks that its workers take to start, as processes do."""
    settings: PlannerSettings = DEFAULT

    @property
    def rises(self) -> bool:
        return self.kind not in ("release", "memory")

    def leaves_alone(self, stage: str, knobs: Knobs) -> bool:
        """Returns whether the change, to these knobs, left the workers of this stage as they were."""
        return all(
            getattr(self.before, name).get(stage) == getattr(knobs, name).get(stage)
            for name in ("workers", "backend")
        )

    def explains(self, stage: str, knobs: Knobs, age: float) -> bool:
        """Returns whether the change, to these knobs, may have made a stage dearer after so many ticks.

        The stage has other workers, or the new workers of others have just begun to share the lock with it."""
        return not self.leaves_alone(stage, knobs) or self.is_new(age)

    def is_new(self, age: float) -> bool:
        """Returns whether its workers may still start, or have just begun to work."""
        return age <= self.start_up + self.settings.settle_ticks

    @property
    def hoped(self) -> float:
        return self.predicted / self.rows_per_s

    def gain(self, recent: PipelineRates) -> float:
        return recent.rows_per_s / self.rows_per_s

    def verdict(self, age: float, recent: PipelineRates) -> bool | None:
        """True: keep the change; False: undo it; None: wait and see. `age` counts ticks since the change."""
        gain = self.gain(recent)
        settings = self.settings
        fed = recent.stall <= settings.negligible_share
        clear = gain >= (
            1 + settings.mostly_share * (self.hoped - 1) if self.rises else 1 - settings.min_gain
        )
        wait = settings.settle_ticks if clear or fed else self.start_up + settings.patience_ticks
        if age < wait:
            return None
        return (
            clear
            or fed
            or self.kind == "memory"
            or gain >= (1 + settings.min_gain if self.rises else 1 / settings.min_gain_ratio)
        )

    def crashed(self, age: float, rates: PipelineRates) -> bool:
        """Returns whether the latest interval shows harm, once all workers have started."""
        return (
            self.rises
            and not self.is_new(age)
            and rates.stall > self.settings.negligible_share
            and self.gain(rates) < self.settings.mostly_share
        )
