"""A change on trial: what it should bring, and whether it did: `TrialChange`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sluice.agent.costs.contention import CONTENDED, Contention
from sluice.agent.costs.rates import PipelineRates
from sluice.ingest.knobs import Knobs

SMOOTH = 0.02  # a stall up to this counts as none
LEAST_GAIN = 0.03  # least gain of a rise, or this share of the gain hoped for; with less it is undone
LEAST_KEPT = 0.93  # share of the rate that a release must keep
CLEAR = 0.3  # a gain above this is clear, however much was hoped for
CRASH = 0.5  # of the rows before: with less, a change is undone at once
SETTLE, PATIENCE = 2, 5  # snapshots before judging a clear gain, and before judging anything else
HURT, HARM = 3, 0.95  # snapshots for one with less than this of the rate before, if no other program takes the cores
START_UP = 3  # snapshots more for workers that have to start and import first


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialChange:
    """A change whose effect is being measured. `kind` is grow, probe, switch, fuse, split, release or memory."""

    kind: str
    before: Knobs
    rows_per_s: float
    """The rate before the change; `predicted` is the rate hoped for."""
    predicted: float
    stages: Mapping[str, float] = field(default_factory=dict)
    """Stage that got more workers → rows a second that it passed on before."""

    @property
    def rises(self) -> bool:
        return self.kind in ("grow", "probe", "switch", "fuse", "split")

    @property
    def hoped(self) -> float:
        return self.predicted / self.rows_per_s

    def gain(self, since: PipelineRates) -> float:
        return since.rows_per_s / self.rows_per_s

    def verdict(self, age: int, since: PipelineRates) -> bool | None:
        """True: keep the change; False: undo it; None: wait and see. `age` counts snapshots since the change."""
        gain = self.gain(since)
        nearer = self._nearer(since)
        clear = max(gain, nearer) >= 1 + min(0.5 * (self.hoped - 1), CLEAR) if self.rises else gain >= 0.97
        patience = PATIENCE + START_UP * (self.kind == "switch")
        if age < (SETTLE if clear or since.stall <= SMOOTH else HURT if self._hurts(since) else patience):
            return None
        return (clear or since.stall <= SMOOTH or self.kind == "memory"
                or gain >= (1 + LEAST_GAIN * max(1.0, self.hoped - 1) if self.rises else LEAST_KEPT))

    def _hurts(self, since: PipelineRates) -> bool:
        return (self.rises and self.kind != "switch" and max(self.gain(since), self._nearer(since)) < HARM
                and Contention.of(since).slow < CONTENDED)

    def crashed(self, seen: PipelineRates) -> bool:
        """Whether the latest interval alone shows that the change does harm. Workers that start up are given time."""
        return (self.rises and self.kind != "switch" and seen.stall > SMOOTH
                and max(self.gain(seen), self._nearer(seen)) < CRASH)

    def _nearer(self, since: PipelineRates) -> float:
        """The gain measured at the changed stages, which shows sooner than at the far end, where rows come in lumps."""
        return min((since.stages[n].rows_per_s / rate for n, rate in self.stages.items()
                    if n in since.stages and rate), default=self.gain(since))
