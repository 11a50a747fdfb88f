"""Headroom of any loader: arithmetic by a made-up clock."""

from __future__ import annotations

import pytest
import torch

import sluice
from sluice import report
from sluice.agent.report.headroom import Headroom, HeadroomError
from tests.raises import assert_names, raises


class Clock:
    """Stands still but for what loading and computing take."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def batches(self, count: int, seconds: float):
        for _ in range(count):
            self.now += seconds
            yield torch.zeros(10, 3)

    def step(self, seconds: float):
        def step(_batch):
            self.now += seconds

        return step


class Endless:
    """A loader of a made-up speed."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def __iter__(self):
        return self.clock.batches(50, self.seconds)


@pytest.mark.parametrize(
    ("load_s", "step_s", "stall", "gain", "facts"),
    [
        (0.3, 0.1, 0.75, 3.0, ("input-bound", "75%", "+300%")),
        (0.05, 0.1, 1 / 3, 0.5, ("balanced", "33%", "+50%")),
        (0.001, 0.1, 0.0099, 0.01, ("consumer-bound", "1%")),
    ],
)
def test_any_iterable_of_batches_gets_a_report_of_what_it_loses(load_s, step_s, stall, gain, facts):
    clock = Clock()
    headroom = sluice.report(Endless(clock, load_s), clock.step(step_s), seconds=20.0, clock=clock)
    assert headroom.consumer == pytest.approx(1 / step_s)
    assert headroom.loading == pytest.approx(1 / load_s)
    assert headroom.together == pytest.approx(1 / (load_s + step_s))
    assert headroom.stall == pytest.approx(stall, abs=1e-3)
    assert headroom.gain == pytest.approx(gain)
    assert str(headroom).splitlines()[0] == headroom.verdict
    assert_names(headroom.verdict, *facts)


def test_an_empty_loader_is_refused():
    with raises(HeadroomError, "no batch"):
        report([], seconds=0.1)


@pytest.mark.parametrize(
    ("loading", "together", "stall", "verdict"),
    [
        (50.0, 48.0, 0.52, "input-bound: 52%"),
        (200.0, 79.0, 0.21, "balanced: loading alone keeps up, but together 21%"),
        (95.0, 79.0, 0.21, "balanced: loading alone nearly keeps up, but together 21%"),
        (89.0, 79.0, 0.21, "input-bound: 21%"),
        (200.0, 99.5, 0.019, "consumer-bound: 2%"),
    ],
)
def test_the_verdict_names_what_holds_the_other_up(loading, together, stall, verdict):
    headroom = Headroom(consumer=100.0, loading=loading, together=together, stall=stall)
    assert headroom.verdict.startswith(verdict)
