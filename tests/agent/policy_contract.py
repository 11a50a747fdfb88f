"""What must hold for every policy: `PolicyContract`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.agent.fake import FakePipeline, FakeStage, looked, of, tune
from tests.agent.made_figures import stage_stats
from tests.product import Consumer, Scenario, SimMachine, SimStage, Simulator, Snapshot, make

ROWS = 1024
ILLNESSES: dict[str, Callable[[Snapshot], dict[str, Any]]] = {
    "a stage is missing": lambda seen: {"stages": seen.stages[:1]},
    "a stage is new": lambda seen: {"stages": (*seen.stages, replace(seen.stages[0], name="new"))},
    "the clock stands still": lambda seen: {"at": 3.0},
    "counters begin anew": lambda seen: {
        **{"rows": 0, "batches": 0, "consumer_wait_s": 0.0, "cpu_used_s": 0.0},
        "stages": tuple(stage_stats(s.name, workers=s.workers) for s in seen.stages),
    },
    "no core and no memory are left": lambda seen: {"cpu_quota": 0.0, "memory_limit": 0},
}


def _scenario(*costs: float, cores: float) -> Scenario:
    return Scenario(
        name="test",
        seconds=60,
        machine=SimMachine(cores=cores, switch_cost=0, timer_noise=0.001),
        consumer=Consumer(batch_rows=ROWS),
        stages=tuple(
            SimStage(name=f"s{i}", cost_s=c, rows_per_item=ROWS) for i, c in enumerate(costs)
        ),
    )


class PolicyContract:
    """Its tests. A class that derives from it gives the policies' names, as a parameter `name`."""

    def test_deciding_is_pure_and_within_the_limits(self, name: str) -> None:
        """The same snapshot and state give the same answer, whatever happened in between; nothing leaves the limits."""
        pipeline = _scenario(0.01, 0.03, 0.02, cores=6)
        simulator = Simulator(pipeline)
        policy = make(name)
        state = policy.initial(pipeline.limits, simulator.knobs)
        for _ in range(12):
            snapshot = simulator.snapshot()
            first, after, reason = policy.decide(snapshot, state)
            again, _, _ = policy.decide(snapshot, state)
            assert first == again
            assert reason.text
            pipeline.limits.check(first)
            simulator.apply(first)
            simulator.advance(1.0)
            state = after

    def test_a_stage_that_only_waits_among_others_that_cost_nothing_is_survived(
        self, name: str
    ) -> None:
        """As many workers as would be needed are more than there can be anywhere, beside stages that cost nothing."""
        pipeline = FakePipeline(
            [
                FakeStage(name="decode", cpu_s=1e-9),
                FakeStage(name="wait", cpu_s=1e-9, wait_s=5.0),
                FakeStage(name="collate", cpu_s=1e-9),
            ]
        )
        tune(pipeline, 40, name)

    @pytest.mark.parametrize("illness", ILLNESSES)
    def test_illness_is_survived_or_stops_it_once_with_its_knobs_in_force(
        self, name: str, illness: str
    ) -> None:
        pipeline = _Ill(illness)
        controller, events, _ = looked(pipeline, name, 12)  # would raise into the training loop
        controller.stop()
        pipeline.limits.check(pipeline.knobs)
        assert controller.ticks >= 12 or illness == "the clock stands still", (
            "such a look counts as a rest"
        )
        assert len(of(events, "fault")) == (controller.frozen is not None)


class _Ill(FakePipeline):
    """A pipeline that is well for three seconds."""

    def __init__(self, illness: str) -> None:
        super().__init__(
            [FakeStage(name="decode", wait_s=0.05), FakeStage(name="transform", cpu_s=0.01)]
        )
        self.illness = illness

    def snapshot(self) -> Snapshot:
        before = super().snapshot()
        return before if self.now <= 3 else replace(before, **ILLNESSES[self.illness](before))
