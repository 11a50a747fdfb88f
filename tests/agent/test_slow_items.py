"""Transforms whose items take seconds: judged by items, not by looks, of which most see none finish."""

from __future__ import annotations

import pytest

from sluice.agent.controller import Controller
from sluice.agent.policies import make
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot, StageStats

ROWS = 20_000
SLICE_S = 0.05


class SlowItems:
    """A fast reader before a transform whose items wait for a service; the consumer takes what comes at once."""

    def __init__(self, seconds, most=16):
        self.seconds, self.limits = (
            seconds,
            Limits(workers={"read": (1, 8), "slow": (1, most), "collate": (1, 1)}),
        )
        self.knobs = self.limits.clamp(Knobs())
        self.now = 0.0
        self.left = []  # of each item under way
        self.items = self.sequence = 0
        self.busy_s = self.idle_s = 0.0

    def apply(self, knobs):
        self.limits.check(knobs)
        self.knobs = knobs

    def advance(self, seconds):
        for _ in range(round(seconds / SLICE_S)):
            while len(self.left) < self.knobs.workers["slow"]:
                self.left.append(self.seconds * (1 + 0.1 * ((self.items + len(self.left)) % 3)))
            self.busy_s += SLICE_S * len(self.left)
            self.left = [left - SLICE_S for left in self.left]
            self.items += sum(left <= 0 for left in self.left)
            self.left = [left for left in self.left if left > 0]
            self.now += SLICE_S

    def snapshot(self):
        self.sequence += 1
        items, workers = self.items, self.knobs.workers

        def stage(name, cpu_s, busy_s, waited_s):
            return StageStats(
                name=name,
                items=items,
                rows=items * ROWS,
                bytes=items * ROWS * 100,
                busy_s=busy_s,
                cpu_s=cpu_s,
                wait_input_s=0.0,
                wait_output_s=waited_s,
                workers=workers[name],
            )

        fast = items * 0.01
        return Snapshot(
            at=self.now,
            sequence=self.sequence,
            batches=items,
            rows=items * ROWS,
            stages=(
                stage("read", fast, fast, self.now - fast),
                stage("slow", fast, self.busy_s, 0.0),
                stage("collate", 0.0, 0.0, 0.0),
            ),
            consumer_wait_s=self.now,
            consumer_compute_s=0.0,
            memory_used=2**28,
            memory_limit=2**34,
            cpu_quota=4.0,
            cpu_used_s=3 * fast,
        )


def tuned(seconds, for_s):
    pipeline, events = SlowItems(seconds), []
    controller = Controller(
        pipeline, make("auto"), record=events.append, clock=lambda: pipeline.now
    )
    while pipeline.now < for_s:
        controller.step()
        pipeline.advance(1.0)
    controller.stop()
    assert controller.frozen is None
    return (
        pipeline,
        [e for e in events if e["kind"] == "decision"],
        [e for e in events if e["kind"] == "effect"],
    )


@pytest.mark.parametrize("seconds", [1.3, 3.0, 7.0])
def test_items_that_take_seconds_get_their_workers_without_a_change_of_mind(seconds):
    pipeline, decisions, effects = tuned(seconds, 60 * seconds)
    grown = [(d["before"]["workers"]["slow"], d["after"]["workers"]["slow"]) for d in decisions]
    assert pipeline.knobs.workers["slow"] == 16, grown
    assert all(before < after for before, after in grown), [d["reason"]["text"] for d in decisions]
    assert len(decisions) <= 3
    for (before, after), effect in zip(grown, effects, strict=True):
        assert effect["rows_per_s_after"] / effect["rows_per_s_before"] == pytest.approx(
            after / before, rel=0.2
        )


def test_a_stage_that_hangs_after_a_change_is_not_waited_for_for_ever():
    """Nothing more comes of eight workers: the change is taken back."""

    class Hanging(SlowItems):
        def advance(self, seconds):
            if self.knobs.workers["slow"] > 1:
                self.now += seconds
                self.busy_s += seconds * self.knobs.workers["slow"]
            else:
                super().advance(seconds)

    pipeline, decided = Hanging(0.5), []
    controller = Controller(
        pipeline, make("auto"), record=decided.append, clock=lambda: pipeline.now
    )
    for _ in range(100):
        controller.step()
        pipeline.advance(1.0)
    first, second = [e for e in decided if e["kind"] == "decision"][:2]
    assert first["after"]["workers"]["slow"] > 1
    assert second["after"]["workers"]["slow"] == 1
