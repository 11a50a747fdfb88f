"""examples/distributed_checkpoint.py: a loader's position in torch's checkpoints, on another number of ranks."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
ROWS, STEPS, BROKEN_OFF = 64 * 12, 12, 5


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    """Rows that are told apart by their price."""
    folder, random = tmp_path_factory.mktemp("clicks"), np.random.default_rng(0)
    for part in range(2):
        rows = np.arange(ROWS // 2) + part * ROWS // 2
        pq.write_table(
            pa.table(
                {
                    "clicked": random.integers(0, 2, len(rows)).astype(np.int8),
                    "price": rows.astype(np.float32),
                    "item": random.integers(0, 50, len(rows)).astype(np.int32),
                }
            ),
            folder / f"{part}.parquet",
            row_group_size=100,
        )
    return f"{folder}/*.parquet"


def trained(ranks: int, clicks: str, saved: Path, steps: int) -> list[list[float]]:
    """The rows of each step, of all ranks together."""
    rows = saved.with_name(f"{saved.name}-rows")
    rows.mkdir(exist_ok=True)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)),
            *(ROOT / "tests" / "e2e" / "checkpoint_ranks.py", clicks, saved, str(steps), rows),
        ],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(saved.parent),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    each = [json.loads((rows / f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)]
    return [sorted(itertools.chain(*parts)) for parts in zip(*each, strict=True)]


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_resumes_on_one_and_on_four_at_the_same_row(clicks, tmp_path):
    whole = trained(2, clicks, tmp_path / "whole", 0)
    assert len(whole) == STEPS
    assert sorted(itertools.chain(*whole)) == list(range(ROWS)), "each row once"
    begun = trained(2, clicks, tmp_path / "begun", BROKEN_OFF)
    assert begun == whole[:BROKEN_OFF]
    for ranks in (1, 4):
        shutil.copytree(tmp_path / "begun", tmp_path / f"on-{ranks}")
        assert trained(ranks, clicks, tmp_path / f"on-{ranks}", 0) == whole[BROKEN_OFF:]
