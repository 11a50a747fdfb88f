"""Makes a policy for a simulated pipeline: any policy, or a yardstick that knows the true costs."""

from __future__ import annotations

from sluice.agent import policies
from sluice.agent.policies import ORACLE
from sluice.agent.simulator.oracle import Oracle
from sluice.agent.simulator.scenario import Scenario
from sluice.agent.tunable import Policy


def make_policy(name: str, scenario: Scenario) -> Policy:
    """Returns the policy of this name for a simulated pipeline.

    The oracle and some rivals get the scenario. Other policies get nothing."""
    if name == ORACLE:
        return Oracle(scenario.truth_at)
    if name not in policies.PRODUCT and policies.find_rivals() and name in policies.simulated:
        return policies.simulated[name](scenario)
    return policies.make(name)
