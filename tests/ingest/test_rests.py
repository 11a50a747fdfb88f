"""What happens while the trainer rests is part of no rate, and no change is judged by it."""

import itertools
import random
from types import SimpleNamespace

import pytest

from sluice.agent.costs.rates import rates
from sluice.agent.policies import make
from sluice.ingest import progress
from sluice.ingest.progress import Rests
from sluice.ingest.stats import READY
from tests.agent.fake import FakePipeline, FakeStage
from tests.product import BatchLoader, Controller


class RestingPipeline(FakePipeline):
    """A pipeline whose trainer rests when the test asks for it."""

    def __init__(self, *stages, **more):
        super().__init__(list(stages), **more)
        self.rests = Rests()

    def snapshot(self):
        self.rests = self.rests.end_if_over(self.counters())
        return self.rests.hide_rests(self.counters())

    def counters(self):
        return super().snapshot()

    def rest(self, seconds):
        """The trainer takes nothing for so long."""
        self.rests = self.rests.start(self.counters())
        step_s, self.step_s = self.step_s, 1e12
        self.advance(seconds)
        self.step_s = step_s
        self.rests = self.rests.resume(self.counters())


def _stages():
    return FakeStage(name="decode", wait_s=0.05, item_bytes=2**16), FakeStage(
        name="collate", cpu_s=0.001
    )


def _with_rests(pipeline, seed, looks):
    """Advances the pipeline between looks, with rests at random moments in between."""
    draw = random.Random(seed)
    for _ in range(looks):
        left = 1.0
        while draw.random() < 0.4:
            part = round(draw.uniform(0.05, 0.3), 2)
            pipeline.advance(part)
            left = max(0.05, left - part)
            pipeline.rest(draw.choice([0.02, 0.3, 2.0, 7.0]))
        pipeline.advance(left)
        yield


@pytest.mark.parametrize("seed", range(8))
def test_rates_are_those_of_the_time_without_rests(seed):
    pipeline = RestingPipeline(*_stages(), step_s=0.01)
    pipeline.advance(5.0)
    steady = pipeline.rows_per_s({"decode": 1, "collate": 1})
    seen, raw = [pipeline.snapshot()], [pipeline.counters()]
    for _ in _with_rests(pipeline, seed, 30):
        seen.append(pipeline.snapshot())
        raw.append(pipeline.counters())
    pipeline.advance(60.0)  # what was read in the last rest has been taken
    seen.append(pipeline.snapshot())
    assert all(a.at <= b.at and a.rows <= b.rows for a, b in itertools.pairwise(seen))
    assert rates(seen[0], seen[-1]).away < 0.01
    assert _off(seen, steady) < 0.25
    assert _off(raw, steady) > 0.5, "the rests would have been part of some rate"


def _off(looks, steady):
    """The largest share by which a rate between two looks is off."""
    measured = [rates(a, b) for a, b in itertools.pairwise(looks) if b.at - a.at > 0.3]
    return max(abs(rate.rows_per_s / steady - 1) for rate in measured)


@pytest.mark.parametrize("seed", range(8))
def test_the_effect_of_a_change_is_that_of_the_time_without_rests(seed):
    pipeline, events = RestingPipeline(*_stages(), step_s=0.004), []
    controller = Controller(
        pipeline, make("auto"), record=events.append, clock=lambda: pipeline.now
    )
    controller.step()
    for _ in _with_rests(pipeline, seed, 60):
        before = controller.decisions
        controller.step()
        if controller.decisions > before:
            pipeline.rest(6.0)  # the trainer validates just then
    decided = [event for event in events if event["kind"] == "decision"]
    assert decided, "the tuner grew the reader"
    assert pipeline.rows_per_s(pipeline.knobs.workers) >= 0.85 * pipeline.best_rows_per_s
    effects = {event["sequence"]: event for event in events if event["kind"] == "effect"}
    for number, event in enumerate(decided, 1):
        assert "undone" not in event["reason"]["text"]
        if number in effects:
            steady = pipeline.rows_per_s(event["after"]["workers"])
            assert effects[number]["rows_per_s_after"] == pytest.approx(steady, rel=0.25)


@pytest.mark.parametrize("work_s", [0.1, 0.5])
def test_a_trainer_that_takes_its_rows_in_rests_is_seen_half_of_the_time(work_s):
    """Each pause fills the buffers, and the next one begins before they are empty."""
    pipeline = RestingPipeline(*_stages(), step_s=0.004)
    rounds = round(120 / work_s)
    for _ in range(rounds):
        pipeline.rest(7.0)
        pipeline.advance(work_s)
    seen, raw = pipeline.snapshot(), pipeline.counters()
    assert seen.at >= 0.5 * (120 - 30)
    assert seen.rows >= 0.5 * (raw.rows - 30 / 0.004 * 1000)
    assert raw.at - seen.at >= rounds * 7.0 - 0.01, "no pause is seen"


def test_a_rest_of_the_loader_is_left_out_until_its_rows_are_taken(table, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with BatchLoader(table, batch_size=80) as loader:
        batches = iter(loader)
        for _ in range(3):
            now[0] += 1
            next(batches)
        with loader.resting():
            before = loader.tunable.snapshot()
            now[0] += 100
            assert loader.snapshot().at > before.at, "the counters of all that happened go on"
            assert loader.tunable.snapshot().at == before.at
        assert loader.tunable.snapshot().rows == before.rows
        now[0] += 2
        stats = loader.stats()
        assert (stats.rows, stats.wait_s, stats.compute_s) == (160, 0, 1 + 1 + 2)
        assert sum(stats.durations[READY]) == 2, "the wait for the first batch does not count"
        for _ in batches:
            loader.tunable.snapshot()
        assert loader.tunable.snapshot().rows > before.rows
        assert loader.tunable.snapshot().rows <= loader.snapshot().rows
