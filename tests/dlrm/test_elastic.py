"""A rank is killed under torchrun: all start anew and go on, with no row lost or repeated in the epoch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sluice.etl.synth.small_table import small_table
from tests.dlrm.rig import ROOT, environment, last_json

pytestmark = pytest.mark.slow

ROWS, BATCH, SAVED, DIES = 3200, 64, 10, 17


def test_after_a_killed_rank_every_row_of_the_epoch_was_trained_once(tmp_path):
    table = small_table(tmp_path / "table", rows=ROWS, values=50, files=2, row_group_rows=256, number_rows=True)
    (tmp_path / "log").mkdir()
    words = ["--data", tmp_path / "table", "--run-dir", tmp_path / "run", "--batch-size", BATCH, "--save-every", SAVED,
             "--log-every", 1, "--width", 4, "--dense-layers", 8, "--over-layers", 8]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1",
         "--monitor-interval=0.1", "-m", "tests.dlrm.elastic_ranks", str(tmp_path / "log"), str(DIES),
         *map(str, words)], cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=150,
        check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = ROWS * 8 // 10 // BATCH
    assert last_json(done)["steps"] == steps

    lives = {}
    for path in (tmp_path / "log").iterdir():
        for line in map(json.loads, path.read_text().splitlines()):
            lives.setdefault(int(path.name[0]), {}).setdefault(line["step"], []).extend(line["rows"])
    assert set(lives) == {0, 1}
    assert DIES - 1 in lives[0]
    begun = min(lives[1])
    # Whatever was trained since the last checkpoint went down with the ranks.
    assert begun % SAVED == 0
    assert 0 < begun <= DIES
    assert sorted(lives[1]) == list(range(begun, steps))
    kept = [row for step in range(begun) for row in lives[0][step]]
    rest = [row for rows in lives[1].values() for row in rows]
    assert len(set(kept + rest)) == len(kept + rest) == steps * BATCH
    assert set(kept + rest) <= set(range(table.rows_of("train")))
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [e["resumed_at"] for e in events if e["kind"] == "start"] == [0, begun]
