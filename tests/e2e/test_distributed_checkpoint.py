"""examples/distributed_checkpoint.py: a loader's position in torch's checkpoints, on another number of ranks."""

import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.distributed_checkpoint import SETTINGS
from sluice import Loader

ROWS, STEPS, BROKEN_OFF = 64 * 12, 12, 5


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_resumes_on_four_at_the_same_row(forks, tmp_path):
    """Rows are told apart by their price."""
    random = np.random.default_rng(0)
    clicks = pa.table(
        {
            "clicked": random.integers(0, 2, ROWS).astype(np.int8),
            "price": np.arange(ROWS, dtype=np.float32),
            "item": random.integers(0, 50, ROWS).astype(np.int32),
        }
    )
    source = tmp_path / "clicks.parquet"
    pq.write_table(clicks, source, row_group_size=100)

    def trained(ranks: int, steps: int = 0) -> list[list[float]]:
        """Returns the rows of each step, of all ranks together."""
        words = (source, tmp_path / "saved", steps, tmp_path)
        forks.run("tests.e2e.checkpoint_ranks", *words, tmp=tmp_path, ranks=ranks)
        each = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
        return [sorted(itertools.chain(*parts)) for parts in zip(*each, strict=True)]

    with Loader(str(source), **SETTINGS) as loader:
        whole = [sorted(batch["price"].tolist()) for batch in loader]
    assert len(whole) == STEPS
    assert sorted(itertools.chain(*whole)) == list(range(ROWS)), "each row once"
    assert trained(2, BROKEN_OFF) == whole[:BROKEN_OFF]
    assert trained(4) == whole[BROKEN_OFF:]
