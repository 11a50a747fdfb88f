"""For policies that try settings: a `Stopwatch` lets a change settle, then measures its rates."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.agent.costs.rates import PipelineRates, rates
from sluice.ingest.stats import Snapshot


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Measures the rates after a change. Make a new one with each change, and show it every snapshot afterwards."""

    ticks: int = 0
    anchor: Snapshot | None = None

    def look(
        self, snapshot: Snapshot, *, settle: int, window: int
    ) -> tuple[Stopwatch, PipelineRates | None]:
        """The rates over `window` snapshots that follow `settle` ones; None until then, or if no time passed."""
        ticks = self.ticks + 1
        anchor = self.anchor if ticks > settle and self.anchor is not None else snapshot
        now = Stopwatch(ticks, anchor)
        if ticks < settle + window:
            return now, None
        return now, rates(anchor, snapshot)
