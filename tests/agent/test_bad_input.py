"""What a pipeline may hand to any policy, and what must then hold: training goes on, knobs stay within their limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sluice.agent.controller import Controller
from sluice.agent.policies import POLICIES, make
from sluice.agent.simulator.fake import FakePipeline, FakeStage
from sluice.ingest.stats import Snapshot

SLOW = {"bayes"}  # a second a decision, and nothing in it that the others lack


class Ill(FakePipeline):
    """Well for three seconds."""

    def __init__(self, illness: str) -> None:
        super().__init__([FakeStage(name="read", wait_s=0.05), FakeStage(name="transform", cpu_s=0.01)])
        self.illness = illness

    def snapshot(self) -> Snapshot:
        found = super().snapshot()
        if self.now <= 3:
            return found
        if self.illness == "a stage is missing":
            return dataclasses.replace(found, stages=found.stages[:1])
        if self.illness == "a stage is new":
            return dataclasses.replace(found, stages=(*found.stages, dataclasses.replace(found.stages[0], name="new")))
        if self.illness == "the clock stands still":
            return dataclasses.replace(found, at=3.0)
        if self.illness == "counters begin anew":
            stages = tuple(dataclasses.replace(s, items=0, rows=0, bytes=0, busy_s=0.0, cpu_s=0.0, wait_input_s=0.0,
                                               wait_output_s=0.0) for s in found.stages)
            return dataclasses.replace(found, rows=0, batches=0, consumer_wait_s=0.0, cpu_used_s=0.0, stages=stages)
        assert self.illness == "no core and no memory are left"
        return dataclasses.replace(found, cpu_quota=0.0, memory_limit=0)


@pytest.mark.parametrize("illness", ["a stage is missing", "a stage is new", "the clock stands still",
                                     "counters begin anew", "no core and no memory are left"])
@pytest.mark.parametrize("name", sorted(set(POLICIES) - SLOW))
def test_every_policy_survives_what_is_ill_or_is_stopped_once_with_its_knobs_in_force(name, illness):
    pipeline, events = Ill(illness), []
    controller = Controller(pipeline, make(name), record=events.append, clock=lambda: pipeline.now)
    for _ in range(12):
        controller.step()  # would raise into the training loop
        pipeline.advance(1.0)
    controller.stop()
    pipeline.limits.check(pipeline.knobs)
    assert controller.ticks >= 12
    faults: list[dict[str, Any]] = [e for e in events if e["kind"] == "fault"]
    assert len(faults) == (controller.frozen is not None)
