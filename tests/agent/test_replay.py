"""`sluice replay`: the record of a run is enough to decide it again, and to simulate it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from sluice.agent.__main__ import main
from sluice.agent.controller import Controller
from sluice.agent.evaluate import replay as module
from sluice.agent.evaluate.replay import replay
from sluice.agent.policies import PRODUCT, make
from sluice.agent.policies.opening import policy as opening
from sluice.agent.report.looks import read
from sluice.agent.report.run_folder import RunError, RunFolder
from sluice.agent.simulator.calibration import CalibrationError
from sluice.agent.simulator.fitted_run import fit_run
from sluice.agent.simulator.fluid import Simulator
from sluice.agent.simulator.physics import Consumer, SimMachine, SimStage
from sluice.agent.simulator.rollout import reference
from sluice.agent.simulator.scenario import Scenario, ScheduledChange
from sluice.agent.tunable import Policy, Reason
from sluice.ingest.knobs import KnobError
from tests.raises import raises

SLOWER = ScheduledChange(at=30.0, key="stages.lookup.cost_s", value=0.2)


def scenario(*changes: ScheduledChange, seconds: float = 60.0, step_s: float = 0.0) -> Scenario:
    return Scenario(
        name="lookup",
        seconds=seconds,
        machine=SimMachine(cores=4, timer_noise=0.0),
        consumer=Consumer(batch_rows=1024, step_s=step_s),
        stages=(
            SimStage(name="read", cost_s=0.01, cpu=0.5, workers=32),
            SimStage(name="lookup", cost_s=0.05, cpu=0.05, workers=64),
            SimStage(name="collate", cost_s=0.0005, workers=1),
        ),
        changes=changes,
    )


def record(folder, policy: Policy | str = "auto", case: Scenario | None = None, events=()) -> str:
    """Records a simulated run of this policy in a run folder."""
    case = case or scenario()
    pipeline = Simulator(case.truth_at, case.limits, case.first_knobs)
    with RunFolder.create(folder, {"kind": "bench"}, clock=lambda: pipeline.now) as run:
        controller = Controller(
            pipeline,
            make(policy) if isinstance(policy, str) else policy,
            record=run.event,
            looks=run.look,
            clock=lambda: pipeline.now,
        )
        while pipeline.now < case.seconds:
            controller.step()
            pipeline.advance(controller.wait_s)
            for at, event in events:
                if pipeline.now - controller.wait_s < at <= pipeline.now:
                    run.event(event)
    return str(folder)


@pytest.mark.parametrize("name", PRODUCT)
def test_the_same_policy_decides_the_same(tmp_path, name):
    found = replay(record(tmp_path / "run", name, scenario(seconds=12.0))).figures
    assert found["policy"] == name
    assert found["same_looks"] == found["looks"] >= 12
    assert found["first_difference_s"] is None


def test_the_first_different_decision_is_named(tmp_path):
    path = tmp_path / "run"
    record(path)
    lines = [json.loads(line) for line in (path / "looks.jsonl").read_text().splitlines()]
    last = [line for line in lines if "chose" in line][-1]
    last["chose"][0]["workers"]["lookup"] += 1
    (path / "looks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = replay(str(path))
    assert found.figures["first_difference_s"] == last["at"]
    assert found.figures["same_looks"] < found.figures["looks"]
    assert re.search(r"first different decision is at .* s: lookup (\d+) → \d+", found.text)
    assert "version or the weights" in found.text


def test_what_another_policy_would_have_done_is_told_in_words(tmp_path):
    found = replay(record(tmp_path / "run", "fixed"), ["planner"])
    assert 0 < found.figures["differing_looks"]["planner"] < found.figures["looks"]
    assert "lookup is the bottleneck" in found.text
    assert re.search(r"lookup 1 → \d+", found.text)
    assert "The snapshots show what the recorded knobs brought" in found.text
    assert list(found.figures["share_of_optimum"]) == ["recorded decisions", "fixed", "planner"]


def test_the_fit_is_the_pipeline_that_was_recorded(tmp_path):
    case = scenario(SLOWER)
    found = replay(record(tmp_path / "run", "planner", case)).figures
    assert found["fit_error"] == pytest.approx(0, abs=0.05)
    optimum = reference(case).rows / case.seconds
    assert found["optimum_rows_per_s"] == pytest.approx(optimum, rel=0.1)
    shares = found["share_of_optimum"]
    assert shares["fixed"] < 0.2
    assert 0.8 < shares["planner"] <= 1.02
    assert shares["recorded decisions"] == pytest.approx(shares["planner"], abs=0.05)


def test_each_period_has_its_own_costs(tmp_path):
    record(tmp_path / "run", "planner", scenario(SLOWER))
    fitted = fit_run(read(tmp_path / "run"), [30.0, 32.0])
    assert len(fitted.costs) == 2, "a fault and the look that noticed it are one change"
    costs = [
        next(s.cost_s for s in fitted.truth_at(at).stages if s.name == "lookup") for at in (5, 50)
    ]
    assert costs == pytest.approx([0.05, 0.2], rel=0.15)


def test_injected_faults_and_noticed_changes_end_a_period(tmp_path):
    fault = {"kind": "fault", "fault": "slow-transform=4@30s", "did": "slower"}
    told = replay(
        record(tmp_path / "run", "fixed", scenario(SLOWER), [(30.0, fault)]), ["planner"]
    ).text
    assert "Periods with costs of their own: 2." in told


def test_the_trainers_step_is_fitted(tmp_path):
    found = replay(record(tmp_path / "run", "planner", scenario(step_s=0.02))).figures
    assert found["fit_error"] == pytest.approx(0, abs=0.05)
    assert found["optimum_rows_per_s"] == pytest.approx(1024 / 0.02, rel=0.05)


def test_a_fit_that_is_off_is_called_so(tmp_path, monkeypatch):
    path = record(tmp_path / "run", "planner")
    assert "off by more than" not in replay(path, ["fixed"]).text

    def twice(*given):
        fitted = fit_run(*given)
        return replace(fitted, rows_per_s=2 * fitted.rows_per_s)

    monkeypatch.setattr(module, "fit_run", twice)
    found = replay(path, ["fixed"])
    assert found.figures["fit_error"] == pytest.approx(-0.5, abs=0.03)
    assert "off by more than 15 %" in found.text
    assert found.headline.startswith("The simulator is off by more than 15 %")
    assert "Share of the simulated optimum" not in found.text


def test_no_share_is_above_100_percent(tmp_path, monkeypatch):
    """A policy can bring more than the simulated optimum. Then this is said."""
    path = record(tmp_path / "run", "planner")

    def half(case):
        best = reference(case)
        return replace(best, rows=best.rows / 2)

    monkeypatch.setattr(module, "reference", half)
    found = replay(path, ["fixed"])
    assert found.figures["share_of_optimum"]["planner"] > 1.5
    assert "planner more than the optimum, which is not the best" in found.headline
    assert all(int(share) <= 100 for share in re.findall(r"(\d+) %", found.text))
    assert "-" not in found.text.rpartition("optimum  regret")[2]


def test_a_stage_in_processes_stays_there(tmp_path):
    case = scenario()
    stages = tuple(
        replace(one, backends=("process", "thread")) if one.name == "lookup" else one
        for one in case.stages
    )
    found = replay(record(tmp_path / "run", "planner", replace(case, stages=stages)))
    assert "These stages stay in processes: lookup." in found.text
    assert found.figures["fit_error"] == pytest.approx(0, abs=0.1)


def test_a_short_run_is_decided_again_but_not_simulated(tmp_path):
    found = replay(record(tmp_path / "run", case=scenario(seconds=0.4)))
    assert found.figures["same_looks"] == found.figures["looks"] > 0
    assert "too few to fit" in found.text
    assert "share_of_optimum" not in found.figures


def test_looks_without_rows_are_not_fitted():
    with raises(CalibrationError, "0 looks with rows are too few"):
        fit_run([], [])


def test_weights_that_are_missing_are_named_and_the_rest_goes_on(tmp_path, monkeypatch):
    path = record(tmp_path / "run")
    monkeypatch.setattr(opening, "in_use", lambda: None)
    found = replay(path)
    assert re.search(r"had the weights [0-9a-f]{12}, and here are none", found.text)
    assert "planner" in found.figures["share_of_optimum"]


class Own(Policy):
    name = "my own"

    def initial(self, limits, knobs):
        return knobs

    def decide(self, snapshot, state):
        return state, state, Reason(text="as it is")


def test_a_policy_of_the_users_own_cannot_be_checked_but_compared(tmp_path):
    found = replay(record(tmp_path / "run", Own()))
    assert "cannot be checked: no policy 'my own'" in found.text
    assert found.figures["differing_looks"]["planner"] > 0


class Failing(Own):
    name = "fixed"

    def decide(self, snapshot, state):
        raise ZeroDivisionError("by zero")


def test_an_error_of_the_policy_is_a_decision_too(tmp_path, monkeypatch):
    path = record(tmp_path / "run", Failing())
    assert replay(path).figures["first_difference_s"] is not None, "the product's does not fail"
    monkeypatch.setattr(module.policies, "make", lambda *_: Failing())
    assert replay(path, ["fixed"]).figures["same_looks"] == 1


def test_unknown_policies_and_runs_without_looks_are_refused(tmp_path):
    path = record(tmp_path / "run")
    with raises(KnobError, "no policy 'plannr'"):
        replay(path, ["plannr"])
    (tmp_path / "run" / "looks.jsonl").unlink()
    with raises(RunError, "holds no looks"):
        replay(path)
    with raises(RunError, "no run folder"):
        replay(str(tmp_path))


def test_the_command_prints_the_page_and_leaves_it_beside_the_report(tmp_path, capsys):
    path = record(tmp_path / "run")
    found = main(["replay", path, "--policy", "planner"])
    out = capsys.readouterr().out
    assert out.startswith("All 6")
    assert "planner, asked on the run's snapshots" in out
    page = (tmp_path / "run" / "replay.html").read_text()
    assert found is not None
    assert found["page"] == str(tmp_path / "run" / "replay.html")
    assert "All policies in a simulator fitted to this run" in page
    assert "<td" in page


@pytest.mark.slow
def test_a_real_run_is_decided_again(tmp_path, capsys):
    from sluice.benchmarks.small_table import small_table
    from sluice.ingest.__main__ import main as ingest

    table = small_table(tmp_path / "clicks", rows=20_000, row_group_rows=256)
    words = "--batch-size 256 --seconds 6 --tuning auto --udf tests.ingest.twin:halve"
    bench = ingest(
        [
            "bench",
            table.uri,
            *words.split(),
            "--store-latency-ms",
            "5",
            "--run-dir",
            str(tmp_path / "run"),
        ]
    )
    assert bench is not None
    found = replay(str(tmp_path / "run")).figures
    assert found["same_looks"] == found["looks"] > 0
    assert found["first_difference_s"] is None
    assert found["recorded_rows_per_s"] > 0
    assert found["share_of_optimum"]["recorded decisions"] > 0
    capsys.readouterr()


@pytest.mark.parametrize(("ranks", "whose"), [(1, "The run had"), (2, "Each rank of the run had")])
def test_rates_are_said_to_be_those_of_a_rank_if_there_are_several(tmp_path, ranks, whose):
    path = tmp_path / "run"
    record(path, "fixed")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "kind": "train", "ranks": ranks}))
    told = replay(str(path)).text
    assert whose in told
    assert ("rows/s a rank" in told) == (ranks > 1)
