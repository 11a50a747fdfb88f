"""The simulator: what must hold of it whatever the pipeline, and known answers where there are any."""

from __future__ import annotations

import dataclasses
import random

import pytest

from sluice.agent.lab.simulator.fluid import Simulator
from sluice.agent.lab.simulator.optimum import best_knobs
from sluice.agent.lab.simulator.physics import (
    Consumer,
    SimMachine,
    SimStage,
    TrueCosts,
    steady,
)
from sluice.agent.lab.simulator.random_pipelines import pipeline as drawn
from sluice.agent.lab.simulator.scenario import Scenario, ScheduledChange
from sluice.agent.tunable import Tunable
from sluice.ingest import stage_spec
from sluice.ingest.knobs import BACKENDS, KnobError, Knobs, Limits

pytestmark = pytest.mark.slow

ROWS = 1024
BOTH = ("thread", "process")


def stages(*costs: float, **others: object) -> tuple[SimStage, ...]:
    return tuple(
        SimStage(name=f"s{i}", cost_s=c, rows_per_item=ROWS, **others) for i, c in enumerate(costs)
    )  # type: ignore[arg-type]


def simulator(
    parts: tuple[SimStage, ...],
    workers: list[int],
    *,
    machine: SimMachine | None = None,
    consumer: Consumer | None = None,
    governor: bool = True,
    seed: int = 0,
):
    machine = machine or SimMachine(cores=64, timer_noise=0, switch_cost=0)
    truth = TrueCosts(machine, parts, consumer or Consumer(batch_rows=ROWS))
    limits = Limits(
        workers={s.name: (1, 64) for s in parts}, backends={s.name: s.backends for s in parts}
    )
    knobs = Knobs(workers={s.name: n for s, n in zip(parts, workers, strict=True)})
    return Simulator(lambda _: truth, limits, knobs, governor=governor, seed=seed)


def rate_of(pipeline, seconds: float = 20.0, warm: float = 10.0) -> float:
    pipeline.advance(warm)
    before = pipeline.snapshot().rows
    pipeline.advance(seconds)
    return (pipeline.snapshot().rows - before) / seconds


@pytest.mark.parametrize(
    ("costs", "workers", "expected"),
    [
        ((0.01, 0.02), (1, 1), 50),  # the slowest stage
        ((0.01, 0.04, 0.01), (1, 3, 1), 75),
        ((0.01,) * 9, (1,) * 9, 100),
    ],
)
def test_without_shortage_the_slowest_stage_sets_the_pace(costs, workers, expected):
    assert rate_of(simulator(stages(*costs), list(workers))) == pytest.approx(
        expected * ROWS, rel=0.02
    )


def test_cores_are_shared_and_no_work_is_lost():
    """Far more threads than cores: all cores work all the time, and rows flow as their processor time says."""
    pipeline = simulator(
        stages(0.01, 0.03),
        [8, 8],
        machine=SimMachine(cores=2, timer_noise=0, switch_cost=0),
    )
    assert rate_of(pipeline) == pytest.approx(2 / 0.04 * ROWS, rel=0.03)
    assert pipeline.snapshot().cpu_used_s == pytest.approx(60, rel=0.04)


def test_a_store_that_only_waits_needs_no_core():
    pipeline = simulator(stages(0.05, cpu=0.0), [20], machine=SimMachine(cores=1, timer_noise=0))
    assert rate_of(pipeline) == pytest.approx(20 / 0.05 * ROWS, rel=0.02)


@pytest.mark.parametrize(
    ("machine", "parts", "workers", "backend", "items_per_s"),
    [
        ({}, stages(0.01, lock=1.0, backends=BOTH), [4], "thread", 100),
        ({}, stages(0.01, lock=1.0, backends=BOTH), [4], "process", 400),
        ({}, stages(0.01, 0.01, lock=1.0), [4, 4], "thread", 50),
        (
            {"bandwidth": 100 * ROWS * 200},
            stages(0.01, 0.01, memory_bound=1.0, bytes_per_row=100),
            [8, 8],
            "thread",
            100,
        ),
        ({}, stages(0.01, cap_rows_per_s=200 * ROWS), [16], "thread", 200),
    ],
    ids=["lock, threads", "lock, processes", "two at one lock", "bandwidth", "cap"],
)
def test_what_is_shared_bounds_the_rate(machine, parts, workers, backend, items_per_s):
    truth = TrueCosts(
        SimMachine(**{"cores": 32, "convoy": 0} | machine), parts, Consumer(batch_rows=ROWS)
    )
    found = steady(truth, workers, [backend] * len(workers)).rates[-1]
    assert found == pytest.approx(items_per_s * ROWS, rel=0.03)


@pytest.mark.parametrize(
    ("machine", "stage", "consumer", "counts", "ratio"),
    [
        ({"cores": 8, "convoy": 0.2}, {"lock": 1.0}, {}, (1, 8), 0.6),
        ({"cores": 32}, {"cliff_workers": 4, "cliff_factor": 3}, {}, (4, 5), 1),
        ({"cores": 4}, {}, {"step_s": 0.02, "cpu": 1.0, "interference": 1.0}, (1, 12), 0.6),
    ],
    ids=["convoy", "cliff", "trainer's cores"],
)
def test_more_workers_may_bring_less(machine, stage, consumer, counts, ratio):
    truth = TrueCosts(
        SimMachine(**machine), stages(0.005, **stage), Consumer(batch_rows=ROWS, **consumer)
    )
    rates = [steady(truth, [count], ["thread"]).rates[-1] for count in counts]
    assert rates[1] < ratio * rates[0]


def test_new_workers_work_only_once_they_have_started():
    pipeline = simulator(stages(0.1, start_s=5.0), [1])
    pipeline.advance(1.0)
    pipeline.apply(pipeline.knobs.with_workers(s0=4))
    before = pipeline.snapshot().rows
    pipeline.advance(4.0)
    early = pipeline.snapshot().rows - before
    assert early == pytest.approx(40 * ROWS, rel=0.05)
    assert rate_of(pipeline) == pytest.approx(40 * ROWS, rel=0.05)


def test_a_small_memory_kills_without_the_governor_and_holds_back_with_it():
    machine = SimMachine(cores=64, memory_limit=1.2 * 2**30, base_bytes=2**29)
    parts = stages(0.05, 0.05, item_bytes=64 * 2**20)
    bare = simulator(parts, [16, 16], machine=machine, governor=False)
    bare.advance(20)
    kept = simulator(parts, [16, 16], machine=machine)
    kept.advance(20)
    assert bare.killed
    assert not kept.killed
    assert kept.snapshot().held_back > 0
    assert kept.peak <= machine.memory_limit
    assert kept.snapshot().rows > bare.snapshot().rows
    rows = bare.snapshot().rows
    bare.advance(5)
    assert bare.snapshot().rows == rows, "a killed run delivers nothing more"


@pytest.mark.parametrize("number", range(20))
def test_processes_of_several_stages_start_only_in_memory_that_is_left_by_the_first_of_each(number):
    draw = random.Random(number)
    size = draw.randint(50, 600) * 2**20
    count = draw.randint(2, 8)
    parts = stages(
        *[0.01] * count,
        item_bytes=2**16,
        backends=("thread", "process"),
        process_bytes=float(size),
        process_start_s=draw.choice([0.5, 1.5]),
    )
    machine = SimMachine(
        cores=16,
        base_bytes=512 * 2**20,
        memory_limit=512 * 2**20 + size * (count + draw.uniform(1, 12)),
    )
    pipeline = simulator(parts, [1] * count, machine=machine)
    names = [stage.name for stage in parts]
    pipeline.apply(
        Knobs(
            workers={name: draw.randint(1, 16) for name in names},
            backend=dict.fromkeys(names, "process"),
        )
    )
    pipeline.advance(10)
    assert not pipeline.killed
    assert all(stage.backend == "process" for stage in pipeline.snapshot().stages)


@pytest.mark.parametrize(
    ("split", "number"),
    [("hidden", 17018), ("hidden", 17102), *(("held out", n) for n in range(12))],
)
def test_no_queue_passes_its_limit(split, number):
    """The first two have ten stages. Their queues become full one after the other within a millisecond."""
    scenario = drawn(split, number, changing=False)
    pipeline = Simulator(scenario.truth_at, scenario.limits, scenario.first_knobs, seed=number)
    for _ in range(40):
        pipeline.advance(0.25)
        for rows, limit in zip(pipeline.queue, pipeline.queue_limits, strict=True):
            assert rows <= limit * 1.001
    assert not pipeline.killed


def test_freed_memory_goes_back_slowly():
    pipeline = simulator(
        stages(0.05, item_bytes=64 * 2**20), [16], machine=SimMachine(cores=64, memory_lag_s=10)
    )
    pipeline.advance(5)
    high = pipeline.memory
    pipeline.apply(pipeline.knobs.with_workers(s0=1))
    pipeline.advance(1)
    soon = pipeline.memory
    pipeline.advance(60)
    assert high > soon > 1.3 * pipeline.memory


def test_what_snapshots_say_adds_up():
    """Workers are busy, starved or blocked all the time; the consumer waits or computes; counters never fall."""
    trainer = Consumer(batch_rows=ROWS, step_s=0.02)
    pipeline = simulator(stages(0.01, 0.03, 0.02), [2, 2, 2], consumer=trainer)
    before = pipeline.snapshot()
    for _ in range(10):
        pipeline.advance(1.0)
        now = pipeline.snapshot()
        assert now.sequence == before.sequence + 1
        assert now.consumer_wait_s + now.consumer_compute_s == pytest.approx(now.at, rel=1e-3)
        for earlier, stage in zip(before.stages, now.stages, strict=True):
            assert stage.busy_s + stage.wait_input_s + stage.wait_output_s == pytest.approx(
                2 * now.at, rel=0.01
            )
            assert stage.cpu_s <= stage.busy_s * 1.001
            for name in (
                "items",
                "rows",
                "bytes",
                "busy_s",
                "cpu_s",
                "wait_input_s",
                "wait_output_s",
            ):
                assert getattr(stage, name) >= getattr(earlier, name)
            assert stage.queue_bytes <= stage.queue_limit_bytes * 1.01
        before = now
    rows = [s.rows for s in now.stages]
    assert all(
        a >= b for a, b in zip([*rows, now.rows], [*rows[1:], now.rows, now.rows], strict=False)
    ), rows


def test_one_seed_one_course_another_seed_another():
    def course(seed: int) -> list[int]:
        pipeline = simulator(
            stages(0.01, 0.02, tail=1.0), [2, 3], seed=seed, machine=SimMachine(cores=4)
        )
        rows = []
        for _ in range(20):
            pipeline.advance(1.0)
            rows.append(pipeline.snapshot().rows)
        return rows

    assert course(1) == course(1)
    assert course(1) != course(2)


class Forgetful(Simulator):
    """The slow twin: works everything out again for every stretch of time."""

    def _start(self) -> float:
        self._changed()
        self._flow = None
        return super()._start()


@pytest.mark.parametrize("number", [0, 3, 4, 5, 6, 7])
def test_what_is_kept_from_one_moment_to_the_next_is_what_it_would_be(number):
    """To the bit, while knobs, back ends and the truth change, with short memory. These six have all mechanisms."""
    scenario = drawn("held out", number, changing=True)
    sizes = [
        ScheduledChange(at=at, key=f"stages.{s.name}.{key}", value=value)
        for s in scenario.stages
        for at, key, value in (
            (40, "bytes_per_row", 3 * s.bytes_per_row),
            (70, "item_bytes", s.held_bytes / 3),
        )
    ]
    machine = dataclasses.replace(
        scenario.machine, memory_limit=1.1 * scenario.machine.memory_limit
    )
    scenario = dataclasses.replace(scenario, machine=machine, changes=(*scenario.changes, *sizes))
    draw = random.Random(number)
    kept, forgetful = (
        kind(scenario.truth_at, scenario.limits, scenario.first_knobs, seed=number)
        for kind in (Simulator, Forgetful)
    )
    for _ in range(30):
        workers = {
            n: draw.randint(1, min(12, high)) for n, (_, high) in scenario.limits.workers.items()
        }
        backend = {n: draw.choice(kinds) for n, kinds in scenario.limits.backends.items()}
        for pipeline in (kept, forgetful):
            pipeline.apply(
                Knobs(
                    workers=workers,
                    backend=backend,
                    prefetch_bytes=2**21 * (1 + workers["stage0"] % 9),
                )
            )
            pipeline.advance(4)
        assert kept.snapshot() == forgetful.snapshot()


def test_it_is_a_tunable_and_refuses_what_is_outside_its_limits():
    pipeline = simulator(stages(0.01, 0.02), [1, 1])
    assert isinstance(pipeline, Tunable)
    for bad in (
        Knobs(workers={"s0": 65, "s1": 1}),
        Knobs(workers={"s0": 1}),
        Knobs(workers={"s0": 1, "s2": 1}),
        Knobs(workers={"s0": 1, "s1": 1}, backend={"s0": "process"}),
    ):
        with pytest.raises(KnobError):
            pipeline.apply(bad)
    assert dict(pipeline.knobs.workers) == {"s0": 1, "s1": 1}


def test_a_store_gives_credit_until_it_throttles():
    """A worker reads 100 items a second, the store allows 20 and 400 more: they last for 5 s."""
    parts = stages(0.01, cpu=0.0, cap_rows_per_s=20 * ROWS, credit_rows=400 * ROWS)
    pipeline = simulator(parts, [1])
    rows = []
    for _ in range(10):
        pipeline.advance(1.0)
        rows.append(pipeline.snapshot().rows)
    assert rows[3] == pytest.approx(400 * ROWS, rel=0.03)
    assert rows[-1] == pytest.approx((500 + 5 * 20) * ROWS, rel=0.03)


@pytest.mark.parametrize(("workers", "cores"), [(1, 0.8), (4, 2.0), (12, 3.0)])
def test_threads_of_others_share_the_cores_with_ours_fairly(workers, cores):
    """Four of theirs on four cores: with one of ours each gets 4/5 of a core, with twelve all get a quarter of one."""
    machine = SimMachine(cores=4, neighbour_threads=4, switch_cost=0, timer_noise=0)
    assert rate_of(simulator(stages(0.01), [workers], machine=machine)) == pytest.approx(
        cores * 100 * ROWS, rel=0.01
    )
    idle = SimMachine(cores=8, neighbour_threads=4, switch_cost=0, timer_noise=0)
    assert rate_of(simulator(stages(0.01), [min(workers, 4)], machine=idle)) == pytest.approx(
        min(workers, 4) * 100 * ROWS, rel=0.01
    ), "there are cores for all"


def test_a_simulated_stage_has_the_limits_and_the_start_of_the_real_one():
    specs = stage_spec.pipeline(
        [stage_spec.transform(name, movable=True) for name in ("first", "second")]
    )
    scenario = Scenario(
        name="real",
        machine=SimMachine(cores=3),
        stages=tuple(SimStage(**dataclasses.asdict(spec), cost_s=0.01) for spec in specs),
    )
    real, simulated = stage_spec.limits_of(specs, 3, BACKENDS), scenario.limits
    assert [(real.workers, real.backends, real.fusable)] == [
        (simulated.workers, simulated.backends, simulated.fusable)
    ]
    assert scenario.first_knobs.workers == {spec.name: spec.first_workers(3) for spec in specs}
    assert scenario.first_knobs.fused == {"shuffle"}
    assert [s.buffer_limit for s in scenario.truth_at(0.0).stages] == [
        spec.buffer_limit for spec in specs
    ]


def test_the_optimum_is_that_of_an_exhaustive_search():
    draw = random.Random(9)
    for _ in range(6):
        parts = tuple(
            SimStage(
                name=f"s{i}",
                cost_s=draw.uniform(0.005, 0.05),
                rows_per_item=ROWS,
                cpu=draw.choice([1, 0.3]),
                kappa=draw.choice([0, 0.05]),
                cliff_workers=draw.choice([0, 3]),
                cliff_factor=2.0,
            )
            for i in range(3)
        )
        truth = TrueCosts(SimMachine(cores=4, switch_cost=0.1), parts, Consumer(batch_rows=ROWS))
        limits = Limits(workers={s.name: (1, 6) for s in parts})
        found = best_knobs(truth, limits)
        got = steady(truth, [found.workers[s.name] for s in parts], ["thread"] * 3).rates[-1]
        most = max(
            steady(truth, [a, b, c], ["thread"] * 3).rates[-1]
            for a in range(1, 7)
            for b in range(1, 7)
            for c in range(1, 7)
        )
        assert got >= 0.98 * most


def test_a_change_of_truth_is_taken_over_while_running():
    machine = SimMachine(cores=8, timer_noise=0)
    slow = TrueCosts(machine, stages(0.04), Consumer(batch_rows=ROWS))
    fast = dataclasses.replace(slow, stages=stages(0.01))
    pipeline = Simulator(
        lambda at: slow if at < 10 else fast,
        Limits(workers={"s0": (1, 4)}),
        Knobs(workers={"s0": 1}),
    )
    pipeline.advance(10)
    before = pipeline.snapshot().rows
    pipeline.advance(10)
    assert before == pytest.approx(250 * ROWS, rel=0.05)
    assert pipeline.snapshot().rows - before == pytest.approx(1000 * ROWS, rel=0.05)


class TestFused:
    """Two stages of 10 and 30 ms an item, the second of which may be fused with the first."""

    PARTS = (
        SimStage(name="a", cost_s=0.01, rows_per_item=ROWS),
        SimStage(name="b", cost_s=0.06, rows_per_item=2 * ROWS, fusable=True),
    )

    def _pipeline(self, fused, workers=(4, 1), **machine):
        scenario = Scenario(
            name="fused",
            stages=self.PARTS,
            consumer=Consumer(batch_rows=ROWS),
            machine=SimMachine(**{"cores": 64, "timer_noise": 0, "switch_cost": 0} | machine),
        )
        knobs = Knobs(workers=dict(zip("ab", workers, strict=True)), fused={"b"} if fused else ())
        return Simulator(scenario.truth_at, scenario.limits, knobs)

    def test_the_workers_of_the_first_do_the_work_of_both(self):
        assert rate_of(self._pipeline(False)) == pytest.approx(ROWS / 0.03, rel=0.02)
        pipeline = self._pipeline(True)
        assert rate_of(pipeline) == pytest.approx(4 * ROWS / 0.04, rel=0.02)
        a, b = pipeline.snapshot().stages
        assert (a.workers, b.workers) == (4, 4)
        assert a.busy_s + b.busy_s == pytest.approx(4 * 30, rel=0.02)
        assert b.busy_s == pytest.approx(3 * a.busy_s, rel=0.02)
        assert b.cpu_s == pytest.approx(3 * a.cpu_s, rel=0.02)
        assert abs(a.rows - b.rows) <= 8 * ROWS

    def test_it_is_turned_while_rows_flow(self):
        pipeline = self._pipeline(False)
        before = rate_of(pipeline)
        pipeline.apply(dataclasses.replace(pipeline.knobs, fused={"b"}))
        assert rate_of(pipeline) == pytest.approx(4 * ROWS / 0.04, rel=0.02)
        pipeline.apply(dataclasses.replace(pipeline.knobs, fused=frozenset()))
        assert rate_of(pipeline) == pytest.approx(before, rel=0.02)
