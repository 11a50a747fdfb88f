"""Criteo's log twice: features made by the ETL, and the parsed log with every operator left to the loader."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
import torch

from sluice.etl.synth.raw_logs import synthesize
from sluice.ingest.loader import BatchLoader
from sluice.ingest.row_order import Order
from tests.etl.jobs import build_table

pytestmark = pytest.mark.spark


def test_the_same_batches_in_the_same_order_come_out_of_either_table(spark, repo, tmp_path):
    synthesize(tmp_path / "log", rows=3000, seed=2)
    found = []
    for name in ("criteo", "criteo_raw"):
        out = tmp_path / name
        table = build_table(
            spark, out, tmp_path / "log", text=(repo / "features" / f"{name}.toml").read_text()
        )
        assert table.check() == []
        with BatchLoader(table, batch_size=160, order=Order(last="pad")) as loader:
            found.append(
                (
                    [(b.dense.clone(), b.values.clone(), b.label.clone()) for b in loader],
                    loader.order_hash,
                    loader.cardinalities,
                    table,
                )
            )
    (want, order, sizes, etl), (got, same, theirs, left) = found
    assert (order, sizes) == (same, theirs)
    assert len(got) == len(want) > 10
    assert all(
        torch.equal(a, b)
        for one, other in zip(want, got, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    assert etl.record.state == left.record.state
    # Texts lie in dictionaries, so that each value is worked on once; numbers do not.
    group = pq.ParquetFile(left.files_of("train")[0].path).metadata.row_group(0)
    encodings = {
        group.column(i).path_in_schema: group.column(i).has_dictionary_page
        for i in range(group.num_columns)
    }
    assert encodings["C1"]
    assert not encodings["I1"]
