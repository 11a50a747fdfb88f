"""A rank, or a host with its torchrun agent, is killed: all start anew and go on, with no row lost or repeated in the
epoch."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.small_table import small_table
from tests import ports
from tests.dlrm.rig import ROOT, environment, last_json

pytestmark = pytest.mark.slow

ROWS, BATCH, SAVED, DIES = 3200, 64, 10, 17
STEPS = ROWS * 8 // 10 // BATCH


def words(folder: Path, dies: int, *torchrun: str) -> list[str]:
    """A program that starts ranks, of which one may die."""
    given = [
        "--data",
        folder / "table",
        "--run-dir",
        folder / "run",
        "--batch-size",
        BATCH,
        "--save-every",
        SAVED,
        "--log-every",
        1,
        "--width",
        4,
        "--dense-layers",
        8,
        "--over-layers",
        8,
    ]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *torchrun,
        "--max-restarts=1",
        "--monitor-interval=0.1",
        "-m",
        "tests.dlrm.elastic_ranks",
        str(folder / "log"),
        str(dies),
        *map(str, given),
    ]


@pytest.fixture
def table(tmp_path):
    (tmp_path / "log").mkdir()
    return small_table(
        tmp_path / "table", rows=ROWS, values=50, files=2, row_group_rows=256, number_rows=True
    )


def assert_each_row_once(table, folder: Path) -> None:
    lives = {}
    for path in (folder / "log").iterdir():
        for line in map(json.loads, path.read_text().splitlines()):
            lives.setdefault(int(path.name[0]), {}).setdefault(line["step"], []).extend(
                line["rows"]
            )
    assert set(lives) == {0, 1}
    assert DIES - 1 in lives[0]
    begun = min(lives[1])
    # Whatever was trained since the last checkpoint went down with the ranks.
    assert begun % SAVED == 0
    assert 0 < begun <= DIES
    assert sorted(lives[1]) == list(range(begun, STEPS))
    kept = [row for step in range(begun) for row in lives[0][step]]
    rest = [row for rows in lives[1].values() for row in rows]
    assert len(set(kept + rest)) == len(kept + rest) == STEPS * BATCH
    assert set(kept + rest) <= set(range(table.rows_of("train")))
    events = [
        json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()
    ]
    assert [e["resumed_at"] for e in events if e["kind"] == "start"] == [0, begun]


def test_after_a_killed_rank_every_row_of_the_epoch_was_trained_once(table, tmp_path):
    done = subprocess.run(
        words(tmp_path, DIES, "--standalone", "--nproc-per-node=2"),
        cwd=ROOT,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert last_json(done)["steps"] == STEPS
    assert_each_row_once(table, tmp_path)


def test_an_agent_in_the_place_of_a_killed_one_goes_on_at_the_last_checkpoint(table, tmp_path):
    """Two agents, as on two hosts: the one where they meet stays, and the other is killed with its rank."""
    agent = (
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        "--rdzv-id=two",
        f"--rdzv-endpoint=127.0.0.1:{ports.free()}",
        "--local-addr=127.0.0.1",
    )
    with ExitStack() as ends:

        def started(name: str, dies: int) -> subprocess.Popen:
            here = f"--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=5,is_host={name == 'stays'}"
            out, err = (
                ends.enter_context(open(tmp_path / f"{name}.{kind}", "w"))
                for kind in ("out", "err")
            )
            one = subprocess.Popen(
                [*words(tmp_path, dies, *agent, here), "--resume"],
                cwd=ROOT,
                stdout=out,
                stderr=err,
                env={**environment(tmp_path), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            )
            ends.callback(lambda: (one.kill(), one.wait()))
            return one

        stays, lost = started("stays", -1), started("lost", DIES)
        assert lost.wait(100) == -signal.SIGKILL, (tmp_path / "lost.err").read_text()[-3000:]
        new = started("new", -1)
        for name, one in (("stays", stays), ("new", new)):
            assert one.wait(100) == 0, (tmp_path / f"{name}.err").read_text()[-3000:]
    assert STEPS in [
        json.loads(line)["steps"]
        for name in ("stays", "new")
        for line in (tmp_path / f"{name}.out").read_text().splitlines()[-1:]
    ]
    assert_each_row_once(table, tmp_path)
