"""A policy's way through a scenario, for tests that look at each decision."""

from __future__ import annotations

from sluice.agent.lab.simulator.fluid import Simulator


def walk(policy, scenario, ticks, begin=lambda state: state):
    """Snapshot, state before and what was decided, tick by tick; `begin` may change the first state."""
    simulator = Simulator(scenario.truth_at, scenario.limits, scenario.first_knobs)
    state = begin(policy.initial(scenario.limits, simulator.knobs))
    for _ in range(ticks):
        snapshot = simulator.snapshot()
        knobs, after, reason = policy.decide(snapshot, state)
        yield snapshot, state, knobs, after, reason
        simulator.apply(knobs)
        simulator.advance(1.0)
        state = after
