"""Ranks of their own torchrun: one stands still, or torchrun itself is killed. Nothing stays behind."""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.small_table import small_table
from sluice.dlrm.checkpoint.meta import check, latest
from tests.dlrm.rig import ROOT, command, environment, run_words
from tests.processes import alive
from tests.raises import assert_names
from tests.run_program import last_json

pytestmark = pytest.mark.slow

LIMIT_S = 4
CGROUPS = Path("/sys/fs/cgroup")


def words(folder: Path) -> list[object]:
    """Makes a table, and returns the options of a run that would go on for long."""
    small_table(folder / "table", rows=3200, values=50, files=2, row_group_rows=256)
    return run_words(folder, "--batch-size 64 --epochs 10000 --save-every 5 --log-every 1")


def until_saved(folder: Path, errors: Path) -> None:
    until((folder / "run" / "checkpoints" / "LATEST").exists, 120, errors.read_text)


@pytest.fixture
def trainer(tmp_path) -> Iterator[subprocess.Popen]:
    """torchrun with two ranks, once they have saved something."""
    with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
        process = subprocess.Popen(
            command(2, "dlrm.train", *words(tmp_path), "--inject", "cores=1@0.1s"),
            cwd=ROOT,
            env=environment(tmp_path),
            stdout=out,
            stderr=err,
        )
    try:
        until_saved(tmp_path, tmp_path / "err")
        yield process
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        process.wait()


def until(holds: Callable[[], bool], seconds: float, what: Callable[[], object]) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what()
        time.sleep(0.05)


def pins(folder: Path) -> list[str]:
    return [path.name for path in (folder / "table" / "_sluice" / "pins").glob("*.json")]


def test_a_rank_that_is_stopped_is_named_and_all_end(tmp_path, forks):
    """The first one, which speaks for all as long as it can, in the middle of a step."""
    ranks = [
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "tests.dlrm.stopping_ranks",
        "--stall-after",
    ]
    run = (*ranks, LIMIT_S, *words(tmp_path))
    with forks.start("tests.dlrm.elastic_agent", *run, tmp=tmp_path) as agent:
        until_saved(tmp_path, agent.err)
        all_of_them = psutil.Process(agent.pids[0]).children(recursive=True)
        ended = agent.ended()
    assert ended.returncode == 1
    error = last_json(ended)["error"]
    assert_names(error, "rank 0", "sent no heartbeat", f"{LIMIT_S} s")
    assert error in ended.stderr
    until(lambda: not any(map(alive, all_of_them)), 60, lambda: all_of_them)
    check(latest(tmp_path / "run" / "checkpoints")[0])


def test_ranks_whose_torchrun_was_killed_end_by_themselves(tmp_path, trainer):
    """With the pin of the table, and the control groups that they made where they may."""
    all_of_them = psutil.Process(trainer.pid).children(recursive=True)
    groups = [
        group
        for group in (*CGROUPS.glob("sluice-*"), *CGROUPS.glob("*/sluice-*"))
        if group.name.removeprefix("sluice-") in [str(process.pid) for process in all_of_them]
    ]
    assert len(pins(tmp_path)) == 1
    trainer.kill()
    until(lambda: not any(map(alive, all_of_them)), 60, lambda: all_of_them)
    assert pins(tmp_path) == []
    assert not [group for group in groups if group.exists()]
    assert "is gone" in (tmp_path / "err").read_text()
    check(latest(tmp_path / "run" / "checkpoints")[0])
