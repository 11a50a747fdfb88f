"""A trainer killed by the kernel's own signal while it saves: what LATEST names is whole, and the run goes on.

As a program, it is the trainer, and kills itself as LATEST is about to move for the second time: the new checkpoint is
written, and nobody knows of it."""

import os
import signal
import sys

import pytest

from benchmarks.small_table import small_table
from sluice.dlrm.checkpoint.meta import check
from tests.dlrm.rig import run_words
from tests.product import latest, program
from tests.raises import assert_names
from tests.run_program import last_json


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before_and_the_run_goes_on(tmp_path, forks):
    small_table(
        tmp_path / "table", rows=1280, values=50, files=1, row_group_rows=256, splits={"train": 1.0}
    )
    words = run_words(tmp_path, "--batch-size 128 --save-every 4 --resume")
    forks.run("tests.dlrm.test_killed_save", *words, tmp=tmp_path, code=-signal.SIGKILL)
    checkpoints = tmp_path / "run" / "checkpoints"
    path, meta = latest(checkpoints)
    check(path)
    assert meta.step == 4
    assert len([p for p in checkpoints.iterdir() if p.is_dir()]) > 1, "another one was being saved"
    done = forks.train(*words, tmp=tmp_path)
    assert_names(done.stderr, "from step 4")
    assert last_json(done)["steps"] == latest(checkpoints)[1].step == 10
    check(latest(checkpoints)[0])


def watch(event: str, arguments: tuple) -> None:
    if event == "os.rename" and str(arguments[1]).endswith("/LATEST"):
        moves.append(event)
        if len(moves) == 2:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    moves: list[str] = []
    sys.addaudithook(watch)
    program()
