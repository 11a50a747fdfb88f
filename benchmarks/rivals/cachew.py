"""`cachew`: one worker more while batches come faster by it, one fewer while they do not come slower (ATC'22).

A Cachew worker runs the whole pipeline, so ours is one worker in every stage. It grows until a step gains less than
3 %, takes that step back, and looks again when the rate has moved by a tenth. Its decision between caching and
computing has no counterpart here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sluice.agent.tunable import Policy, Reason
from sluice.benchmarks.rivals.stopwatch import Stopwatch
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

_GAIN, _LOSS, _MOVED = 0.03, 0.01, 0.1
_SETTLE, _WINDOW = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CachewState:
    limits: Limits
    knobs: Knobs
    workers: int = 1
    direction: int = 1
    rate: float = 0.0
    """Rows a second before the step that is being judged, or those settled at."""
    settled: bool = False
    watch: Stopwatch = field(default_factory=Stopwatch)


class Cachew(Policy):
    name = "cachew"

    def initial(self, limits: Limits, knobs: Knobs) -> CachewState:
        return CachewState(
            limits=limits,
            knobs=limits.clamp(knobs),
            workers=max(limits.clamp(knobs).workers.values()),
        )

    def decide(self, snapshot: Snapshot, state: CachewState) -> tuple[Knobs, CachewState, Reason]:
        watch, seen = state.watch.look(snapshot, settle=_SETTLE, window=_WINDOW)
        if seen is None:
            return state.knobs, replace(state, watch=watch), Reason(text="measuring the last step")
        state, rate = replace(state, watch=Stopwatch(0, snapshot)), seen.rows_per_s
        if state.settled:
            if abs(rate - state.rate) <= _MOVED * state.rate:
                return state.knobs, state, Reason(text="settled")
            state = replace(state, settled=False, direction=1)
            return self._step(replace(state, rate=rate), 1, "the rate has moved")
        if state.direction > 0:
            if rate > (1 + _GAIN) * state.rate:
                return self._step(
                    replace(state, rate=rate), 1, f"a worker more brought {rate:.0f} rows/s"
                )
            return self._step(replace(state, direction=-1), -1, "a worker more no longer helps")
        if rate >= (1 - _LOSS) * state.rate and state.workers > 1 and seen.stall < 0.01:
            return self._step(
                replace(state, rate=max(rate, state.rate)), -1, "a worker fewer costs nothing"
            )
        up = 1 if rate < (1 - _LOSS) * state.rate else 0
        knobs, state, reason = self._step(replace(state, settled=True), up, "settled")
        return knobs, replace(state, rate=max(rate, state.rate)), reason

    def _step(self, state: CachewState, by: int, why: str) -> tuple[Knobs, CachewState, Reason]:
        count = max(1, state.workers + by)
        count = min(count, max(high for _, high in state.limits.workers.values()))
        knobs = state.limits.resized(state.knobs, dict.fromkeys(state.limits.workers, count))
        return (
            knobs,
            replace(state, knobs=knobs, workers=count, watch=Stopwatch()),
            Reason(text=f"{why}: {count} in every stage"),
        )
