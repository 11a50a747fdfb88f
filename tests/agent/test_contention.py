"""What others take of the cores: by arithmetic, and in the simulator, where it is known."""

from __future__ import annotations

import dataclasses

import pytest

from sluice.agent.costs.contention import Contention
from sluice.agent.costs.forecast import Forecast
from sluice.agent.costs.rates import PipelineRates, StageRates
from sluice.agent.lab.simulator.physics import SimMachine, SimStage
from sluice.agent.lab.simulator.rollout import run
from sluice.agent.lab.simulator.scenario import Scenario
from sluice.agent.planner_settings import DEFAULT
from sluice.agent.policies import make
from sluice.agent.policies.planner.explain import why
from sluice.ingest.knobs import Knobs, Limits
from tests.raises import assert_names


def _seen(cpu, core_wait, quota=4.0, idle=None):
    stage = StageRates(
        rows_per_s=1.0,
        busy=cpu + core_wait,
        cpu=cpu,
        starved=0.0,
        blocked=0.0,
        workers=8,
        queue_bytes=0,
        core_wait=core_wait,
    )
    return PipelineRates(
        seconds=1.0,
        rows_per_s=1.0,
        stall=1.0,
        demand_rows_per_s=None,
        cpu=cpu,
        cpu_quota=quota,
        memory_used=0,
        memory_limit=1,
        stages={"work": stage},
        idle=idle,
    )


def test_free_cores_and_our_own_crowd_are_no_pressure():
    assert Contention.of(_seen(2.0, 0.0)) == Contention(cores=4.0)
    crowd = Contention.of(_seen(4.0, 4.0))  # eight of ours on four cores, nobody else
    assert (crowd.others, crowd.slow, crowd.cores) == (0.0, 1.0, 4.0)


def test_fair_shares_tell_how_many_others_there_are():
    """Four of ours and four others on four cores: each runs half of the time."""
    found = Contention.of(_seen(2.0, 2.0))
    assert found.others == pytest.approx(4.0)
    assert found.slow == pytest.approx(2.0)
    assert found.cores == pytest.approx(4 * 8 / 12)  # eight of ours beside the four


def test_who_waits_while_cores_are_idle_waits_for_no_other_program():
    assert Contention.of(_seen(1.0, 1.0)).slow > DEFAULT.contended_ratio
    found = Contention.of(_seen(1.0, 1.0, idle=3.0))
    assert (found.others, found.slow, found.cores) == (0.0, 1.0, 4.0)
    assert Contention.of(_seen(2.0, 2.0, idle=0.0)) == Contention.of(_seen(2.0, 2.0))


def test_what_our_own_trainer_takes_is_no_other_programs():
    seen = _seen(2.0, 2.0, idle=0.0)
    assert Contention.of(dataclasses.replace(seen, cpu=4.0)).others == 0
    assert Contention.of(dataclasses.replace(seen, cpu=3.0)).others == pytest.approx(
        2.0
    )  # one runs, another waits


def test_the_bottleneck_names_the_cores_that_others_would_use():
    limits, knobs = Limits(workers={"work": (1, 8)}), Knobs(workers={"work": 8})
    seen = _seen(2.0, 2.0)
    look = Forecast.of(seen, knobs, limits, {}, other_cpu_s=0.0, demand=1.0)
    assert_names(why("cores", look, seen), "2 of 4", "want 4")


def test_a_little_work_says_nothing():
    assert Contention.of(_seen(0.01, 1.0)) == Contention(cores=4.0)


def test_the_planner_does_not_grow_where_others_use_the_cores():
    def sizes(neighbour):
        scenario = Scenario(
            name="pressed",
            seconds=30,
            stages=(SimStage(name="work", cost_s=0.04, cpu=0.5),),
            machine=SimMachine(cores=8, neighbour_cores=neighbour, timer_noise=0),
            start={"work": 2},
        )
        seen = []
        run(
            scenario,
            make("planner"),
            observe=lambda snapshot, knobs, reason: seen.append(knobs.workers["work"]),
        )
        return seen

    assert next(n for n in sizes(0.0) if n != 2) == 8
    assert max(sizes(7.5)) <= 4
