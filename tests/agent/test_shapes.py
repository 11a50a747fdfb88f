"""The planner where the stage to move to processes is not the narrowest: series of snapshots as live pipelines gave."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from sluice.agent.costs.forecast import Forecast
from sluice.agent.costs.stage_cost import Point, StageCost
from sluice.agent.costs.stage_layouts import suspected
from sluice.agent.lab.simulator.fluid import Simulator
from sluice.agent.lab.simulator.physics import Consumer, SimMachine, SimStage
from sluice.agent.lab.simulator.rollout import run
from sluice.agent.lab.simulator.scenario import Scenario
from sluice.agent.planner_settings import DEFAULT
from sluice.agent.policies import make
from sluice.ingest.knobs import Knobs, Limits
from tests.agent.made_figures import pipeline_rates, snapshot, stage_rates, stage_stats
from tests.raises import assert_names

NAMES = ("read", "shuffle", "python", "collate")
LIMITS = Limits(
    workers={"read": (1, 2), "shuffle": (1, 2), "python": (1, 2), "collate": (1, 1)},
    backends={"python": ("thread", "process")},
)
ROWS = 65_536  # of an item


def _stage(name, rates, seconds, workers, backend):
    """`rates`: items a second, workers busy, cores, and workers that wait for a core."""
    items, busy, cpu, core_wait = (rate * seconds for rate in rates)
    done = {"items": int(items), "rows": int(items) * ROWS, "bytes": int(items) * 2**20}
    times = {"busy_s": busy, "cpu_s": cpu, "core_wait_s": core_wait}
    return stage_stats(name, workers=workers, backend=backend, **done, **times)


class _Series:
    """A pipeline that always measures the same for a setting."""

    def __init__(self, measured, **more):
        usual = {"cpu_used_s": 1.1, "memory_limit": 2**34, "idle": None}
        self.measured, self.more = measured, usual | more
        self.policy = make("planner")
        self.knobs = Knobs(workers=dict.fromkeys(NAMES, 1))
        self.state = self.policy.initial(LIMITS, self.knobs)
        self.now = snapshot(
            0.0,
            *(_stage(n, (0,) * 4, 0, 1, "thread") for n in NAMES),
            memory_used=2**28,
            memory_limit=self.more["memory_limit"],
            cpu_quota=2,
            cores_idle_s=None if self.more["idle"] is None else 0,
        )
        self.reasons = []

    def moves(self, ticks):
        """Whether the transform is moved to processes within so many ticks."""
        for _ in range(ticks):
            self.knobs, self.state, reason = self.policy.decide(self.now, self.state)
            self.reasons.append(reason.text)
            if "python" in self.knobs.backend:
                return True
            self.now = self._next()
        return False

    def _next(self):
        measured, stages = self.measured(self.knobs), []
        for before in self.now.stages:
            more = _stage(
                before.name,
                measured[before.name],
                1.0,
                self.knobs.workers[before.name],
                self.knobs.backend.get(before.name, "thread"),
            )
            added = {
                f: getattr(before, f) + getattr(more, f)
                for f in ("items", "rows", "bytes", "busy_s", "cpu_s", "core_wait_s")
            }
            stages.append(dataclasses.replace(more, **added))
        rows = ROWS * measured["collate"][0]
        return dataclasses.replace(
            self.now,
            at=self.now.at + 1,
            sequence=self.now.sequence + 1,
            stages=tuple(stages),
            rows=self.now.rows + rows,
            batches=self.now.batches + 1,
            consumer_wait_s=self.now.consumer_wait_s + 1,
            cpu_used_s=self.now.cpu_used_s + self.more["cpu_used_s"],
            cores_idle_s=None
            if self.more["idle"] is None
            else self.now.cores_idle_s + self.more["idle"],
        )


def _bent(knobs):
    """Two workers of the transform wait for each other; two readers wait longer, and for the same lock."""
    items = 8
    n, readers = knobs.workers["python"], knobs.workers["read"]
    return {
        "read": (items, 0.95 * readers, 0.15, 0.0),
        "shuffle": (items, 0.3, 0.2, 0.0),
        "python": (items, 0.7 if n == 1 else 1.4, 0.65, 0.0),
        "collate": (items, 0.02, 0.02, 0.0),
    }


def _hidden(knobs):
    """The transform is at work all the time, and never waits; the others wait for its lock."""
    items = 8
    return {
        "read": (items, 0.9 * knobs.workers["read"], 0.15, 0.1),
        "shuffle": (items, 0.75, 0.1, 0.1),
        "python": (items, 0.9, 0.85, 0.0),
        "collate": (items, 0.05, 0.02, 0.0),
    }


def _idle(knobs):
    """The transform hardly computes."""
    return {**_hidden(knobs), "python": (8, 0.9, 0.2, 0.0)}


def _parallel(knobs):
    """The transform computes on more than a core, so it holds no lock."""
    return {**_hidden(knobs), "python": (8, 1.5, 1.45, 0.0)}


@pytest.mark.parametrize(
    ("measured", "more", "why"),
    [
        (_bent, {}, "wait for each other"),
        (_hidden, {}, "hold the lock"),
    ],
)
def test_the_stage_that_holds_the_lock_is_moved_though_another_is_narrower(measured, more, why):
    series = _Series(measured, **more)
    assert series.moves(12), series.reasons
    assert_names(series.reasons[-1], "python", why)


@pytest.mark.parametrize(
    ("measured", "more"),
    [
        (_hidden, {"memory_limit": 2**28 + 2**27}),
        (_hidden, {"cpu_used_s": 1.95}),
        (_idle, {}),
        (_parallel, {"cpu_used_s": 1.7}),
    ],
    ids=["no memory", "no core", "no work", "no lock"],
)
def test_a_stage_stays_where_processes_cannot_help(measured, more):
    assert not _Series(measured, **more).moves(30)


@pytest.mark.parametrize(("cpu", "stages"), [(1.0, ["python"]), (2.0, [])])
def test_no_lock_is_suspected_while_no_core_is_free(cpu, stages):
    rates = {n: stage_rates(busy=1.0, cpu=0.9 if n == "python" else 0.1) for n in NAMES}
    seen = pipeline_rates(cpu=cpu, cpu_quota=2.0, memory_limit=2**34, stages=rates)
    point = {1: Point(busy_s=1e-3, cpu_s=1e-4)}
    costs = {n: StageCost(name=n, points=point, backend="thread") for n in NAMES}
    knobs = Knobs(workers=dict.fromkeys(NAMES, 1))
    forecast = Forecast.of(seen, knobs, LIMITS, costs, other_cpu_s=0.0, demand=math.inf)
    assert [one.stage for one in suspected(forecast, seen)] == stages


def _stages(cost_s, **more):
    """Four in a row, of which the third and the fourth may be fused with the one before."""
    return [
        SimStage(name=n, cost_s=cost_s, rows_per_item=1024, fusable=n in "cd", **more)
        for n in "abcd"
    ]


def _settled(stages, machine, *, fused=(), ticks=60):
    """The simulator after so many decisions, and how fast it is then."""
    scenario = Scenario(name="fused", stages=tuple(stages), machine=machine)
    knobs = dataclasses.replace(scenario.first_knobs, fused=fused)
    simulator, policy = Simulator(scenario.truth_at, scenario.limits, knobs), make("planner")
    state, reasons = policy.initial(scenario.limits, knobs), []
    for _ in range(ticks):
        knobs, state, reason = policy.decide(simulator.snapshot(), state)
        reasons.append(reason.text)
        simulator.apply(knobs)
        simulator.advance(1.0)
    before = simulator.snapshot()
    simulator.advance(5.0)
    return simulator, (simulator.snapshot().rows - before.rows) / 5.0, reasons


def test_cheap_stages_are_fused_where_handing_over_takes_cores_that_are_short():
    machine = SimMachine(cores=2, handover_s=DEFAULT.handover_s)
    apart = [dataclasses.replace(s, fusable=False) for s in _stages(1.2 * DEFAULT.handover_s)]
    simulator, rate, reasons = _settled(_stages(1.2 * DEFAULT.handover_s), machine)
    assert simulator.knobs.fused == {"c", "d"}
    assert any("from b to c" in text for text in reasons)
    assert rate > _settled(apart, machine)[1]


@pytest.mark.parametrize(
    ("cost", "machine"),
    [
        (
            100 * DEFAULT.handover_s,
            SimMachine(cores=2, handover_s=DEFAULT.handover_s),
        ),  # it is nothing beside the work
        (
            1.2 * DEFAULT.handover_s,
            SimMachine(cores=64, handover_s=DEFAULT.handover_s),
        ),  # cores are free
    ],
)
def test_nothing_is_fused_where_that_would_save_nothing_that_counts(cost, machine):
    simulator, _, _ = _settled(_stages(cost, workers=4, workers_a_core=0), machine)
    assert simulator.knobs.fused == frozenset()


def test_a_fusion_that_brought_nothing_is_undone_and_not_tried_again():
    """As though handing over took time, but it is the trainer's loop on the same cores."""
    scenario = Scenario(
        name="trainer",
        stages=tuple(_stages(1.2 * DEFAULT.handover_s)),
        machine=SimMachine(cores=2),
        consumer=Consumer(batch_rows=1024, step_s=DEFAULT.handover_s, cpu=1.0),
    )
    fused = []
    run(
        scenario, make("planner"), observe=lambda snapshot, knobs, reason: fused.append(knobs.fused)
    )
    assert any(fused), "it was tried"
    assert fused[-1] == frozenset()
    assert len([1 for before, after in itertools.pairwise(fused) if before < after]) <= 2
