"""Two oracles, which know a pipeline's true costs: `oracle` and `clairvoyant`. Other policies are compared with them.

They exist only in the simulator. `oracle` chooses the best setting for the present costs. `clairvoyant` also knows the
next seconds: its setting is the best until its next decision, and fits into memory throughout. Both pay for starting
workers like every policy. Neither changes a knob for a negligible gain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sluice.agent.lab.simulator.optimum import best_knobs
from sluice.agent.lab.simulator.physics import TrueCosts
from sluice.agent.tunable import Policy, Reason
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

_FORESIGHT_S = 5.0
_EVERY_S = 3.0  # The time between decisions while the true costs change all the time.


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleState:
    """The state of an oracle: its last choice, with the true costs and the time of that choice."""

    limits: Limits
    knobs: Knobs
    truths: tuple[TrueCosts, ...] = ()
    at: float = -_EVERY_S


class Oracle(Policy):
    """Chooses the best setting for the present true costs."""

    name = "oracle"

    def __init__(self, truth_at: Callable[[float], TrueCosts], fill: float = 0.95) -> None:
        self._truth_at = truth_at
        self._fill = fill

    def initial(self, limits: Limits, knobs: Knobs) -> OracleState:
        return OracleState(limits=limits, knobs=knobs)

    def _look(self, at: float) -> tuple[TrueCosts, ...]:
        """Returns the true costs to choose for, then those under which memory must also be enough."""
        return (self._truth_at(at),)

    def decide(self, snapshot: Snapshot, state: OracleState) -> tuple[Knobs, OracleState, Reason]:
        truths = self._look(snapshot.at)
        known = len(truths) == len(state.truths) and all(
            a is b for a, b in zip(truths, state.truths, strict=True)
        )
        moments = [self._truth_at(max(0.0, snapshot.at + d)) for d in (-1.0, -0.5, 0.0)]
        slowly = len({id(t) for t in moments}) == len(moments)
        if known or (state.truths and snapshot.at - state.at < _EVERY_S and slowly):
            return state.knobs, state, Reason(text="nothing has changed")
        knobs = best_knobs(
            truths[0],
            state.limits,
            also=truths[1:],
            start_from=state.knobs,
            fill=self._fill,
        )
        return (
            knobs,
            OracleState(limits=state.limits, knobs=knobs, truths=truths, at=snapshot.at),
            Reason(text="the best setting for the true costs"),
        )


class ForesightOracle(Oracle):
    """Chooses the best setting for the true costs of the next seconds."""

    name = "clairvoyant"

    def _look(self, at: float) -> tuple[TrueCosts, ...]:
        ahead = [self._truth_at(at + _FORESIGHT_S * share) for share in (0.0, 0.2, 0.5, 1.0)]
        return (self._truth_at(at + 0.5), *ahead)
