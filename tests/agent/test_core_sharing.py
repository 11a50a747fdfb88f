"""Jobs that share a host's cores: fair parts, dead jobs, folders that cannot be used, and two under their planners."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.agent.controller import Controller
from sluice.agent.policies import make
from sluice.agent.runtime.core_sharing import CoreClaims, CoreSharingTunable, fair
from tests.agent.fake import FakePipeline, FakeStage

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("wants", "parts"),
    [
        ([None], [8]),
        ([None, None], [4, 4]),
        ([None, 1], [7, 1]),
        ([1, None, None], [1, 3.5, 3.5]),
        ([6, 1], [6, 1]),
        ([6, 6, None], [8 / 3] * 3),
        ([5, 2, None], [3, 2, 3]),
    ],
)
def test_parts_are_fair(wants, parts):
    assert fair(8, wants) == pytest.approx(parts)
    assert sum(fair(8, wants)) <= 8


def test_a_job_that_ends_gives_its_part_back(tmp_path):
    with CoreClaims(tmp_path) as one:
        assert one.share(2.0, None) == 2.0
        with CoreClaims(tmp_path) as other:
            assert (one.share(2.0, None), other.share(2.0, None)) == (1.0, 1.0)
            assert (other.share(2.0, 0.5), one.share(2.0, None)) == (0.5, 1.5)
        assert one.share(2.0, None) == 2.0
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


_JOB = """
import signal, sys
from sluice.agent.runtime.core_sharing import CoreClaims
with CoreClaims(sys.argv[1]) as claims:
    print(claims.share(2.0, None), flush=True)
    signal.pause()
"""


def test_a_killed_job_counts_no_more(tmp_path):
    with CoreClaims(tmp_path) as here:
        job = subprocess.Popen(
            [sys.executable, "-c", _JOB, tmp_path], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        try:
            assert job.stdout.readline() == "1.0\n"
            assert here.share(2.0, None) == 1.0
        finally:
            job.send_signal(signal.SIGKILL)
            job.wait()
            job.stdout.close()
        assert here.share(2.0, None) == 2.0
        assert len([p for p in tmp_path.rglob("*") if p.is_file()]) == 1, "its file went, too"


def test_a_damaged_claim_wants_everything_and_a_place_in_the_way_is_one_line(tmp_path):
    with CoreClaims(tmp_path) as one, CoreClaims(tmp_path) as other:
        other._path.write_text("damage")
        assert one.share(2.0, None) == 1.0
    said = []
    (tmp_path / "file").write_text("")
    with CoreClaims(tmp_path / "file", say=said.append) as claims:
        assert claims.share(2.0, None) == 2.0
    assert len(said) == 1
    assert "cores are not shared" in said[0]


def _pipeline(step_s=0.0):
    return FakePipeline(
        [FakeStage(name="read", cpu_s=0.004), FakeStage(name="udf", cpu_s=0.02)],
        cores=8,
        step_s=step_s,
    )


def _tick(jobs):
    for pipeline, controller in jobs:
        controller.step()
        pipeline.advance(1.0)


def _job(claims, step_s=0.0):
    pipeline = _pipeline(step_s)
    return pipeline, Controller(
        CoreSharingTunable(pipeline, claims),
        make("planner"),
        record=lambda e: None,
        clock=lambda: pipeline.now,
    )


def test_two_jobs_plan_for_half_the_cores_each_and_one_left_alone_for_all(tmp_path):
    """Each fake has the whole machine, so that what it uses shows what was planned, not what was left."""
    with CoreClaims(tmp_path) as first:
        with CoreClaims(tmp_path) as second:
            jobs = [_job(first), _job(second)]
            for _ in range(40):
                _tick(jobs)
            used = [pipeline.knobs.workers["udf"] for pipeline, _ in jobs]
            assert all(3 <= workers <= 5 for workers in used), used
        for _ in range(40):
            _tick(jobs[:1])
        assert jobs[0][0].knobs.workers["udf"] >= 6
        assert jobs[0][1].frozen is None


def test_a_job_that_its_trainer_bounds_leaves_the_rest_to_the_others(tmp_path):
    with CoreClaims(tmp_path) as first, CoreClaims(tmp_path) as second:
        jobs = [_job(first), _job(second, step_s=0.04)]  # one item in 40 ms takes 0.6 cores
        for _ in range(80):
            _tick(jobs)
        assert jobs[0][0].knobs.workers["udf"] >= 5
        assert jobs[1][0].knobs.workers["udf"] <= 2
        before = jobs[1][0].snapshot()
        _tick(jobs)
        after = jobs[1][0].snapshot()
        assert after.consumer_wait_s - before.consumer_wait_s <= 0.1, "and does not starve"
