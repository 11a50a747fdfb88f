"""Each baseline against an answer that was worked out by hand, by enumeration, or is published."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from sluice.agent.policies import make
from sluice.agent.simulator.fluid import Simulator
from sluice.agent.simulator.physics import Consumer, SimMachine, SimStage
from sluice.agent.simulator.rollout import run
from sluice.agent.simulator.scenario import Scenario, ScheduledChange
from sluice.benchmarks.rivals.autotune import climb, empty_chance, latency
from sluice.benchmarks.rivals.bayes import propose
from sluice.benchmarks.rivals.ds2 import DS2, parallelism
from sluice.benchmarks.rivals.grid import grid
from sluice.benchmarks.rivals.hill import Hill
from sluice.benchmarks.rivals.plumber import Plumber, solve
from sluice.benchmarks.rivals.stopwatch import Stopwatch
from sluice.benchmarks.rivals.trident import allocate, ladder, process
from sluice.ingest.knobs import Knobs, Limits

pytestmark = pytest.mark.slow

ROWS = 1024


def scenario(
    *costs: float,
    cores: float = 16,
    seconds: float = 60,
    consumer: Consumer | None = None,
    changes: tuple[ScheduledChange, ...] = (),
    **stage: object,
) -> Scenario:
    return Scenario(
        name="test",
        seconds=seconds,
        machine=SimMachine(cores=cores, switch_cost=0, timer_noise=0.001),
        consumer=consumer or Consumer(batch_rows=ROWS),
        changes=changes,
        stages=tuple(
            SimStage(name=f"s{i}", cost_s=c, rows_per_item=ROWS, **stage)  # type: ignore[arg-type]
            for i, c in enumerate(costs)
        ),
    )


def workers_of(name: str, pipeline: Scenario) -> list[int]:
    return list(run(pipeline, make(name)).knobs.workers.values())


# The queue behind autotune.


@pytest.mark.parametrize(
    ("production", "consumption", "places", "expected"),
    [
        (1.0, 2.0, 2, 4 / 7),  # ρ = 1/2: (1 − 1/2) / (1 − 1/8)
        (2.0, 1.0, 1, 1 / 3),  # ρ = 2: (1 − 2) / (1 − 4)
        (3.0, 3.0, 4, 1 / 5),  # equally fast: each filling equally likely
        (1.0, 10.0, 1, 0.9 / 0.99),
        (1e9, 1.0, 1000, 0.0),  # does not overflow
    ],
)
def test_the_chance_that_a_buffer_is_empty_by_hand(production, consumption, places, expected):
    assert empty_chance(production, consumption, places) == pytest.approx(expected)


def test_modelled_latency_of_two_stages_by_hand():
    """First: 1 s an element, wanted every 2 s, one place: ρ = 2, chance 1/3, wait 1/3. Then 2 + 1/3, taken at once."""
    assert latency([1.0, 2.0], [1, 1], 0.0) == pytest.approx(2 + 1 / 3)


def test_the_climb_gives_the_dear_stage_the_workers_and_stops_at_its_budgets():
    free = climb([1.0, 8.0], [16, 16], 0.0, cores=8, element_bytes=[1, 1], ram=1e9)
    assert free[1] >= 4 * free[0]
    tight = climb([1.0, 8.0], [16, 16], 0.0, cores=8, element_bytes=[1, 1], ram=4)
    assert sum(tight) <= 5
    assert climb([1.0, 8.0], [16, 1], 0.0, cores=8, element_bytes=[1, 1], ram=1e9)[1] == 1


def test_autotune_keeps_the_cores_it_saw_and_the_adaptive_one_does_not():
    grown = scenario(
        0.02,
        0.08,
        cores=4,
        seconds=120,
        changes=(ScheduledChange(at=30, key="machine.cores", value=16),),
    )
    assert max(workers_of("autotune", grown)) <= 4
    assert max(workers_of("autotune-adaptive", grown)) > 6


# Plumber's linear programme.


def test_the_linear_programme_is_that_of_an_enumeration():
    costs, most, cores = [0.01, 0.03, 0.02], [4.0, 4.0, 1.0], 6.0
    rate, given = solve(costs, most, cores)
    steps = np.linspace(0, 4, 41)
    best = max(
        min(a / costs[0], b / costs[1], c / costs[2])
        for a, b, c in itertools.product(steps, steps, steps)
        if a + b + c <= cores + 1e-9 and c <= 1
    )
    assert rate == pytest.approx(best, rel=0.03)
    assert rate == pytest.approx(50)  # the third stage has one core: 1 / 0.02
    assert sum(given) <= cores + 1e-6
    assert solve([0.01, 0.03], [64, 64], 8.0)[0] == pytest.approx(8 / 0.04)


def test_plumber_shares_cores_by_cost_and_rests_unless_adaptive():
    assert workers_of("plumber", scenario(0.01, 0.03)) == [4, 12]
    shrunk = scenario(
        0.01, 0.03, seconds=90, changes=(ScheduledChange(at=40, key="machine.cores", value=4),)
    )
    assert workers_of("plumber", shrunk) == [4, 12]
    assert workers_of("plumber-adaptive", shrunk) == [1, 3]
    assert Plumber.name != make("plumber-adaptive").name


# DS2.


def test_parallelism_is_the_target_over_the_true_rate_rounded_up():
    assert parallelism({"a": 100.0, "b": 30.0, "c": 250.0}, 200.0) == {"a": 2, "b": 7, "c": 1}


@pytest.mark.parametrize(
    "costs", [(0.01, 0.05, 0.02), (0.2, 0.01), (0.004, 0.03, 0.008, 0.05, 0.01)]
)
def test_ds2_reaches_the_demand_within_three_steps(costs):
    pipeline = scenario(*costs, cores=64, consumer=Consumer(batch_rows=ROWS, step_s=0.01))
    simulator = Simulator(pipeline.truth_at, pipeline.limits, pipeline.first_knobs)
    policy, changes = DS2(), 0
    state = policy.initial(pipeline.limits, simulator.knobs)
    for _ in range(40):
        knobs, state, _ = policy.decide(simulator.snapshot(), state)
        changes += knobs != simulator.knobs
        simulator.apply(knobs)
        simulator.advance(1.0)
    assert changes <= 3
    assert list(simulator.knobs.workers.values()) == pytest.approx(
        [math.ceil(c / 0.01) for c in costs], abs=1
    )


# Those that try and measure.


def test_cachew_adds_workers_until_they_no_longer_help():
    capped = scenario(
        0.05, cores=32, seconds=120, cap_rows_per_s=100 * ROWS
    )  # five workers reach the cap
    assert workers_of("cachew", capped) == pytest.approx([5], abs=1)


def test_hill_climbs_to_the_peak_of_a_curve_that_falls_again():
    falling = scenario(0.05, cores=32, seconds=120, kappa=1 / 25)  # peak at √25 = 5
    assert workers_of("hill", falling) == pytest.approx([5], abs=1)


def test_hill_takes_back_what_brought_nothing():
    pipeline = scenario(0.01, 0.05, consumer=Consumer(batch_rows=ROWS, step_s=0.05), seconds=120)
    assert sum(workers_of("hill", pipeline)) <= 3
    assert Hill().initial(pipeline.limits, pipeline.first_knobs).knobs == pipeline.first_knobs


def test_the_grid_has_no_setting_twice_and_the_best_of_it_is_kept():
    settings = grid(Limits(workers={"a": (1, 64), "b": (1, 64), "c": (1, 64)}), 16)
    assert len({tuple(s.values()) for s in settings}) == len(settings) <= 32
    assert {tuple(s.values()) for s in settings} >= {(n, n, n) for n in (1, 4, 8, 16)}
    falling = scenario(0.05, cores=16, seconds=60, kappa=1 / 16)  # peak at 4, which is on the grid
    assert workers_of("offline-grid", falling) == [4]


def test_bayes_proposes_within_the_limits_and_the_same_for_the_same_history():
    limits = Limits(workers={"a": (1, 16), "b": (2, 8)})
    history = tuple(
        (Knobs(workers={"a": a, "b": b}), float(a * b))
        for a, b in [(1, 2), (4, 4), (16, 2), (8, 8), (2, 3), (1, 8), (12, 7)]
    )
    first, again = propose(limits, 16, history), propose(limits, 16, history)
    assert first == again
    limits.check(Knobs(workers=first))
    assert first["a"] * first["b"] >= 32, "it goes where the rate grows"


def test_bayes_keeps_the_best_of_what_it_tried():
    limits, policy = Limits(workers={"s0": (1, 16)}), make("bayes")
    tried = tuple((Knobs(workers={"s0": n}), 5e9 if n >= 10 else 10.0 - n) for n in range(1, 16))
    pipeline = scenario(0.05)
    simulator = Simulator(pipeline.truth_at, pipeline.limits, pipeline.first_knobs)
    state = replace(
        policy.initial(limits, pipeline.first_knobs), most=16, history=(*tried, *tried[:4])
    )
    for _ in range(4):
        knobs, state, _ = policy.decide(simulator.snapshot(), state)
        simulator.advance(1.0)
    assert knobs.workers["s0"] == 10, "the first of the equally best"
    assert len(state.history) == 20


# Trident.


def test_the_gaussian_process_passes_through_what_was_seen_and_doubts_what_was_not():
    mean, spread = process([(0.0, 1.0), (0.0, 1.02), (1.0, 2.0)], [0.0, 1.0, 6.0])
    assert mean[:2] == pytest.approx([1.01, 2.0], abs=0.05)
    assert spread[0] < 0.1
    assert spread[2] > 0.4


def test_a_ladder_starts_and_ends_at_the_limits():
    assert ladder(1, 8) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert ladder(3, 64)[0] == 3
    assert ladder(3, 64)[-1] == 64


def test_the_integer_programme_is_that_of_an_enumeration():
    rungs = [[1, 2, 3, 4]] * 3
    costs = [0.01, 0.03, 0.02]
    capacity = [[n / c for n in r] for r, c in zip(rungs, costs, strict=True)]
    for cores, memory in ((100.0, 1e9), (100.0, 7.0), (4.0, 1e9), (100.0, 4.5)):
        found = allocate(
            rungs, capacity, sum(costs), cores=cores, bytes_each=[1, 1, 1], memory=memory
        )
        assert found is not None
        best = max(
            min(cores / sum(costs), *(n / c for n, c in zip(w, costs, strict=True)))
            for w in itertools.product(*rungs)
            if sum(w) <= memory
        )
        assert found[0] == pytest.approx(best, rel=1e-3)
        assert sum(found[1]) <= memory
    assert allocate(rungs, capacity, 0.06, cores=4, bytes_each=[1, 1, 1], memory=2) is None


def test_trident_balances_and_stays_within_memory():
    assert workers_of("trident", scenario(0.01, 0.03, cores=8)) == pytest.approx([2, 6], abs=2)


def test_a_stopwatch_leaves_out_what_settles():
    pipeline = scenario(0.01)
    simulator = Simulator(pipeline.truth_at, pipeline.limits, pipeline.first_knobs)
    watch, seen, looks = Stopwatch(), None, 0
    while seen is None:
        simulator.advance(1.0)
        watch, seen = watch.look(simulator.snapshot(), settle=2, window=3)
        looks += 1
    assert looks == 5
    assert seen.seconds == pytest.approx(3.0)
