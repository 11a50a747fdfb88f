"""Runs one policy in one scenario: `run` returns a `Rollout`. `metric` compares it with the run of the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sluice.agent.costs.rates import rates
from sluice.agent.lab.simulator.fluid import Simulator
from sluice.agent.lab.simulator.oracle import ForesightOracle
from sluice.agent.lab.simulator.scenario import Condition, Scenario
from sluice.agent.tunable import Policy, Reason
from sluice.ingest.knobs import Knobs
from sluice.ingest.stats import Snapshot

_END_SHARE = 0.2  # `end_score` counts this last share of the scenario.
_WINDOW = 10  # `worst_score` compares rates over this many intervals.
_START = 30  # `worst_score` and `stall` skip this many intervals at the start.
_SHORT_SHARE = 0.75  # Memory is short from this share of the limit on.
_FILL = 0.95  # The oracle fills at most this share of the memory limit.
_FILL_WITH_GOVERNOR = (
    2.0  # The same share if the oracle relies on the governor to keep to the limit.
)
_RECOVERED_SHARE = 0.95  # A rate has recovered at this share of the reference.
_ZERO_S = 1e-9  # Times up to this many seconds count as zero.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The outcome of a run. The lists have one entry per interval."""

    scenario: Scenario
    rows: float
    rates: tuple[float, ...]
    stalls: tuple[float, ...]
    cpu: tuple[float, ...]
    workers: tuple[int, ...]
    changed: tuple[bool, ...]
    peak_memory: float
    """The largest memory use as a share of the limit in force."""
    killed: bool
    governor_acted: bool
    """Whether the governor has limited the work. If not, a run without it is the same."""
    knobs: Knobs
    """The knobs at the end."""


class _Frozen(Policy):
    """A policy that stops deciding at the time `at`, to show the result without further tuning."""

    def __init__(self, policy: Policy, at: float) -> None:
        self.name = policy.name
        self._policy = policy
        self._at = at

    def initial(self, limits: object, knobs: Knobs) -> object:
        self._knobs = knobs
        return self._policy.initial(limits, knobs)  # type: ignore[arg-type]

    def decide(self, snapshot: Snapshot, state: object) -> tuple[Knobs, object, Reason]:
        if snapshot.at >= self._at:
            return self._knobs, state, Reason(text="frozen")
        self._knobs, state, reason = self._policy.decide(snapshot, state)
        return self._knobs, state, reason

    def next_look_s(self, state: object) -> float | None:
        return self._policy.next_look_s(state)


def run(
    scenario: Scenario,
    policy: Policy,
    *,
    seed: int = 0,
    governor: bool = True,
    observe: Callable[[Snapshot, Knobs, Reason], None] | None = None,
) -> Rollout:
    """Returns the outcome of a policy on a new simulator.

    The policy decides at the start and after every interval, or sooner if it asks for that."""
    return _drive(scenario, _simulator(scenario, seed, governor), policy, observe)


def _simulator(scenario: Scenario, seed: int, governor: bool) -> Simulator:
    return Simulator(
        scenario.truth_at, scenario.limits, scenario.first_knobs, seed=seed, governor=governor
    )


def _drive(
    scenario: Scenario,
    simulator: Simulator,
    policy: Policy,
    observe: Callable[[Snapshot, Knobs, Reason], None] | None = None,
) -> Rollout:
    """Lets a policy drive a simulator to the end of the scenario."""
    state = policy.initial(scenario.limits, simulator.knobs)
    series = []
    stalls = []
    cpu = []
    workers = []
    changed = []
    peak = 0.0
    before = simulator.snapshot()
    seen = before
    wait_s = 0.0
    for _ in range(round(scenario.seconds / scenario.interval_s)):
        left_s = scenario.interval_s
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
                wait_s = policy.next_look_s(state) or scenario.interval_s
            step_s = min(left_s, wait_s)
            simulator.advance(step_s)
            seen = simulator.snapshot()
            left_s -= step_s
            wait_s -= step_s
        measured = rates(before, seen)
        assert measured is not None, "the simulator's clock moves on"
        changed.append(knobs_changed)
        series.append(measured.rows_per_s)
        stalls.append(measured.stall)
        cpu.append(measured.cpu)
        workers.append(simulator.knobs.total_workers)
        peak = max(peak, seen.memory_used / seen.memory_limit)
        before = seen
    return Rollout(
        scenario=scenario,
        rows=simulator.consumed,
        rates=tuple(series),
        stalls=tuple(stalls),
        cpu=tuple(cpu),
        workers=tuple(workers),
        changed=tuple(changed),
        peak_memory=peak,
        killed=simulator.killed,
        governor_acted=simulator.governor_acted,
        knobs=simulator.knobs,
    )


def reference(scenario: Scenario, *, seed: int = 0) -> Rollout:
    """Returns the run of `clairvoyant` under the governor: the denominator of every score.

    If memory is short, it runs twice: once within the limit by itself, and once relying on the governor."""

    def go(fill: float) -> Rollout:
        simulator = _simulator(scenario, seed, True)
        return _drive(scenario, simulator, ForesightOracle(simulator.true_at, fill=fill))

    careful = go(_FILL)
    if careful.peak_memory < _SHORT_SHARE and not careful.killed:
        return careful
    return max(careful, go(_FILL_WITH_GOVERNOR), key=lambda o: (not o.killed, o.rows))


def frozen_rows(scenario: Scenario, policy: Policy, *, seed: int = 0) -> float:
    """Returns the rows after the first change if the policy stops deciding there."""
    first = _change_intervals(scenario)[0]
    outcome = run(scenario, _Frozen(policy, first * scenario.interval_s), seed=seed)
    return sum(outcome.rates[first:])


def metric(
    condition: Condition, outcome: Rollout, best: Rollout, frozen: float | None = None
) -> float:
    """Returns the value of one metric. docs/scenarios.md describes each."""
    end = max(1, round(len(outcome.rates) * _END_SHARE))
    name = condition.metric
    if name == "score":
        return score(outcome, best)
    if name == "end_score":
        return end_score(outcome, best)
    if name == "worst_score":
        return _worst(outcome, best)
    if name == "kills":
        return float(outcome.killed)
    if name == "peak_memory":
        return outcome.peak_memory
    if name == "stall":
        calm = outcome.stalls[min(_START, len(outcome.stalls) - 1) :]
        return sum(calm) / len(calm)
    if name == "recovered_after":
        return max(
            (_recovery(outcome, best, i) for i in _change_intervals(outcome.scenario)), default=0.0
        )
    if name == "cpu_ratio":
        return sum(outcome.cpu[-end:]) / max(1e-9, sum(best.cpu[-end:]))
    if name == "workers_ratio":
        return sum(outcome.workers[-end:]) / sum(best.workers[-end:])
    if name == "changes_settled":
        half = outcome.changed[len(outcome.changed) // 2 :]
        return 100 * sum(half) / len(half)
    if name == "of_frozen":
        assert frozen is not None
        return sum(outcome.rates[_change_intervals(outcome.scenario)[0] :]) / max(1e-9, frozen)
    if name == "workers":
        return float(outcome.knobs.workers[condition.stage])
    return float(outcome.knobs.backend.get(condition.stage) == "process")


def score(outcome: Rollout, best: Rollout) -> float:
    """Returns the rows over the whole scenario, as a share of the oracle's."""
    return outcome.rows / max(1e-9, best.rows)


def end_score(outcome: Rollout, best: Rollout) -> float:
    """Returns the rows in the last fifth, as a share of the oracle's."""
    end = max(1, round(len(outcome.rates) * _END_SHARE))
    return sum(outcome.rates[-end:]) / max(1e-9, sum(best.rates[-end:]))


def _change_intervals(scenario: Scenario) -> list[int]:
    """Returns the intervals in which changes begin."""
    return sorted({int(c.at / scenario.interval_s) for c in scenario.changes})


def _worst(outcome: Rollout, best: Rollout) -> float:
    """Returns the lowest share of the oracle's rate over any ten intervals after the start."""
    shares = [
        sum(outcome.rates[i : i + _WINDOW]) / max(1e-9, sum(best.rates[i : i + _WINDOW]))
        for i in range(_START, len(outcome.rates) - _WINDOW + 1)
    ]
    return min(shares, default=score(outcome, best))


def _recovery(outcome: Rollout, best: Rollout, change: int) -> float:
    """Returns the intervals after a change until three in a row together reach 0.95 of the oracle's rate."""
    for i in range(change, len(outcome.rates) - 2):
        if sum(outcome.rates[i : i + 3]) >= _RECOVERED_SHARE * sum(best.rates[i : i + 3]):
            return float(i - change)
    return float(len(outcome.rates) - change)
