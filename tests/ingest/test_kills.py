"""Runs inside a real memory cgroup, where one can be made."""

import json

import pytest

from tests.run_program import run_program

pytestmark = pytest.mark.slow


def test_the_kernel_kills_no_run_that_the_governor_watches_and_some_that_nobody_does(tmp_path):
    done = run_program(
        "benchmarks/kills.py",
        "--runs",
        "2",
        "--seconds",
        "5",
        "--output",
        tmp_path / "kills.jsonl",
        check=True,
    )
    governed, free = map(json.loads, done.stdout.splitlines())
    if "skipped" in governed:
        pytest.skip(governed["skipped"])
    assert (governed["well"], governed["killed"], governed["failed"]) == (2, 0, 0), done.stderr
    assert free["killed"] > 0, "the task is one that needs a governor"
