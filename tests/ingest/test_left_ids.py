"""Ids that are left to the loader are those that Spark would have made: batch for batch, and in the order hash."""

from __future__ import annotations

import pytest
import torch

from sluice.etl.table.table import FeatureTable
from sluice.ingest.knobs import Knobs
from sluice.ingest.loader import BatchLoader
from sluice.ingest.read.sources import Reading
from sluice.ingest.row_order import Order
from sluice.ingest.stages.transform import Transform
from tests.ingest import left_ids


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> tuple[FeatureTable, FeatureTable]:
    return left_ids.tables(tmp_path_factory.mktemp("left"), 3000)


def batches(table: FeatureTable, knobs: Knobs | None = None, reader: str = "arrow"):
    """Of two epochs, with the order hashes."""
    mine = Transform("mine", "tests.ingest.worker_functions:double", columns=("I1",))
    found, hashes = [], []
    with BatchLoader(
        table,
        batch_size=72,
        transforms=[mine],
        knobs=knobs,
        order=Order(last="pad", window_rows=300),
        reading=Reading(reader=reader),
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


def test_numbers_are_stored_and_both_tables_are_whole(tables):
    spark, left = tables
    types = {f.name: f.type for f in left.fields if f.name in left_ids.LEFT}
    assert types == {
        "user": "int64",
        "count": "int64",
        "price": "double",
        "filled": "double",
        "parts": "double",
    }
    assert {f.name: f.type for f in spark.fields if f.name in left_ids.LEFT} == dict.fromkeys(
        left_ids.LEFT, "int32"
    ) | {"user": "int64"}  # it has more ids than int32 holds
    assert {f.name: f.cardinality for f in left.fields} == {
        f.name: f.cardinality for f in spark.fields
    }
    assert left.fingerprint.layout != spark.fingerprint.layout
    assert left.fingerprint.vocabulary == spark.fingerprint.vocabulary
    assert left.check() == spark.check() == []
    for name in left_ids.LEFT:
        assert left.record.profile[name]["nulls"] == spark.record.profile[name]["nulls"]
