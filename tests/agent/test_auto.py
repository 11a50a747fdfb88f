"""`auto` with an opener: when it opens, what it is held against, and what is left of it."""

from __future__ import annotations

import dataclasses
import math
import types

import pytest

from sluice.agent.controller import Controller
from sluice.agent.lab.simulator.physics import GIB, MIB
from sluice.agent.policies.auto import Auto
from sluice.agent.policies.opening.contract import Foreknowledge, InitialSetting
from sluice.agent.policies.planner.planner import Planner
from sluice.agent.report.narrative import tell
from sluice.agent.report.run_folder import Run, RunFolder
from sluice.agent.runtime.foreknowledge import foreknowledge
from tests.agent.fake import FakePipeline, FakeStage
from tests.raises import assert_names

STAGES = [
    FakeStage(name="decode", cpu_s=0.002, wait_s=0.05),
    FakeStage(name="bid", cpu_s=0.004),
    FakeStage(name="collate", cpu_s=0.001),
]
GOOD = {"decode": 24, "bid": 2, "collate": 1}


class Says:
    """An opener that says what its test wants, and remembers what it was asked."""

    def __init__(self, workers=None, *, rows_per_s=math.inf, inside=True, **more):
        self.workers, self.rate, self.inside, self.more, self.asked = (
            workers or GOOD,
            rows_per_s,
            inside,
            more,
            [],
        )

    def choose(self, given):
        self.asked.append(given)
        knobs = dataclasses.replace(given.knobs, workers=self.workers, **self.more)
        return InitialSetting(
            knobs=knobs,
            reason="what it was taught",
            rows_per_s=min(self.rate, 3e6) if self.inside else None,
        )


def _run(policy, seconds, pipeline=None, **more):
    pipeline = pipeline or FakePipeline(STAGES)
    events, until = [], pipeline.now + seconds
    how = {"record": events.append, "clock": lambda: pipeline.now, **more}
    controller, looks = Controller(pipeline, policy, **how), []
    while pipeline.now < until - 1e-6:
        controller.step()
        looks.append(round(pipeline.now, 2))
        pipeline.advance(controller.wait_s)
    assert controller.frozen is None, controller.frozen
    decisions = [event for event in events if event["kind"] == "decision"]
    return pipeline, controller, decisions, looks


def test_the_initial_setting_comes_a_quarter_of_a_second_after_the_first_look_and_only_once():
    opener = Says()
    pipeline, _, decisions, looks = _run(Auto(opener), 12)
    assert looks[:7] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 2.25], (
        "quick ones until the initial setting is judged"
    )
    assert pipeline.applied[0].workers == GOOD
    assert_names(
        decisions[0]["reason"]["text"], "learned policy", "decode 1 → 24, bid 1 → 2", "planner"
    )
    (given,) = opener.asked
    assert (given.begun.at, given.knobs.workers["decode"], given.process_bytes) == (0.0, 1, None)
    assert pipeline.knobs.workers["decode"] >= 24
    assert not any("undone" in decision["reason"]["text"] for decision in decisions)


def test_a_reader_that_rests_does_not_prevent_an_initial_setting():
    class ReadBefore(FakePipeline):
        """Its reader did all that there is to do before the first look."""

        def snapshot(self):
            seen = super().snapshot()
            read = dataclasses.replace(
                seen.stages[0],
                items=500,
                rows=500_000,
                bytes=500 * MIB,
                busy_s=0.5,
                cpu_s=0.5,
                wait_input_s=0.0,
                wait_output_s=0.0,
            )
            return dataclasses.replace(seen, stages=(read, *seen.stages[1:]))

    stages = [STAGES[0], FakeStage(name="bid", cpu_s=0.001, wait_s=0.05), STAGES[2]]
    opener, pipeline = Says({"decode": 24, "bid": 12, "collate": 1}), ReadBefore(stages)
    pipeline.advance(1)
    _, _, decisions, _ = _run(Auto(opener), 3, pipeline)
    assert len(opener.asked) == 1
    assert pipeline.applied[0].workers == {"decode": 1, "bid": 12, "collate": 1}, (
        "a stage at rest keeps its workers"
    )
    assert "initial setting" in decisions[0]["reason"]["text"]


def test_an_initial_setting_that_brings_less_than_the_planner_promised_is_replaced():
    planned, _, _, _ = _run(Planner(), 1.5)
    pipeline, _, decisions, _ = _run(Auto(Says({"decode": 2, "bid": 8, "collate": 8})), 6)
    assert pipeline.applied[0].workers["bid"] == 8
    assert pipeline.applied[1].workers == planned.applied[0].workers
    assert decisions[1]["reason"]["details"]["kind"] == "own"


def test_an_initial_setting_that_promises_less_than_the_planners_own_is_not_tried():
    planned, _, _, _ = _run(Planner(), 1.5)
    pipeline, _, decisions, _ = _run(Auto(Says(rows_per_s=1000.0)), 1.5)
    assert pipeline.applied[0].workers == planned.applied[0].workers
    assert_names(decisions[0]["reason"]["text"], "learned policy not used", "1,000 rows/s")


def test_the_learned_policy_is_not_used_where_the_trainer_does_not_wait():
    fed = FakePipeline(STAGES, step_s=0.1)
    fed.advance(1.0)
    pipeline, controller, _, _ = _run(Auto(Says()), 0.5, fed)
    assert not pipeline.applied
    assert controller.opening is None or not controller.opening["tried"]
    assert_names(controller.reason.text, "learned policy not used", "trainer")


def test_an_initial_setting_takes_no_more_than_its_share_of_the_free_memory():
    stages = [dataclasses.replace(s, item_bytes=64 * MIB) for s in STAGES]
    roomy, _, _, _ = _run(
        Auto(Says({"decode": 40, "bid": 30, "collate": 1})), 0.5, FakePipeline(stages)
    )
    tight, _, _, _ = _run(
        Auto(Says({"decode": 40, "bid": 30, "collate": 1})),
        0.5,
        FakePipeline(stages, memory_limit=3 * GIB),
    )
    assert roomy.applied[0].workers["decode"] == 40
    opened = tight.applied[0].workers
    assert 4 < opened["decode"] < 20
    assert opened["decode"] / opened["bid"] == pytest.approx(40 / 30, rel=0.3)
    assert sum(64 * 1.5 * count for count in opened.values()) <= 0.6 * 3 * 1024


def test_a_run_starts_where_an_earlier_one_settled_and_tries_an_initial_setting_once():
    capped = [dataclasses.replace(STAGES[0], bend=lambda n: 1.0 if n <= 8 else n / 6), *STAGES[1:]]
    settled, first, _, _ = _run(Planner(), 60, FakePipeline(capped))
    for rate, tries in ((1e6, 1), (1.0, 0)):
        opener = Says({"decode": 40, "bid": 2, "collate": 1}, rows_per_s=rate)
        pipeline, _, decisions, _ = _run(
            Auto(opener),
            90,
            FakePipeline(capped, workers=settled.knobs.workers),
            learned=first.learned(),
        )
        opened = [d for d in decisions if d["reason"]["details"].get("kind") == "opening"]
        assert len(opened) == tries
        assert not opened or opened[0]["before"]["workers"] == settled.knobs.workers
        assert pipeline.knobs.workers == settled.knobs.workers
    opener = Says()
    carried_over = {**first.learned(), "settled": False}  # as of another schema
    pipeline, _, _, _ = _run(Auto(opener), 2, FakePipeline(STAGES), learned=carried_over)
    assert len(opener.asked) == 1
    assert pipeline.applied[0].workers == GOOD


def test_a_run_records_its_initial_setting_without_names_and_explain_tells_it_after_the_headline(
    tmp_path,
):
    known = Foreknowledge(operators={"bid": "python"}, store="remote")
    with RunFolder.create(tmp_path / "run", {"kind": "load"}) as folder:
        _, controller, _, _ = _run(
            Auto(Says(), known=known), 30, record=folder.event, observe=folder.metric
        )
        controller.stop()
        controller.stop()
    assert "initial setting" in controller.opening["text"]
    assert (controller.opening["tried"], controller.opening["rows_per_s"]) == (True, 3e6)
    finished = Run.read(tmp_path / "run")
    assert_names(tell(finished).splitlines()[1], "decode 1 → 24, bid 1 → 2", "effect: ")
    (event,) = finished.of("opening")
    assert (event["tried"], event["rows_per_s"]) == (True, 3e6)


@pytest.mark.parametrize(
    ("seconds", "fact"), [(2.0, "what it was taught"), (0.0, "learned policy was not asked")]
)
def test_explain_says_after_the_headline_why_the_learned_policy_was_not_used(
    tmp_path, seconds, fact
):
    with RunFolder.create(tmp_path / "run", {"kind": "load"}) as folder:
        _run(Auto(Says(inside=False)), seconds, record=folder.event)[1].stop()
        folder.event({"kind": "end", "tuning": "auto"})
    assert_names(tell(Run.read(tmp_path / "run")).splitlines()[1], fact)


def test_what_a_loader_knows_before_its_first_row_reaches_the_opener():
    class Loading(FakePipeline):
        row_bytes = 40
        plan = types.SimpleNamespace(groups=((1000, 3000), (2000, 0)))

    known = foreknowledge(Loading([FakeStage(name="fetch"), FakeStage(name="decode")]))
    assert known == Foreknowledge(row_bytes=40, store="remote", row_group_rows=2000)
