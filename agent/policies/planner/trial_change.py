"""A change on trial: what it should bring, and whether it did: `TrialChange`. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.agent.costs.contention import Contention
from sluice.agent.costs.rates import PipelineRates
from sluice.agent.planner_settings import DEFAULT, PlannerSettings
from sluice.ingest.knobs import Knobs


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialChange:
    """A change whose effect is being measured. `kind` is opening, own (what follows an opening that fell short),
    grow, probe, switch, fuse, split, release or memory."""

    kind: str
    before: Knobs
    rows_per_s: float
    """The rate before the change; `predicted` is the rate hoped for."""
    predicted: float
    slow: float = 0.0
    """How many times slower than with free cores our threads ran before the change."""
    start_up: float = 0
    """Ticks that its workers take to start, as processes do."""
    then: Knobs | None = None
    """What follows once one process of each stage was weighed; None: this is the whole change."""
    own: Knobs | None = None
    """Of an opening: what the planner would have chosen by itself, which promises `own_rows_per_s`. None: there is no
    such choice, and the change is judged by its gain alone."""
    own_rows_per_s: float = 0.0
    settings: PlannerSettings = DEFAULT

    @property
    def rises(self) -> bool:
        return self.kind in ("opening", "own", "grow", "probe", "switch", "fuse", "split")

    @property
    def hoped(self) -> float:
        return self.predicted / self.rows_per_s

    def gain(self, recent: PipelineRates) -> float:
        return recent.rows_per_s / self.rows_per_s

    def verdict(self, age: float, recent: PipelineRates) -> bool | None:
        """True: keep the change; False: undo it; None: wait and see. `age` counts ticks since the change."""
        gain, limits = self.gain(recent), self.settings
        fed = recent.stall <= limits.smooth
        if self.own is not None:
            # The planner's own choice is as good as its promise is true, so it is not kept waiting.
            return (
                None
                if age < limits.opened
                else recent.rows_per_s >= max(self.rows_per_s, limits.trusted * self.own_rows_per_s)
            )
        clear = (
            gain >= 1 + min(limits.clear_share * (self.hoped - 1), limits.clear)
            if self.rises
            else gain >= limits.clear_kept
        )
        if clear or fed:
            patience: float = limits.settle
        elif self._hurts(recent):
            patience = limits.hurt
        else:
            patience = limits.patience + self.start_up
        if age < patience:
            return None
        return (
            clear
            or fed
            or self.kind == "memory"
            or gain >= (1 + limits.least_gain if self.rises else limits.least_kept)
        )

    def fulfilled(self, recent: PipelineRates) -> bool:
        """Whether growing brought what was promised."""
        return self.kind in ("own", "grow") and self.gain(recent) >= 1 + self.settings.fulfilled * (
            self.hoped - 1
        )

    def _hurts(self, recent: PipelineRates) -> bool:
        return (
            self.rises
            and not self.start_up
            and self.gain(recent) < self.settings.harm
            and Contention.of(recent, self.settings).slow < self.settings.contended
        )

    def crashed(self, rates: PipelineRates) -> bool:
        """Whether the latest interval alone shows that the change does harm. Workers that start up are given time."""
        return (
            self.rises
            and not self.start_up
            and rates.stall > self.settings.smooth
            and self.gain(rates) < self.settings.crash
        )
