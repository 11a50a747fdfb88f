"""The rate of several ranks on one host: known answers."""

from __future__ import annotations

import pytest

from sluice.benchmarks.what_if import StepCost, ranks_table
from sluice.ingest.row_costs import RowCosts, Share


def test_the_table_of_ranks_batches_and_workers():
    step = StepCost.of((100, 0.010), (1100, 0.020), {2: 0.005})
    assert (step.fixed_s, step.row_s) == (pytest.approx(0.009), pytest.approx(1e-5))
    reads = {
        "read": Share(workers=1, cpu_s=0.0, wait_s=1e-4)
    }  # 10,000 rows a second for each worker
    told = ranks_table(
        {1000: RowCosts(stages=reads, cores=2, measured=10_000.0)}, step, (1, 2), (1, 8)
    )
    assert told[1, 1000, 1] == pytest.approx(10_000), "the reader"
    assert told[1, 1000, 8] == pytest.approx(1000 / 0.019), "the step"
    assert told[2, 1000, 1] == pytest.approx(20_000), "two readers, each for half of a batch"
    assert told[2, 1000, 8] == pytest.approx(1000 / (0.009 + 0.005 + 0.005)), (
        "half of the rows, and agreeing"
    )
    few = ranks_table(
        {1000: RowCosts(stages=reads, cores=0.5, measured=10_000.0)}, step, (2,), (8,)
    )
    assert few[2, 1000, 8] == pytest.approx(0.5 / (2 * 0.009 / 1000 + 1e-5)), "half a core for both"
