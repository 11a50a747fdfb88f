"""The benchmark of a large job on a cluster: it ends what it started."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from tests.processes import alive

JOB = """#!/bin/sh
echo start >> {starts}
test $(wc -l < {starts}) -gt {before} || {{ sleep 2; echo '{{"rows_out": 1}}'; exit; }}
echo $$
echo $$ > {starts}.pid
exec sleep 600
"""
PROGRAM = """
import sys
from pathlib import Path
from benchmarks import spark_scale
from sluice.common.program import run
spark_scale._BIN = Path(sys.argv.pop(1))
run(spark_scale.main)
"""


@pytest.mark.parametrize("before", [0, 2], ids=["a job that is followed", "a job to be killed"])
def test_a_job_ends_when_the_program_is_terminated(repo, tmp_path, before):
    starts = tmp_path / "starts"
    job = tmp_path / "spark-submit"
    job.write_text(JOB.format(starts=starts, before=before))
    job.chmod(0o755)
    words = ["--work", tmp_path / "work", "--rows", "10", "--values", "5", "--files", "1"]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path, *words, "--kills", "1"], cwd=repo
    ) as program:
        pid = starts.with_suffix(".pid")
        while not (pid.exists() and pid.read_text().endswith("\n")):
            assert program.poll() is None
            time.sleep(0.02)
        process = psutil.Process(int(pid.read_text()))
        program.terminate()
    deadline = time.monotonic() + 30
    while alive(process):
        assert time.monotonic() < deadline
        time.sleep(0.02)
