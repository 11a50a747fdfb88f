"""The loop: its clock, its log, and what happens when something in it fails."""

from __future__ import annotations

import dataclasses
import json

import pytest

from sluice import Knobs
from tests.agent.fake import FakePipeline, FakeStage, Script, look, looked, of, store_bound, tune
from tests.product import KnobError, Snapshot
from tests.raises import assert_names


def test_the_verdict_is_of_the_last_look_before_which_rows_came():
    pipeline = store_bound()
    controller, events, _ = looked(pipeline, Script(1), 6)
    for _ in range(5):  # the trainer tests its model
        pipeline.now += 1.0
        controller.step()
    assert controller.reason.text == "number 10"
    controller.stop()
    assert (events[-1]["kind"], events[-1]["text"]) == ("verdict", "number 6")


def test_changes_are_logged_once_with_their_effect_and_holding_is_not():
    pipeline = store_bound()
    controller, events, metrics = looked(pipeline, Script(1, 1, 1, 4), 14)
    assert [e["kind"] for e in events] == ["decision", "effect"]
    decision, effect = events
    assert decision["before"]["workers"]["decode"] == 1
    assert decision["after"]["workers"]["decode"] == 4
    assert decision["seen"]["stall"] > 0.9
    assert decision["sequence"] == effect["sequence"] == 1
    assert effect["rows_per_s_after"] > 3 * effect["rows_per_s_before"]
    assert (controller.decisions, controller.ticks, len(metrics)) == (1, 14, 13)
    assert metrics[-1]["stages"]["decode"]["workers"] == 4
    assert metrics[-1]["knobs"]["workers"]["decode"] == 4


def test_the_rate_after_a_change_is_the_rate_before_the_next():
    class Idle(FakePipeline):
        """Nothing passes in the second after a change, as its workers start."""

        changed = False

        def apply(self, knobs):
            super().apply(knobs)
            self.changed = True

        def advance(self, seconds):
            if self.changed:
                self.now, self.changed = self.now + seconds, False
            else:
                super().advance(seconds)

    pipeline = Idle(store_bound().stages)
    _, events, _ = looked(pipeline, Script(1, 1, 1, 4, 4, 4, 8), 14)
    assert [(e["kind"], e["sequence"]) for e in events] == [
        ("decision", 1),
        ("effect", 1),
        ("decision", 2),
        ("effect", 2),
    ]
    _, first, _, second = events
    assert second["rows_per_s_before"] == pytest.approx(first["rows_per_s_after"])
    assert second["stall_before"] == pytest.approx(first["stall_after"])
    of_four = pipeline.rows_per_s({"decode": 4, "collate": 1})
    assert first["rows_per_s_after"] == pytest.approx(of_four, rel=0.02)


def test_a_prediction_is_compared_with_no_more_than_the_trainer_takes():
    _, (_, effect), _ = looked(store_bound(step_s=0.1), Script(1, 1, 4), 14)
    assert effect["prediction_error"] == pytest.approx(0, abs=0.05)


def test_stopping_logs_the_effect_that_is_still_due():
    pipeline = store_bound()
    controller, events, _ = looked(pipeline, Script(1, 1, 4), 5)
    controller.stop()
    controller.stop()
    assert [e["kind"] for e in events] == ["decision", "effect", "verdict"]
    assert events[-1]["text"] == "number 4"


def test_whole_windows_of_rows_neither_delay_a_decision_nor_hide_its_effect():
    pipeline = store_bound()
    pipeline.told = {"rows": 0}  # the first window is not complete in this time
    _, (_, effect, *_), _ = looked(pipeline, "auto", 12)
    first = pipeline.rows_per_s({"decode": 1, "collate": 1})
    assert effect["rows_per_s_before"] == pytest.approx(first, rel=0.05)


def test_a_policy_that_raises_freezes_the_knobs_and_the_metrics_go_on():
    pipeline, policy = store_bound(), Script(1, 4, 4, ZeroDivisionError("by the policy"))
    controller, events, metrics = looked(pipeline, policy, 12)
    assert policy.asked == 4, "it is not asked again"
    (fault,) = of(events, "fault")
    assert "by the policy" in fault["text"]
    assert pipeline.knobs.workers["decode"] == 4
    assert controller.frozen is not None
    assert len(metrics) == 11


@pytest.mark.parametrize("knobs", [{"decode": 99}, {"decode": 1, "nonsense": 1}])
def test_knobs_outside_the_limits_freeze(knobs):
    pipeline = store_bound()
    _, events, _ = looked(pipeline, Script(Knobs(workers=knobs)), 3)
    assert [e["kind"] for e in events] == ["fault"]
    assert pipeline.knobs.workers["decode"] == 1


def test_a_tunable_that_raises_or_reports_nonsense_freezes_and_is_recorded_once():
    class Broken(FakePipeline):
        def snapshot(self) -> Snapshot:
            if self.now > 3:
                self.told = {"consumer_wait_s": float("nan")}
            return super().snapshot()

    class Stuck(FakePipeline):
        error: Exception = OSError("a worker cannot start")

        def apply(self, knobs):
            raise self.error

    class Refusing(Stuck):
        error = KnobError("read: not today")

    for kind, word in ((Broken, "StatsError"), (Stuck, "cannot start"), (Refusing, "not today")):
        _, events, _ = looked(kind(store_bound().stages), "auto", 12)
        (fault,) = of(events, "fault")
        assert word in fault["text"]


def test_a_log_that_cannot_be_written_stops_tuning_and_nothing_else(capsys):
    def full(event):
        raise OSError("no space left")

    pipeline = store_bound()
    controller, _, _ = looked(pipeline, Script(1, 4), 5, record=full)
    assert "no space left" in controller.frozen
    assert "recorded" in capsys.readouterr().err


def test_limits_that_move_under_a_decision_begin_the_policy_anew():
    class Moving(FakePipeline):
        def apply(self, knobs):
            if self.stages[0].most == 64:  # between the check and here somebody took cores away
                self.stages[0] = dataclasses.replace(self.stages[0], most=3)
            super().apply(knobs)

    pipeline = Moving(store_bound().stages)
    controller, events, _ = looked(pipeline, "auto", 12)
    assert controller.frozen is None
    assert pipeline.knobs.workers["decode"] == 3
    # Nothing is logged of the choice that did not come.
    assert len(of(events, "decision")) == len(pipeline.applied) == 1


def test_shadow_says_what_it_would_do_and_touches_nothing():
    pipeline = store_bound()
    _, events, _ = looked(pipeline, "shadow", 30)
    assert pipeline.applied == []
    assert {e["kind"] for e in events} == {"proposal"}
    proposed = [str(e["after"]["workers"]) for e in events]
    assert len(proposed) == len(set(proposed)), "the same thought again is no news"
    assert events[0]["after"]["workers"]["decode"] > 8
    assert "rows/s expected" in events[0]["reason"]["text"]


def test_changes_are_rationed():
    """A policy that changes its mind all the time gets its say again once the minute has passed."""
    pipeline = store_bound()
    controller, _, _ = looked(
        pipeline, Script(*(1 + i % 2 for i in range(200))), 60, changes_a_minute=5
    )
    assert controller.decisions == 5
    look(controller, pipeline, 10)
    assert controller.decisions == 10


def test_other_limits_begin_the_policy_anew():
    class Counted(Script):
        begun = 0

        def initial(self, limits, knobs):
            Counted.begun += 1
            return super().initial(limits, knobs)

    pipeline = store_bound()
    controller, _, _ = looked(pipeline, Counted(), 3)
    pipeline.stages = [dataclasses.replace(s, most=8) for s in pipeline.stages]
    controller.step()
    assert Counted.begun == 2


def test_what_was_learned_is_plain_data_and_spares_another_process_the_learning():
    """Items take a second: a run that knows them decides before the first one has ended."""

    def tuned(learned=None):
        """What was learned, and when the first decision came, with its workers."""
        stages = [FakeStage(name="decode", wait_s=1.0), FakeStage(name="collate", cpu_s=0.001)]
        pipeline, made = FakePipeline(stages, cores=8), []
        record = lambda event: made.append((pipeline.now, event))  # noqa: E731
        controller, _ = tune(pipeline, 20, learned=learned, record=record)
        at, decision = next((at, e) for at, e in made if e["kind"] == "decision")
        return controller.learned(), at, decision["after"]["workers"]

    learned, late, workers = tuned()
    learned = json.loads(json.dumps(learned))
    assert set(learned["stages"]) == {"decode", "collate"}
    again, soon, same = tuned(learned)
    assert soon < 1.0 < late
    assert abs(same["decode"] - workers["decode"]) <= 4
    assert set(again["stages"]) == set(learned["stages"])
    other = {"stages": {"other": learned["stages"]["decode"]}}
    assert tuned(other)[1] == late, "of a stage that is not here"


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"stages": {"decode": {"backend": "thread", "seen": 3}}},
        {"services": {"decode": {"points": {}}}, "other_cpu_s": 0.0},  # of 0.3
    ],
)
def test_damaged_or_old_knowledge_of_an_earlier_run_is_ignored_with_one_line(damaged):
    controller, events, _ = looked(store_bound(), "auto", 12, learned=damaged)
    assert not of(events, "fault")
    (note,) = of(events, "note")
    assert_names(note["text"], "earlier run", "ignored")
    assert controller.frozen is None
    assert controller.decisions > 0
