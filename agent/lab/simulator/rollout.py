"""Runs one policy in one scenario: `run` returns a `Rollout`. `score` compares it with the run of the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sluice.agent.costs.rates import rates
from sluice.agent.lab.simulator.fluid import Simulator
from sluice.agent.lab.simulator.oracle import ForesightOracle
from sluice.agent.lab.simulator.scenario import Scenario
from sluice.agent.tunable import Policy, Reason
from sluice.ingest.knobs import Knobs
from sluice.ingest.stats import Snapshot

_END_SHARE = 0.2  # `end_score` counts this last share of the scenario.
_SHORT_SHARE = 0.75  # Memory is short from this share of the limit on.
_FILL = 0.95  # The oracle fills at most this share of the memory limit.
_FILL_WITH_GOVERNOR = (
    2.0  # The same share if the oracle relies on the governor to keep to the limit.
)
_ZERO_S = 1e-9  # Times up to this many seconds count as zero.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The outcome of a run."""

    rows: float
    rates: tuple[float, ...]
    """Rows a second, one entry for each second."""
    changes: int
    """The seconds in which knobs changed."""
    peak_memory: float
    """The largest memory use as a share of the limit in force."""
    killed: bool
    knobs: Knobs
    """The knobs at the end."""


def run(
    scenario: Scenario,
    policy: Policy,
    *,
    seed: int = 0,
    governor: bool = True,
    observe: Callable[[Snapshot, Knobs, Reason], None] | None = None,
) -> Rollout:
    """Returns the outcome of a policy on a new simulator.

    The policy decides at the start and after every second, or sooner if it asks for that."""
    return _drive(scenario, Simulator(scenario, seed=seed, governor=governor), policy, observe)


def _drive(
    scenario: Scenario,
    simulator: Simulator,
    policy: Policy,
    observe: Callable[[Snapshot, Knobs, Reason], None] | None = None,
) -> Rollout:
    """Lets a policy drive a simulator to the end of the scenario."""
    state = policy.initial(scenario.limits, simulator.knobs)
    series = []
    changes = 0
    peak = 0.0
    before = simulator.snapshot()
    seen = before
    wait_s = 0.0
    for _ in range(round(scenario.seconds)):
        left_s = 1.0
        knobs_changed = False
        while left_s > _ZERO_S:
            if wait_s <= _ZERO_S:
                decided, state, reason = policy.decide(seen, state)
                knobs = scenario.limits.clamp(decided)
                if knobs != simulator.knobs:
                    simulator.apply(knobs)
                    knobs_changed = True
                if observe:
                    observe(seen, knobs, reason)
                wait_s = policy.next_look_s(state) or 1.0
            step_s = min(left_s, wait_s)
            simulator.advance(step_s)
            seen = simulator.snapshot()
            left_s -= step_s
            wait_s -= step_s
        measured = rates(before, seen)
        assert measured is not None, "the simulator's clock moves on"
        changes += knobs_changed
        series.append((seen.rows - before.rows) / measured.seconds)
        peak = max(peak, seen.memory_used / seen.memory_limit)
        before = seen
    return Rollout(
        rows=simulator.consumed,
        rates=tuple(series),
        changes=changes,
        peak_memory=peak,
        killed=simulator.killed,
        knobs=simulator.knobs,
    )


def reference(scenario: Scenario, *, seed: int = 0) -> Rollout:
    """Returns the run of `clairvoyant` under the governor: the denominator of every score.

    If memory is short, it runs twice: once within the limit by itself, and once relying on the governor."""

    def go(fill: float) -> Rollout:
        simulator = Simulator(scenario, seed=seed)
        return _drive(scenario, simulator, ForesightOracle(simulator.true_at, fill=fill))

    careful = go(_FILL)
    if careful.peak_memory < _SHORT_SHARE and not careful.killed:
        return careful
    return max(careful, go(_FILL_WITH_GOVERNOR), key=lambda o: (not o.killed, o.rows))


def score(outcome: Rollout, best: Rollout) -> float:
    """Returns the rows over the whole scenario, as a share of the oracle's."""
    return outcome.rows / max(1e-9, best.rows)


def end_score(outcome: Rollout, best: Rollout) -> float:
    """Returns the rows in the last fifth, as a share of the oracle's."""
    end = max(1, round(len(outcome.rates) * _END_SHARE))
    return sum(outcome.rates[-end:]) / max(1e-9, sum(best.rates[-end:]))
