"""examples/distributed_checkpoint.py: a loader's position in torch's checkpoints, on another number of ranks."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

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


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_resumes_on_one_and_on_four_at_the_same_row(
    clicks, forks, tmp_path
):
    def trained(ranks: int, saved: Path, steps: int = 0) -> list[list[float]]:
        """Returns the rows of each step, of all ranks together."""
        words = (clicks, saved, steps, tmp_path)
        done = forks.run("tests.e2e.checkpoint_ranks", *words, tmp=tmp_path, ranks=ranks)
        assert done.returncode == 0, done.stderr[-4000:]
        each = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
        return [sorted(itertools.chain(*parts)) for parts in zip(*each, strict=True)]

    whole = trained(2, tmp_path / "whole")
    assert len(whole) == STEPS
    assert sorted(itertools.chain(*whole)) == list(range(ROWS)), "each row once"
    assert trained(2, tmp_path / "begun", BROKEN_OFF) == whole[:BROKEN_OFF]
    for ranks in (1, 4):
        shutil.copytree(tmp_path / "begun", tmp_path / f"on-{ranks}")
        assert trained(ranks, tmp_path / f"on-{ranks}") == whole[BROKEN_OFF:]
