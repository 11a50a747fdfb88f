"""Headroom: arithmetic by a made-up clock, and once for real."""

from __future__ import annotations

import json
import re
from collections import deque

import pytest
import torch

import sluice
from sluice.ingest.__main__ import main
from sluice.ingest.loader import BatchLoader
from sluice.tools.headroom import Headroom, HeadroomError, WhatIf, measure, report, rows_of
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
    found = sluice.report(Endless(clock, load_s), clock.step(step_s), seconds=20.0, clock=clock)
    assert found.consumer == pytest.approx(10 / step_s)
    assert found.loading == pytest.approx(10 / load_s)
    assert found.together == pytest.approx(10 / (load_s + step_s))
    assert found.stall == pytest.approx(stall, abs=1e-3)
    assert found.gain == pytest.approx(gain)
    assert str(found).splitlines()[0] == found.verdict
    assert_names(found.verdict, *facts)


def test_a_step_that_takes_no_time_is_all_waiting():
    clock = Clock()
    found = sluice.report(Endless(clock, 0.2), clock.step(0.0), seconds=0.0, clock=clock)
    assert found.stall == 1.0
    assert found.loading == pytest.approx(50)
    assert_names(found.verdict, "input-bound", "100%")
    assert_names(str(found), "computing 0%", "waiting 100%")


def test_an_empty_loader_and_batches_without_rows_are_refused():
    with raises(HeadroomError, "no batch"):
        report([], seconds=0.1)
    with raises(HeadroomError, "int"):
        report([1, 2, 3], seconds=0.1)


def test_rows_of_batches_of_other_loaders():
    assert rows_of({"x": torch.zeros(7, 2), "y": torch.zeros(7)}) == 7
    assert rows_of(((torch.zeros(5, 2), torch.zeros(5)), torch.zeros(5))) == 5
    assert rows_of([1.0, 2.0, 3.0]) == 3


def test_the_table_names_the_stalls_of_a_step():
    found = Headroom(
        consumer=100.0,
        loading=50.0,
        cold=25.0,
        together=50.0,
        stall=0.5,
        slowest="read",
        idle_cores=3.2,
        what_if=WhatIf(stage="read", workers=3, predicted=75.0, measured=70.0),
        foretold={"twice the cores": 60.0},
    )
    lines = str(found).splitlines()
    assert_names(lines[0], "input-bound", "50%", "read", "+100%", "3.2 cores")
    assert_names(lines[-3], "computing 50%", "waiting 50%")
    assert_names(lines[-2], "3 workers in read", "75 rows/s", "tried: 70")
    assert_names(lines[-1], "twice the cores", "60 rows/s")


@pytest.mark.parametrize(
    ("loading", "together", "stall", "bound", "shares"),
    [
        (50.0, 48.0, 0.52, "input-bound: ", [48, 52, 48, 4]),
        (200.0, 79.0, 0.21, "balanced: ", [79, 21, 0, 21]),
        (200.0, 60.0, 0.25, "balanced: ", [75, 15, 25, 0, 25]),
        (95.0, 79.0, 0.21, "balanced: loading alone nearly ", [79, 21, 4, 17]),
        (60.0, 30.0, 0.7, "input-bound: ", [30, 70, 20, 50]),
        (200.0, 99.5, 0.005, "consumer-bound: ", [100]),
        (200.0, 76.0, 0.0, "consumer-bound: ", [100, 24]),
    ],
)
def test_the_verdict_agrees_with_the_table(loading, together, stall, bound, shares):
    """`shares` are the percentages of the table: of computing, of waiting, and of the causes of waiting."""
    lines = str(
        Headroom(consumer=100.0, loading=loading, together=together, stall=stall)
    ).splitlines()
    assert lines[0].startswith(bound)
    assert [int(share) for share in re.findall(r"(\d+)%", lines[-1])] == shares
    waits = re.findall(r"(\d+)% of each step waits", lines[0])
    assert re.findall(r"waiting (\d+)%", lines[-1]) == (
        waits if bound != "consumer-bound: " else []
    )


@pytest.mark.parametrize(("together", "gain"), [(100.0, "+0%"), (99.0, "+1%"), (76.0, "+32%")])
def test_a_step_that_does_not_wait_may_still_be_slowed_by_loading(together, gain):
    """The verdict and the key `gain` are one figure, so neither says "nothing" where the other has a gain."""
    found = Headroom(consumer=100.0, loading=200.0, together=together, stall=0.0)
    assert f"{found.to_dict()['gain']:+.0%}" == gain
    assert_names(found.verdict, "consumer-bound", gain)
    assert "nothing" not in found.verdict


def test_our_loader_is_measured_warm_and_cold_and_keeps_its_knobs(table):
    with BatchLoader(table, batch_size=80, read_ahead_epochs=1000) as loader:
        knobs = loader.knobs
        found = measure(
            loader,
            lambda batch: None,
            seconds=0.05,
            files=[f.path for f in table.files_of("train")],
        )
        assert loader.knobs == knobs
        assert found.cold is not None
        assert found.slowest in [s.name for s in loader.snapshot().stages]
        assert found.foretold.keys() > {"twice the cores", "files in a cache"}
        assert min(found.foretold.values()) > 0
        assert found.what_if.workers == knobs.workers[found.slowest] + 1
        deque(loader, maxlen=0)


def test_the_command_prints_a_table_and_ends_with_figures(table, capsys):
    found = main(
        (
            f"headroom {table.uri} --batch-size 80 --seconds 0.05"
            " --step tests.ingest.twin:halve_batch"
        ).split()
    )
    assert json.loads(json.dumps(found))["verdict"] == capsys.readouterr().err.splitlines()[0]
