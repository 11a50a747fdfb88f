"""`sluice learn`: the policy learns from the records of runs; weights are installed only if they are better."""

from __future__ import annotations

import dataclasses

import pytest

from sluice.agent import policies
from sluice.agent.__main__ import learn
from sluice.agent.lab.simulator.random_pipelines import pipeline
from sluice.agent.policies.auto import Auto
from sluice.agent.policies.opening import weights as weights_file
from sluice.agent.policies.opening.policy import SHAPES, NetworkPolicy
from sluice.agent.policies.opening.weights import read, write
from sluice.agent.report.looks import LookWriter
from sluice.agent.report.run_folder import RunFolder
from sluice.common.errors import UsageError
from tests.agent.test_opening_policy import WIDE, given
from tests.agent.test_opening_policy import weights as drawn_weights
from tests.raises import raises

pytestmark = pytest.mark.slow

RUNS = 24
NUMBERS = [n for n in range(4 * RUNS) if pipeline("training", n).machine.cores >= 8][:RUNS]
"""Pipelines with several cores: on one core the rounding of workers to 1 or 2 is a lesson of its own."""


@pytest.fixture
def weights(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weights_file, "SHIPPED", tmp_path / "absent")
    path = tmp_path / "weights.safetensors"
    write(path, drawn_weights(), {"lives": 10, "ranges": WIDE})
    return path


def _runs(folder, settled, rates=lambda asked: 1e5):
    """Runs that looked, and settled on what `settled` says of their first look with work in all stages."""
    for number, drawn in enumerate(NUMBERS):
        asked = given(drawn)
        end, begun = settled(asked), asked.seen
        last = dataclasses.replace(
            begun, at=begun.at + 10, rows=begun.rows + int(10 * rates(asked))
        )
        with RunFolder.create(folder / str(number), {"kind": "load"}) as run:
            looks = LookWriter(run.look)
            looks.start("auto", dict, asked.limits, asked.knobs, None)
            for snapshot, knobs in ((asked.begun, asked.knobs), (asked.seen, end), (last, end)):
                looks.decided(snapshot, knobs, None)
    return [str(folder / str(number)) for number in range(RUNS)]


def _many(asked):
    workers = {name: 4 * count for name, count in asked.knobs.workers.items()}
    return asked.limits.clamp(dataclasses.replace(asked.knobs, workers=workers))


def test_what_runs_settled_on_is_learned_and_installed_where_the_next_run_looks(tmp_path, weights):
    assert policies.make("auto").__class__ is not Auto
    runs = _runs(tmp_path / "runs", _many)
    found = learn([*runs, "--weights", str(weights), "--steps", "60"])
    assert found["better"]
    assert found["error_after"] < found["error_before"]
    assert (found["taught"], found["apart"]) == (18, 6)
    assert found["weights"] == str(weights_file.installed())
    assert isinstance(policies.make("auto"), Auto)
    _, record = read(weights_file.installed(), SHAPES)
    assert record["own_runs"]["taught"] == 18
    assert record["own_runs"]["command"].startswith("sluice learn ")


def test_weights_that_already_choose_so_stay_as_they_are(tmp_path, weights):
    tensors, record = read(weights, SHAPES)
    write(
        weights,
        {name: tensor * (not name.startswith("pipeline")) for name, tensor in tensors.items()},
        record,
    )
    opener = NetworkPolicy.load(weights)
    runs = _runs(
        tmp_path / "runs",
        lambda asked: opener.choose(asked).knobs,
        lambda asked: float(opener.choose(asked).rows_per_s),
    )
    found = learn([*runs, "--weights", str(weights), "--steps", "60"])
    assert not found["better"]
    assert not weights_file.installed().exists()


def test_too_few_records_are_refused_and_so_is_having_nothing_to_go_on_from(tmp_path, weights):
    runs = _runs(tmp_path / "runs", _many)
    with raises(UsageError, "2 runs", "2 usable"):
        learn([*runs[:2], "--weights", str(weights)])
    with raises(UsageError, "no weights"):
        learn(runs)
