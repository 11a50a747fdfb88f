"""A trainer killed by the kernel's own signal while it saves: what LATEST names is whole, and the run goes on."""

from __future__ import annotations

import signal

import pytest

from benchmarks.small_table import small_table
from sluice.dlrm.checkpoint.meta import check, latest
from tests.dlrm.rig import SMALL_MODEL, environment, last_json
from tests.raises import assert_names
from tests.run_program import run_program

pytestmark = pytest.mark.slow

# Kills itself as LATEST is about to move for the second time: the new checkpoint is written, and nobody knows of it.
_PROGRAM = """
import os, runpy, signal, sys
moved = 0
def watch(event, arguments):
    global moved
    if event == "os.rename" and str(arguments[1]).endswith("/LATEST"):
        moved += 1
        if moved == 2:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
sys.argv = ["dlrm.train", *sys.argv[1:]]
runpy.run_module("dlrm.train", run_name="__main__")
"""


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before_and_the_run_goes_on(tmp_path, forks):
    small_table(
        tmp_path / "table", rows=1280, values=50, files=1, row_group_rows=256, splits={"train": 1.0}
    )
    words = [
        *f"--data {tmp_path}/table --run-dir {tmp_path}/run --batch-size 128".split(),
        *SMALL_MODEL,
        "--save-every",
        4,
        "--resume",
    ]
    killed = run_program("-c", _PROGRAM, *words, env=environment(tmp_path))
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    checkpoints = tmp_path / "run" / "checkpoints"
    path, meta = latest(checkpoints)
    check(path)
    assert meta.step == 4
    assert len([p for p in checkpoints.iterdir() if p.is_dir()]) > 1, "another one was being saved"
    done = forks.train(*words, tmp=tmp_path)
    assert_names(done.stderr, "from step 4")
    assert last_json(done)["steps"] == latest(checkpoints)[1].step == 10
    check(latest(checkpoints)[0])
