"""Run folders: who may write, what survives a crash, what a reader tolerates."""

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.product import Run, RunError, RunFolder, read_lines
from tests.raises import raises

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def create(tmp_path):
    """Creates or goes on with the folder `run`."""
    return functools.partial(RunFolder.create, tmp_path / "run")


def test_what_is_written_is_read(tmp_path, create):
    clock = iter([100.0, 101.5, 103.0]).__next__
    with create({"batch_size": 8, "data": Path("table")}, clock=clock) as folder:
        folder.event({"kind": "start"})
        folder.metric({"kind": "train", "loss": float("nan"), "step": 1})
        assert folder.checkpoints.is_dir()
    run = Run.read(tmp_path / "run")
    assert run.config["batch_size"] == 8
    assert run.of("start") == [{"at": 1.5, "kind": "start"}]
    assert run.of("train") == [{"at": 3.0, "kind": "train", "loss": None, "step": 1}]


def test_a_folder_with_something_in_it_is_refused_and_left_as_it_is(tmp_path, create):
    with create({"seed": 1}) as folder:
        folder.metric({"kind": "train", "step": 1})
    with pytest.raises(RunError, match="choose another folder, or go on with it by --resume"):
        create({"seed": 2, "kind": "train"})
    with pytest.raises(
        RunError, match=r"choose another folder$"
    ):  # of a bench, which nothing goes on with
        create({"seed": 2})
    assert Run.read(tmp_path / "run").config["seed"] == 1
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    for resume in (False, True):
        with raises(RunError, "thesis.txt"):
            RunFolder.create(foreign, {}, resume=resume)
    assert os.listdir(foreign) == ["thesis.txt"]
    with raises(RunError, "is a file"):
        RunFolder.create(foreign / "thesis.txt", {})


def test_a_run_that_came_to_nothing_is_begun_anew(tmp_path, create):
    with create({"seed": 1}) as folder:
        folder.event({"kind": "fault", "text": "no stage 'decdoe'"})
    with create({"seed": 2}) as folder:
        folder.event({"kind": "start"})
        (folder.checkpoints / "step-10").mkdir()
    run = Run.read(tmp_path / "run")
    assert run.config["seed"] == 2
    assert [event["kind"] for event in run.events] == ["start"]
    with raises(RunError, "already holds a run"):  # it has something to go on from
        create({"seed": 3})


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with raises(RunError, tmp_path / "file" / "run", "Not a directory"):
        RunFolder.create(tmp_path / "file" / "run", {})


def test_a_resumed_run_goes_on_in_time_after_a_torn_line(tmp_path, create):
    with create({}, clock=iter([0.0, 50.0]).__next__) as folder:
        folder.event({"kind": "start"})
    events = tmp_path / "run" / "events.jsonl"
    events.write_text(events.read_text() + '{"at": 51, "kind": "epo')
    assert len(read_lines(events)) == 1
    with create({}, resume=True, clock=iter([1000.0, 1002.0]).__next__) as folder:
        folder.event({"kind": "start"})
    assert [line["at"] for line in read_lines(events)] == [50.0, 52.0]


_HOLDER = """
import sys, signal
from sluice.agent.report.run_folder import RunFolder
folder = RunFolder.create(sys.argv[1], {})
folder.event({"kind": "start"})
print("held", flush=True)
signal.pause()
"""


def test_a_crash_of_the_holder_frees_the_folder(tmp_path, create):
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with raises(RunError, f"process {holder.pid}"):
            create({}, resume=True)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    with create({}, resume=True) as folder:
        assert [line["kind"] for line in read_lines(folder.path / "events.jsonl")] == ["start"]


def test_what_cannot_be_read_is_named(tmp_path):
    with raises(RunError, "no run folder"):
        Run.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with raises(RunError, "not JSON"):
        Run.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"format": 99}))
    with raises(RunError, "format 99"):
        Run.read(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "events.jsonl").write_text('{"kind": "start"}\nrubbish\n{"kind": "end"}\n')
    with raises(RunError, "line 2"):
        Run.read(tmp_path)
