"""Ids that are left to the loader are those that Spark would have made: batch for batch, and in the order hash."""

from __future__ import annotations

import pytest
import torch

from sluice.etl.table.table import FeatureTable
from sluice.ingest.knobs import Knobs
from sluice.ingest.stages.transform import Transform
from tests.ingest import left_ids
from tests.open_loader import open_loader


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> tuple[FeatureTable, FeatureTable]:
    return left_ids.tables(tmp_path_factory.mktemp("left"), 3000)


def batches(table: FeatureTable, knobs: Knobs | None = None, reader: str = "arrow"):
    """Of two epochs, with the order hashes."""
    mine = Transform("mine", "tests.ingest.worker_functions:double", columns=("I1",))
    found, hashes = [], []
    with open_loader(
        table,
        batch_size=72,
        transforms=[mine],
        knobs=knobs,
        last="pad",
        window_rows=300,
        reader=reader,
    ) as loader:
        assert {"user", "price"} < set(loader.sparse_names)
        for _ in range(2):
            found += [
                [t.clone() for t in (b.dense, b.values, b.lengths, b.label, b.weight)]
                for b in loader
            ]
            hashes.append(loader.order_hash)
    return found, hashes


@pytest.mark.parametrize(
    ("knobs", "reader"),
    [
        (Knobs(workers={"read": 1, "shuffle": 1}), "arrow"),
        (Knobs(workers={"read": 3, "shuffle": 3, "mine": 2}), "petastorm"),
        (Knobs(workers={"shuffle": 2, "mine": 2}, backend={"mine": "process"}), "arrow"),
    ],
)
def test_batches_and_order_hash_are_the_same(tables, knobs, reader):
    spark, left = tables
    (want, order), (got, got_order) = batches(spark), batches(left, knobs, reader)
    assert got_order == order
    assert len(got) == len(want) == 2 * -(-2400 // 72)
    assert max(int(values.max()) for _, values, *_ in want) > 2**31
    assert all(
        torch.equal(a, b)
        for one, other in zip(got, want, strict=True)
        for a, b in zip(one, other, strict=True)
    )
