"""looks.jsonl: what a policy was asked is read back exactly, and a damaged or missing record is named."""

from __future__ import annotations

import json

import pytest

from sluice.agent.report import run_folder
from sluice.agent.report.looks import read
from tests.agent.fake import FakePipeline, FakeStage, Script, controlled
from tests.product import Policy, RunError, RunFolder, Tuner
from tests.raises import raises

STAGES = [FakeStage(name="decode", wait_s=0.05), FakeStage(name="slow", cpu_s=0.004)]


def recorded(folder, policy: Policy) -> FakePipeline:
    """Records a simulated run of this policy. Returns its pipeline."""
    pipeline = FakePipeline(STAGES)
    with RunFolder.create(folder, {}, clock=lambda: pipeline.now) as run:
        controller, _ = controlled(pipeline, policy, record=run.event, looks=run.look)
        while pipeline.now < 12.0:
            controller.step()
            pipeline.advance(controller.wait_s)
    return pipeline


class Watched(Tuner):
    """The tuner, with all that it was asked and all that it chose."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def decide(self, snapshot, state):
        after = super().decide(snapshot, state)
        self.asked.append((snapshot, after[0]))
        return after


def test_what_was_asked_is_read_back_exactly(tmp_path):
    policy = Watched()
    pipeline = recorded(tmp_path / "run", policy)
    (start,) = read(tmp_path / "run")
    assert [(look.snapshot, look.knobs) for look in start.looks] == policy.asked
    assert len({look.knobs.text for look in start.looks}) > 1, "the tuner changed something"
    assert start.limits == pipeline.limits
    assert start.policy == "auto"


def test_the_look_on_which_a_policy_failed_is_recorded(tmp_path):
    recorded(tmp_path / "run", Script(1, 1, 1, ZeroDivisionError("by zero")))
    looks = read(tmp_path / "run")[0].looks
    assert [look.error for look in looks] == [None] * 3 + ["ZeroDivisionError: by zero"]


@pytest.mark.parametrize(
    "damage",
    [
        {"chose": [{"workers": 3}, None]},
        {"seen": [[]]},
    ],
)
def test_a_damaged_line_is_named(tmp_path, damage):
    recorded(tmp_path / "run", Tuner())
    path = tmp_path / "run" / "looks.jsonl"
    lines = path.read_text().splitlines()
    lines[3] = json.dumps(json.loads(lines[3]) | damage)
    path.write_text("\n".join(lines) + "\n")
    with raises(RunError, "line 4", "is damaged or of another version"):
        read(tmp_path / "run")


@pytest.mark.parametrize("text", [None, ""])
def test_a_run_without_looks_says_so(tmp_path, text):
    if text is not None:
        (tmp_path / "looks.jsonl").write_text(text)
    with raises(RunError, "holds no looks", "record it again"):
        read(tmp_path)


def test_the_record_ends_at_its_largest_size(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_folder, "MOST_LOOK_BYTES", 5_000)
    recorded(tmp_path / "run", Tuner())
    assert 5_000 < (tmp_path / "run" / "looks.jsonl").stat().st_size < 6_000
    assert "looks are no longer recorded" in capsys.readouterr().err
    assert read(tmp_path / "run")[0].looks
