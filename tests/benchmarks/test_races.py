"""The races: lanes by name, the batches of every lane, a change, what a table says, and a tiny run of each race."""

import os
import sys
from contextlib import closing

import pytest

from benchmarks import race, tuned_race
from benchmarks.peers import functions, serve, sluice_loader, torch_loader
from benchmarks.peers.far_store import KEYS, FarStore
from benchmarks.peers.peer import OURS, Kind, Peer
from benchmarks.tuned_race import BATCH_ROWS, LANES, Entry, Pace, TunedRace, make_table, means
from tests.raises import assert_names

KINDS = (tuned_race.OURS, tuned_race.BY_HAND, Kind("tf.data", "tf_data", "no-such-environment"))
PACE = Pace(survey=0.1, turn=0.5, change=1.0, rounds=1)
PEER = """
import time
from types import SimpleNamespace
from benchmarks.peers import serve

passed = [0.0]
serve.time = SimpleNamespace(perf_counter=lambda: passed[0])

def batches(rows, mib=0):
    ballast = b"1" * (mib * 2**20)
    while True:
        time.sleep(0.02)  # for the race to see the ballast; rates are those of the fake clock
        passed[0] += 0.02
        yield rows

def arms(job, prepared):
    print("noise of a library")
    broken = {} if job.function == "log1p" else {"broken": lambda: map(len, [2])}
    return {
        "auto": lambda: batches(3000),
        "one worker a stage": lambda: batches(10),
        "1 worker": lambda: batches(1000),
        "hungry": lambda: batches(5000, 600),
        **broken,
    }

serve.serve(arms)
"""


@pytest.fixture
def command(tmp_path):
    program = tmp_path / "peer.py"
    program.write_text(PEER)
    return [sys.executable, str(program)]


def test_lanes_are_asked_for_by_name():
    assert tuned_race.lanes_of(["far,python", "plain"]) == ["plain", "python", "far"]


def test_ratios_are_taken_round_by_round_and_a_killed_setting_is_in_none():
    ours = Entry("Sluice", "auto", 0, [30.0, 40.0, 10.0])
    thrice, killed, slower = (
        Entry("torch", "2 workers", 4, rates, [0.25], 3, rates.count(0)).row(ours)
        for rates in ([10.0, 20.0, 2.0], [10.0, 0, 2.0], [60.0, 80.0, 20.0])
    )
    assert (thrice["auto ÷ it"], killed["killed"]) == (3.0, "1 of 3")
    default, best = means({"plain": [slower], "far": [thrice], "python": [thrice, killed]})
    assert default["geometric mean"] == pytest.approx(3)  # `plain` has nothing to tune
    assert default["least of any lane"] == 0.5
    assert (best["of the lanes"], best["killed"]) == ("far", 1)


def test_a_change_makes_functions_dearer_and_takes_half_of_the_cores(tmp_path, monkeypatch):
    monkeypatch.setenv("RACE_FOLDER", str(tmp_path))
    masks = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: masks.append(cores))
    job = serve.Job((), (), (), 8, "", change_s=1e-9)
    serve.turn(lambda: (8 for _ in "abc"), 0.0, job)
    assert functions.times() == 3
    assert [0, 1] in masks


def test_every_loader_of_this_environment_has_the_batches_of_each_lane(tmp_path, monkeypatch):
    make_table(tmp_path, rows=8192)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with FarStore(tmp_path) as store:
        runs = TunedRace(tmp_path, store.address, PACE, race.Screen())
        for lane in ("plain", "python", "numpy", "far"):
            job = runs.job(LANES[lane])
            for loader in sluice_loader, torch_loader:
                first = next(iter(loader.arms(job, serve.Prepared()).values()))
                with closing(first()) as batches:
                    assert [next(batches) for _ in range(9)] == [BATCH_ROWS] * 9  # an epoch is 8


@pytest.mark.slow
def test_two_lanes_are_run_and_written_down(command, tmp_path, monkeypatch):
    monkeypatch.setattr(tuned_race, "KINDS", KINDS)
    monkeypatch.setattr(tuned_race, "SHORT", PACE)
    monkeypatch.setattr(Peer, "start", lambda _, job, **how: Peer(command, job, **how))
    result = tuned_race.main(["--short", "--lanes", "plain,small", "--output", f"{tmp_path}/found"])
    assert (tmp_path / "found").exists()
    assert result["not installed"] == ["tf.data"]
    best = {lane: [row["setting"] for row in rows] for lane, rows in result["lanes"].items()}
    assert best["plain"] == ["auto", "hungry", "auto", "hungry"]
    assert best["small"] == ["auto", "1 worker", "auto"]  # the kernel, or the race, killed `hungry`


@pytest.mark.slow
def test_the_race_of_decoders_is_run_and_drawn(command, tmp_path, monkeypatch, capsys):
    programs = {OURS.python: command, tmp_path / ".venv/bin/python": command}
    monkeypatch.setattr(
        Peer, "start", lambda kind, job: Peer(programs.get(kind.python, ["false"]), job)
    )
    monkeypatch.setattr(race, "BY_HAND", Kind("broken", "", "bin"))
    monkeypatch.setattr(race, "installed", lambda known, _: known[:1])
    paces = ["--rows", "65536", "--seconds", "1e-9", "--rounds", "1"]
    result = race.main([*paces, "--before", str(tmp_path)])
    assert result["rows_per_s"].keys() == {"ours", race.BEFORE, race.MAPPED}
    assert_names(capsys.readouterr().err, "medians", "it ended", "10 MB")
