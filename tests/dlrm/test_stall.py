"""Ranks of their own torchrun: one stands still, or torchrun itself is killed. Nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.small_table import small_table
from sluice.dlrm.checkpoint.meta import check, latest
from tests.dlrm.rig import ROOT, command, environment
from tests.raises import assert_names

pytestmark = pytest.mark.slow

LIMIT_S = 4
CGROUPS = Path("/sys/fs/cgroup")


@pytest.fixture
def trainer(tmp_path, request) -> Iterator[subprocess.Popen]:
    """Two ranks, by the words of the test; a run that would go on for long."""
    small_table(tmp_path / "table", rows=3200, values=50, files=2, row_group_rows=256)
    words = [
        "--data",
        tmp_path / "table",
        "--run-dir",
        tmp_path / "run",
        "--batch-size",
        64,
        "--epochs",
        10_000,
        "--save-every",
        5,
        "--log-every",
        1,
        "--width",
        4,
        "--dense-layers",
        8,
        "--over-layers",
        8,
    ]
    with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
        process = subprocess.Popen(
            command(2, *request.param, *words),
            cwd=ROOT,
            env=environment(tmp_path),
            stdout=out,
            stderr=err,
        )
    try:
        until(
            (tmp_path / "run" / "checkpoints" / "LATEST").exists, 120, (tmp_path / "err").read_text
        )
        yield process
    finally:
        for pid in [*tree(process.pid), process.pid]:
            end(pid)
        process.wait()


def until(holds: Callable[[], bool], seconds: float, what: Callable[[], object]) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what()
        time.sleep(0.05)


def tree(pid: int) -> list[int]:
    """All below a process."""
    try:
        children = [
            int(p)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for p in (task / "children").read_text().split()
        ]
    except OSError:
        return []
    return [*children, *(below for child in children for below in tree(child))]


def end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def there(pids: list[int]) -> list[int]:
    """The processes among these that still run, without zombies."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found


def pins(folder: Path) -> list[str]:
    return [path.name for path in (folder / "table" / "_sluice" / "pins").glob("*.json")]


@pytest.mark.parametrize(
    "trainer", [("tests.dlrm.stopping_ranks", "--stall-after", LIMIT_S)], indirect=True
)
def test_a_rank_that_is_stopped_is_named_and_all_end(tmp_path, trainer):
    """The first one, which speaks for all as long as it can, in the middle of a step."""
    all_of_them = tree(trainer.pid)
    assert trainer.wait(90) == 1
    error = json.loads((tmp_path / "out").read_text().splitlines()[-1])["error"]
    assert_names(error, "rank 0", "nothing was heard", f"{LIMIT_S} s")
    assert error in (tmp_path / "err").read_text()
    until(lambda: not there(all_of_them), 60, lambda: there(all_of_them))
    check(latest(tmp_path / "run" / "checkpoints")[0])


@pytest.mark.parametrize("trainer", [("dlrm.train", "--inject", "cores=1@0.1s")], indirect=True)
def test_ranks_whose_torchrun_was_killed_end_by_themselves(tmp_path, trainer):
    """With the pin of the table, and the control groups that they made where they may."""
    all_of_them = tree(trainer.pid)
    groups = [
        group
        for group in (*CGROUPS.glob("sluice-*"), *CGROUPS.glob("*/sluice-*"))
        if group.name.removeprefix("sluice-") in map(str, all_of_them)
    ]
    assert len(pins(tmp_path)) == 1
    trainer.kill()
    until(lambda: not there(all_of_them), 60, lambda: there(all_of_them))
    assert pins(tmp_path) == []
    assert not [group for group in groups if group.exists()]
    assert "is gone" in (tmp_path / "err").read_text()
    check(latest(tmp_path / "run" / "checkpoints")[0])
