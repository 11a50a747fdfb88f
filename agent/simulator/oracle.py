"""`oracle` and `clairvoyant`, which know how the pipeline truly is. They exist only in the simulator, as a yardstick.

The oracle sets what is best for the truth at this moment; the clairvoyant sets what is best for the time until its next
decision, and stays within the memory that the next few seconds leave. Both pay for starting workers as all do, and
neither changes a knob for a negligible gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sluice.agent.simulator.optimum import best_knobs
from sluice.agent.simulator.physics import TrueCosts
from sluice.agent.tunable import Policy, Reason
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

_FORESIGHT_S = 5.0
_EVERY_S = 3.0  # between decisions while the truth changes all the time


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleState:
    limits: Limits
    knobs: Knobs
    truths: tuple[TrueCosts, ...] = ()
    at: float = -_EVERY_S


class Oracle(Policy):
    name = "oracle"

    def __init__(self, truth_at: Callable[[float], TrueCosts], fill: float = 0.95) -> None:
        self._truth_at, self._fill = truth_at, fill

    def initial(self, limits: Limits, knobs: Knobs) -> OracleState:
        return OracleState(limits=limits, knobs=knobs)

    def _look(self, at: float) -> tuple[TrueCosts, ...]:
        """The truth to choose for, then those under which memory must be enough as well."""
        return (self._truth_at(at),)

    def decide(self, snapshot: Snapshot, state: OracleState) -> tuple[Knobs, OracleState, Reason]:
        truths = self._look(snapshot.at)
        known = len(truths) == len(state.truths) and all(
            a is b for a, b in zip(truths, state.truths, strict=True)
        )
        if known or (
            state.truths and snapshot.at - state.at < _EVERY_S and self._moves(snapshot.at)
        ):
            return state.knobs, state, Reason(text="nothing has changed")
        knobs = best_knobs(
            truths[0],
            state.limits,
            also=truths[1:],
            start_from=state.knobs,
            fill=self._fill,
            most=self._most(snapshot.cpu_quota),
        )
        return (
            knobs,
            OracleState(limits=state.limits, knobs=knobs, truths=truths, at=snapshot.at),
            Reason(text="what is best for the truth"),
        )

    def _most(self, cores: float) -> float:
        """How many workers there may be in all."""
        return math.inf

    def _moves(self, at: float) -> bool:
        """Whether a slow change is going on, rather than a step."""
        moments = [self._truth_at(max(0.0, at + d)) for d in (-1.0, -0.5, 0.0)]
        return len({id(t) for t in moments}) == len(moments)


class ForesightOracle(Oracle):
    name = "clairvoyant"

    def _look(self, at: float) -> tuple[TrueCosts, ...]:
        ahead = [self._truth_at(at + _FORESIGHT_S * share) for share in (0.0, 0.2, 0.5, 1.0)]
        return (self._truth_at(at + 0.5), *ahead)
