"""Makes a policy for a simulated pipeline: any policy, or the yardstick that knows the true costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.agent import policies

if TYPE_CHECKING:
    from sluice.agent.lab.simulator.scenario import Scenario
    from sluice.agent.tunable import Policy

ORACLE = "oracle"
"""A policy that only the simulator has, because it knows the true costs."""


def make_policy(name: str, scenario: Scenario) -> Policy:
    """Returns the policy of this name for a simulated pipeline.

    The yardstick gets the scenario, and `intune` its machine."""
    if name == ORACLE:
        from sluice.agent.lab.simulator.oracle import Oracle

        return Oracle(scenario.truth_at)
    if name == "intune" and policies.has_rivals():
        from sluice.benchmarks.rivals.intune import InTune, MachineSpeed

        return InTune(machine=MachineSpeed(scenario.machine.bandwidth, 1.0))
    return policies.make(name)


def describe(text: str | None) -> str:
    """Returns the description of a program, with the names of the policies. `shadow` changes nothing, so it is left
    out."""
    names = [*(name for name in policies.names() if name != "shadow"), ORACLE]
    return f"{text}\nPolicies: {', '.join(names)}."
