"""What SIGTERM, as before a preemption, leaves behind: on two ranks of which one is slow, and where saving takes too
long. That the resumed run is the unbroken one: test_train."""

import signal

import pytest

from benchmarks.small_table import small_table
from sluice.dlrm.checkpoint.meta import check, latest
from tests.dlrm.rig import run_words
from tests.raises import assert_names
from tests.run_program import last_json

pytestmark = pytest.mark.slow


@pytest.fixture
def words(tmp_path):
    small_table(tmp_path / "table", rows=3200, values=50, files=2, row_group_rows=256)
    return run_words(tmp_path, "--epochs 1000 --batch-size 64 --log-every 1")


def test_all_ranks_finish_the_step_save_it_and_end_with_143(tmp_path, words, forks):
    with forks.start(
        "tests.dlrm.preempted_ranks", "step", *words, tmp=tmp_path, ranks=2
    ) as started:
        started.until("a step lasts")
        process = started.preempted()
    assert "Traceback" not in process.stderr
    path, meta = latest(tmp_path / "run" / "checkpoints")
    check(path)
    assert (meta.step, meta.rows, meta.loader["step"]) == (4, 256, 4)


def test_a_save_that_takes_longer_than_the_time_for_it_leaves_the_checkpoint_before(
    tmp_path, words, forks
):
    more = ["--save-every", "5", "--preempt-seconds", "1.5"]
    with forks.start("tests.dlrm.preempted_ranks", "save", *words, *more, tmp=tmp_path) as started:
        started.until('"kind": "checkpoint"', tmp_path / "run" / "events.jsonl")
        started.send(signal.SIGTERM)
        process = started.ended()
    assert process.returncode == 1, process.stderr[-3000:]
    assert_names(last_json(process)["error"], "1.5 s", "--preempt-seconds", "--resume")
    path, meta = latest(tmp_path / "run" / "checkpoints")
    check(path)
    assert meta.step % 5 == 0
    assert len([*path.parent.glob("step-*")]) > 1, "another one was being saved"
