"""Pipelines in which the planner once got stuck, or was killed, and what it does there now. All are simulated."""

from __future__ import annotations

import pytest

from sluice.agent.lab.simulator.physics import GIB, MIB, SimMachine, SimStage
from sluice.agent.lab.simulator.random_pipelines import pipeline
from sluice.agent.lab.simulator.rollout import run
from sluice.agent.lab.simulator.scenario import Scenario, ScheduledChange
from sluice.agent.policies import make

pytestmark = pytest.mark.slow

BOTH = ("thread", "process")


def _stage(name, cost_s, **more):
    return SimStage(name=name, cost_s=cost_s, rows_per_item=4096, bytes_per_row=200, **more)


def neighbour(cores: float, taken: float, until: float) -> Scenario:
    """A neighbour that takes cores, and gives them back. The planner waited for minutes, 0.39 to 0.76."""
    return Scenario(
        name="neighbour",
        seconds=180,
        machine=SimMachine(cores=cores, neighbour_cores=taken),
        stages=(
            _stage("decode", 0.02),
            _stage("udf", 0.1),
            _stage("more", 0.04),
            _stage("out", 0.002),
        ),
        changes=(ScheduledChange(at=until, key="machine.neighbour_cores", value=0),),
    )


def _outcome(scenario):
    outcome = run(scenario, make("planner"))
    assert not outcome.killed
    return outcome


@pytest.mark.parametrize(("cores", "taken", "until"), [(32, 24.0, 100), (8, 6.5, 40)])
def test_cores_that_a_neighbour_gives_back_are_used(cores, taken, until):
    outcome = _outcome(neighbour(cores, taken, until))
    assert outcome.rates[-1] > 2 * outcome.rates[until - 1]


def test_processes_of_380_mib_never_fill_the_memory():
    """The run was killed, as each process was expected to need 50 MiB."""
    seen = []
    scenario = Scenario(
        name="heavy",
        seconds=60,
        machine=SimMachine(cores=16, memory_limit=2.6 * GIB),
        stages=(
            _stage("decode", 0.005),
            _stage("udf", 0.08, lock=0.8, backends=BOTH, process_bytes=380 * MIB),
            _stage("out", 0.002),
        ),
    )
    outcome = run(scenario, make("planner"), governor=False, observe=lambda s, k, r: seen.append(k))
    assert not outcome.killed
    assert outcome.peak_memory < 0.9
    assert seen[-1].backend["udf"] == "process"
    assert seen[-1].workers["udf"] <= 6
    assert outcome.rates[-1] > 3 * outcome.rates[1]


def test_a_stage_goes_on_in_its_threads_where_no_process_starts():
    scenario = Scenario(
        name="never",
        seconds=500,
        machine=SimMachine(cores=16, memory_limit=2.6 * GIB),
        stages=(
            _stage("decode", 0.005),
            _stage("udf", 0.08, lock=0.8, backends=BOTH, process_start_s=1000),
        ),
    )
    seen = []
    outcome = run(
        scenario, make("planner"), observe=lambda s, k, r: seen.append((k.backend["udf"], r.text))
    )
    assert min(outcome.rates[1:]) > 0.5 * max(outcome.rates), "its threads work all the time"
    assert {backend for backend, _ in seen} == {"thread", "process"}
    assert seen[-1][0] == "thread"
    assert any("is undone" in text for _, text in seen)


def test_a_cost_that_rose_soon_after_an_undone_change_counts_once_the_change_cannot_be_the_cause():
    """Two seconds after a failed growth was undone, its stage became 1.45 times dearer. The planner took that for an
    effect of its own change. It waited 400 seconds before the next try, and had .66 of the rows."""
    scenario = pipeline("hidden", 15056, changing=True)
    assert _outcome(scenario).knobs.workers["stage1"] > 8


def test_a_stage_that_lost_workers_and_became_dearer_has_changed_by_itself():
    """The planner took that for an effect of its own change, and had .19 of the rows."""
    scenario = pipeline("held out", 796164)
    assert run(scenario, make("planner"), seed=796164).knobs.workers["stage0"] > 16
