"""The yardsticks for policies in the simulator: the oracle, and `Ceiling`, the most that `intune`'s actions allow.

`make_policy` makes any policy for a scenario, with what that policy may know of the pipeline.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from sluice.agent import policies
from sluice.agent.learn.intune_teacher import hardware_of
from sluice.agent.policies import CEILING, ORACLE
from sluice.agent.policies.intune import FACTORS, STEPS, InTune, move
from sluice.agent.simulator.oracle import ForesightOracle, Oracle, OracleState
from sluice.agent.simulator.physics import TrueCosts
from sluice.agent.simulator.scenario import Scenario
from sluice.agent.tunable import Policy, Reason
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


def make_policy(name: str, scenario: Scenario) -> Policy:
    """Returns the policy of this name for a simulated pipeline.

    `intune` gets the scenario's machine, and yardsticks get all true costs. Other policies get nothing."""
    if name in (ORACLE, CEILING):
        return Oracle(scenario.truth_at) if name == ORACLE else Ceiling(scenario.truth_at)
    if name == InTune.name:
        return InTune(machine=hardware_of(scenario))
    return policies.make(name)
