"""`hill`: climbs the measured throughput, one stage at a time. It needs no model and believes only the consumer's rows.

A stage's workers are changed by a step; a gain of more than 2 % keeps the change and doubles the step, anything else
takes it back, and the next stage has its turn: first upwards through all of them, then downwards. A full round
without a gain doubles the pause before the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sluice.agent.tunable import Policy, Reason
from sluice.benchmarks.rivals.stopwatch import Stopwatch
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

_GAIN = 0.02
_SETTLE, _WINDOW = 1, 2
_LONGEST_PAUSE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class HillState:
    limits: Limits
    knobs: Knobs
    """The best knobs so far."""
    rate: float = 0.0
    turn: int = 0
    """The number of the stage and direction to try: all stages upwards, then all downwards."""
    step: int = 1
    tried: Knobs | None = None
    idle: int = 0
    """Turns in a row without a gain."""
    pause: int = 4
    rest: int = 0
    watch: Stopwatch = field(default_factory=Stopwatch)


class Hill(Policy):
    name = "hill"

    def initial(self, limits: Limits, knobs: Knobs) -> HillState:
        return HillState(limits=limits, knobs=limits.clamp(knobs))

    def decide(self, snapshot: Snapshot, state: HillState) -> tuple[Knobs, HillState, Reason]:
        if state.rest > 0:
            return (
                state.knobs,
                replace(state, rest=state.rest - 1, watch=Stopwatch(0, snapshot)),
                Reason(text="resting after a round without a gain"),
            )
        watch, seen = state.watch.look(snapshot, settle=_SETTLE, window=_WINDOW)
        if seen is None:
            return state.tried or state.knobs, replace(state, watch=watch), Reason(text="measuring")
        if state.tried is None:
            return self._try(replace(state, rate=seen.rows_per_s))
        if seen.rows_per_s > (1 + _GAIN) * state.rate:
            return self._try(
                replace(
                    state,
                    knobs=state.tried,
                    rate=seen.rows_per_s,
                    step=2 * state.step,
                    idle=0,
                    pause=4,
                )
            )
        state = replace(
            state, turn=state.turn + 1, step=1, idle=state.idle + 1, tried=None, watch=Stopwatch()
        )
        if state.idle >= 2 * len(state.limits.workers):
            state = replace(
                state, idle=0, rest=state.pause, pause=min(_LONGEST_PAUSE, 2 * state.pause)
            )
        return state.knobs, state, Reason(text="that brought nothing: back")

    def _try(self, state: HillState) -> tuple[Knobs, HillState, Reason]:
        names = list(state.limits.workers)
        for _ in range(2 * len(names)):
            up, i = divmod(state.turn % (2 * len(names)), len(names))
            name, sign = names[i], 1 if up == 0 else -1
            low, high = state.limits.workers[name]
            count = min(max(state.knobs.workers[name] + sign * state.step, low), high)
            if count != state.knobs.workers[name]:
                knobs = state.knobs.with_workers(**{name: count})
                return (
                    knobs,
                    replace(state, tried=knobs, watch=Stopwatch()),
                    Reason(text=f"trying {name} {state.knobs.workers[name]} → {count}"),
                )
            state = replace(state, turn=state.turn + 1, step=1)
        return (
            state.knobs,
            replace(state, tried=None, watch=Stopwatch()),
            Reason(text="nowhere to go"),
        )
