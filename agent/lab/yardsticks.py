"""Makes a policy for a simulated pipeline: any policy, or a yardstick that knows the true costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.agent import policies
from sluice.agent.policies import CEILING

if TYPE_CHECKING:
    from sluice.agent.lab.simulator.scenario import Scenario
    from sluice.agent.tunable import Policy

ORACLE = "oracle"
YARDSTICKS = (ORACLE, CEILING)
"""Policies that only the simulator has, because they know the true costs. The second is one of the rivals."""


def make_policy(name: str, scenario: Scenario, weights: str = "") -> Policy:
    """Returns the policy of this name for a simulated pipeline.

    The oracle and some rivals get the scenario. `auto` gets a file of weights, or uses those in use."""
    if name == ORACLE:
        from sluice.agent.lab.simulator.oracle import Oracle

        return Oracle(scenario.truth_at)
    if name not in policies.PRODUCT and policies.find_rivals():
        from sluice.benchmarks.rivals import IN_SIMULATOR

        if name in IN_SIMULATOR:
            return IN_SIMULATOR[name](scenario)
    return policies.make(name, weights=weights)


def default_policies() -> list[str]:
    """Returns the names of the policies that are compared by default.

    `shadow` is left out because it changes nothing. The yardsticks are included, although they know the true costs."""
    yardsticks = YARDSTICKS if policies.has_rivals() else (ORACLE,)
    return [*(name for name in policies.names() if name != "shadow"), *yardsticks]


def describe(text: str | None) -> str:
    """Returns the description of a program, with the names of the policies."""
    return f"{text}\nPolicies: {', '.join(default_policies())}."
