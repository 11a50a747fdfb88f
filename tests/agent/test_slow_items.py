"""Transforms whose items take seconds: judged by items, not by looks, of which most see none finish."""

import pytest

from sluice import Knobs
from tests.agent.fake import go_on, of, tune
from tests.agent.made_figures import snapshot, stage_stats
from tests.product import Limits

ROWS = 20_000
SLICE_S = 0.05


class SlowItems:
    """A fast reader before a transform whose items wait for a service; the consumer takes what comes at once."""

    def __init__(self, seconds, most=16):
        self.seconds, self.limits = (
            seconds,
            Limits(workers={"decode": (1, 8), "slow": (1, most), "collate": (1, 1)}),
        )
        self.knobs = self.limits.clamp(Knobs())
        self.now = 0.0
        self.left = []  # of each item under way: seconds left, and in all
        self.items = self.sequence = 0
        self.busy_s = self.finished_s = 0.0

    def apply(self, knobs):
        self.limits.check(knobs)
        self.knobs = knobs

    def advance(self, seconds):
        for _ in range(round(seconds / SLICE_S)):
            while len(self.left) < self.knobs.workers["slow"]:
                item_s = self.seconds * (1 + 0.1 * ((self.items + len(self.left)) % 3))
                self.left.append((item_s, item_s))
            self.busy_s += SLICE_S * len(self.left)
            self.left = [(left - SLICE_S, item_s) for left, item_s in self.left]
            ended = [item_s for left, item_s in self.left if left <= 0]
            self.items += len(ended)
            self.finished_s += sum(ended)
            self.left = [item for item in self.left if item[0] > 0]
            self.now += SLICE_S

    def snapshot(self):
        self.sequence += 1
        items, workers = self.items, self.knobs.workers

        def stage(name, **figures):
            done = {"items": items, "rows": items * ROWS, "bytes": items * ROWS * 100}
            return stage_stats(name, workers=workers[name], **done, **figures)

        fast = items * 0.01
        return snapshot(
            self.now,
            stage("decode", cpu_s=fast, busy_s=fast, wait_output_s=self.now - fast),
            stage("slow", cpu_s=fast, busy_s=self.busy_s, finished_s=self.finished_s),
            stage("collate"),
            sequence=self.sequence,
            batches=items,
            rows=items * ROWS,
            consumer_wait_s=self.now,
            memory_used=2**28,
            cpu_used_s=3 * fast,
        )


@pytest.mark.parametrize("seconds", [1.3, 3.0, 7.0])
def test_items_that_take_seconds_get_their_workers_without_a_change_of_mind(seconds):
    pipeline = SlowItems(seconds)
    controller, events = tune(pipeline, 60 * seconds, "auto")
    controller.stop()
    changes, effects = of(events, "decision"), of(events, "effect")
    grown = [(d["before"]["workers"]["slow"], d["after"]["workers"]["slow"]) for d in changes]
    assert pipeline.knobs.workers["slow"] == 16, grown
    assert all(before < after for before, after in grown), [d["reason"]["text"] for d in changes]
    assert len(changes) <= 3
    for (before, after), effect in zip(grown, effects, strict=True):
        assert effect["rows_per_s_after"] / effect["rows_per_s_before"] == pytest.approx(
            after / before, rel=0.2
        )


def test_a_stage_that_hangs_after_a_change_is_not_waited_for_for_ever():
    """Nothing more comes of two workers and more: fewer are tried."""

    class Hanging(SlowItems):
        def advance(self, seconds):
            if self.knobs.workers["slow"] > 1:
                self.now += seconds
                self.busy_s += seconds * self.knobs.workers["slow"]
            else:
                super().advance(seconds)

    _, events = tune(Hanging(0.5), 100, "auto")
    first, second = of(events, "decision")[:2]
    assert first["after"]["workers"]["slow"] > 1
    assert second["after"]["workers"]["slow"] < first["after"]["workers"]["slow"]


def test_workers_beyond_which_nothing_ends_are_left_within_half_a_minute():
    """Nothing comes of four workers and more."""

    class Jammed(SlowItems):
        def advance(self, seconds):
            if self.knobs.workers["slow"] > 3:
                self.now += seconds
                self.busy_s += seconds * self.knobs.workers["slow"]
            else:
                super().advance(seconds)

    pipeline = Jammed(0.5)
    controller, events = tune(pipeline, 8, "auto")
    assert pipeline.knobs.workers["slow"] > 3, "there was nothing to leave"
    go_on(controller, pipeline, 30)
    assert 2 <= pipeline.knobs.workers["slow"] <= 3
    assert len(of(events, "decision")) <= 8
