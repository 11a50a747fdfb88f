"""`Ceiling`: the most that `intune`'s actions allow. It knows the true costs, so it runs in the simulator only."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from sluice.agent.lab.simulator.oracle import ForesightOracle, OracleState
from sluice.agent.lab.simulator.physics import TrueCosts
from sluice.agent.policies import CEILING
from sluice.agent.tunable import Policy, Reason
from sluice.benchmarks.rivals.intune import FACTORS, STEPS, move
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class CeilingState:
    """The state of `Ceiling`: the present knobs, and the clairvoyant's state."""

    limits: Limits
    knobs: Knobs
    goal: OracleState


class _WithinCores(ForesightOracle):
    """A clairvoyant that has at most as many workers in all as there are cores."""

    def _most_workers(self, cores: float) -> float:
        return math.floor(cores)


class Ceiling(Policy):
    """The clairvoyant with only the actions of `intune`.

    It knows the true costs, also those of the near future. But it takes `intune`'s steps, never changes a back end, and
    has at most as many workers as there are cores."""

    name = CEILING

    def __init__(self, truth_at: Callable[[float], TrueCosts]) -> None:
        @functools.cache
        def without_switches(truth: TrueCosts) -> TrueCosts:
            return TrueCosts(
                truth.machine,
                tuple(replace(stage, backends=stage.backends[:1]) for stage in truth.stages),
                truth.consumer,
            )

        self._clairvoyant = _WithinCores(lambda at: without_switches(truth_at(at)))

    def initial(self, limits: Limits, knobs: Knobs) -> CeilingState:
        return CeilingState(
            limits=limits, knobs=knobs, goal=self._clairvoyant.initial(limits, knobs)
        )

    def decide(self, snapshot: Snapshot, state: CeilingState) -> tuple[Knobs, CeilingState, Reason]:
        goal, after, reason = self._clairvoyant.decide(snapshot, state.goal)
        steps = [
            min(STEPS, key=lambda step: abs(state.knobs.workers[name] + step - goal.workers[name]))
            for name in state.limits.workers
        ]
        factor = min(
            FACTORS,
            key=lambda times: abs(
                math.log(max(1, state.knobs.prefetch_bytes) * times / max(1, goal.prefetch_bytes))
            ),
        )
        knobs = move(state.knobs, state.limits, steps, factor, snapshot.cpu_quota)
        return knobs, CeilingState(limits=state.limits, knobs=knobs, goal=after), reason
