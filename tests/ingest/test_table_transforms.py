"""Transforms that a table leaves to the loader: columns changed and added, in threads and processes, and what is
refused."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sluice import Errors, FeatureTable, Knobs
from sluice.etl.ops.base import OperatorError
from sluice.ingest.read.parquet_files import table_of
from tests.dlrm import clicks_table
from tests.etl.tables import write_rows
from tests.ingest import transform_functions
from tests.open_loader import open_loader
from tests.product import BatchLoader, QuarantineError, SpecError, TransformError, short_transforms
from tests.raises import MISTAKES, raises

pytestmark = pytest.mark.slow

MODULE = transform_functions.__name__
ROWS, BATCH = 900, 80
TRANSFORMS = f"""
[[transform]]
name = "ratio"
function = "{MODULE}:ratio"
inputs = ["I1", "number", "C1", "C5"]
outputs = ["I1", "ratio", {{name = "pair", role = "sparse", cardinality = 50}},
           {{name = "both", role = "id_list", cardinality = 7}}]
[[transform]]
name = "two"
op = "first_x"
size = 2
last = true
inputs = ["tags"]
[[transform]]
name = "grams"
ops = [{{op = "ngram", size = 2}}, {{op = "hash", size = 40}}]
inputs = ["tags"]
outputs = ["grams"]
[[transform]]
name = "crossed"
op = "cross"
size = 5000
inputs = ["C1", "pair"]
outputs = ["C1xpair"]
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("transforms") / "t"
    clicks_table.write(
        path,
        clicks_table.raw_rows(ROWS),
        text=clicks_table.spec_text(
            features=clicks_table.FEATURES
            + TRANSFORMS.replace('"ratio", {', '{name = "ratio", role = "dense"}, {')
        ),
    )
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> FeatureTable:
    return clicks_table.write(tmp_path_factory.mktemp("plain") / "t", clicks_table.raw_rows(ROWS))


def with_transform(table: FeatureTable, short: str) -> FeatureTable:
    return FeatureTable.open(table.uri, allow_code=(MODULE,), transforms=(f"{MODULE}:{short}",))


def epoch(table: Any, **how: Any) -> tuple[dict[str, list[Any]], str | None, BatchLoader]:
    """The columns of an epoch, in its order: numbers, ids, or lists of ids; and its order hash."""
    columns: dict[str, list[Any]] = {}
    with open_loader(table, batch_size=BATCH, reader="arrow", last="pad", **how) as loader:
        for batch in loader:
            real = (batch.weight > 0).tolist()
            for name, numbers in zip(loader.dense_names, batch.dense.t().tolist(), strict=True):
                columns.setdefault(name, []).extend(itertools.compress(numbers, real))
            lengths = batch.lengths.view(len(loader.sparse_names), -1)
            at = 0
            for name, counts in zip(loader.sparse_names, lengths.tolist(), strict=True):
                ids = torch.split(batch.values[at : at + sum(counts)], counts)
                at += sum(counts)
                columns.setdefault(name, []).extend(
                    itertools.compress([values.tolist() for values in ids], real)
                )
        return columns, loader.order_hash, loader


def test_columns_are_changed_and_added_alike_in_threads_and_processes_and_the_order_stays(
    made, plain
):
    allowed = {"allow_code": (MODULE,)}
    before, order, _ = epoch(plain)
    threads, same, loader = epoch(FeatureTable.open(made, **allowed))
    processes, again, _ = epoch(
        FeatureTable.open(made, **allowed), knobs=Knobs(backend={"ratio": "process"})
    )
    assert order == same == again
    assert threads == processes
    assert loader.dense_names == ("number", "I1", "I2", "I5", "ratio")
    added = {"pair": 50, "both": 7, "grams": 42, "C1xpair": 5002}
    assert loader.sparse_names == ("C1", "C5", "C9", "C14", "tags", *added)
    assert {name: loader.cardinalities[name] for name in added} == added
    for name in ("number", "I2", "I5", "C1", "C5", "C9", "C14"):
        assert threads[name] == before[name]
    # What the functions give, of the rows as they are without them.
    arrays = {name: np.array(before[name], np.float32) for name in ("I1", "number")}
    arrays |= {name: np.array(before[name], np.int32).reshape(-1) for name in ("C1", "C5")}
    want = transform_functions.ratio(arrays)
    np.testing.assert_array_equal(np.array(threads["I1"], np.float32), want["I1"])
    np.testing.assert_array_equal(np.array(threads["ratio"], np.float32), want["ratio"])
    assert [ids[0] for ids in threads["pair"]] == want["pair"].tolist()
    assert threads["both"] == want["both"].reshape(-1, 2).tolist()
    assert threads["tags"] == [tags[-2:] for tags in before["tags"]]
    assert [len(grams) for grams in threads["grams"]] == [
        max(0, len(tags) - 1) for tags in threads["tags"]
    ]
    assert {len(grams) for grams in threads["grams"]} == {0, 1}
    pairs = {}  # the cross is a function of both ids, and of nothing else
    for c1, pair, crossed in zip(threads["C1"], threads["pair"], threads["C1xpair"], strict=True):
        assert pairs.setdefault((c1[0], pair[0]), crossed) == crossed


def test_a_command_lines_transforms_come_on_top_also_over_plain_parquet(made, tmp_path):
    table = FeatureTable.open(made, allow_code=(MODULE,), transforms=(f"{MODULE}:doubled:I1>I1",))
    once, twice = epoch(FeatureTable.open(made, allow_code=(MODULE,)))[0], epoch(table)[0]
    np.testing.assert_allclose(twice["I1"], np.array(once["I1"]) * 2)
    assert twice["ratio"] == once["ratio"], "the spec's own come first"
    assert table.fingerprint.layout != FeatureTable.open(made).fingerprint.layout
    numbers = {"label": [0, 1] * 100, "C1": [1, 2] * 100, "I1": np.arange(200, dtype=np.float32)}
    write_rows(tmp_path / "a.parquet", **numbers)
    files = table_of(
        str(tmp_path / "a.parquet"), "label=label;dense=I1;sparse=C1", (MODULE,)
    ).transformed(short_transforms([f"{MODULE}:doubled"]))
    columns, _, _ = epoch(files)
    assert sorted(columns["I1"]) == [2.0 * n for n in range(200)]


@pytest.mark.parametrize(
    ("short", "facts"),
    MISTAKES["table_transform"],
)
@pytest.mark.parametrize("backend", ["thread", "process"])
def test_what_does_not_fit_is_refused_by_name(plain, short, facts, backend):
    table = with_transform(plain, short)
    knobs = Knobs(backend={short.partition(":")[0]: backend})
    with (
        open_loader(table, batch_size=BATCH, knobs=knobs, reader="arrow") as loader,
        raises(TransformError, f"'{short.partition(':')[0]}'", "epoch 0, step 0", *facts),
    ):
        next(iter(loader))


def test_a_column_that_is_no_output_cannot_be_written(plain):
    table = with_transform(plain, "writes_where_it_may_not:C1>x=4000")
    with (
        open_loader(table, batch_size=BATCH, reader="arrow") as loader,
        raises(QuarantineError, "'writes_where_it_may_not'", "read-only"),
    ):
        next(iter(loader))


def test_rows_on_which_it_fails_are_quarantined_with_nothing_in_what_it_adds(plain, tmp_path):
    table = with_transform(plain, "fails_on_some:number>x=6")
    kept = bad = 0
    with open_loader(
        table,
        batch_size=BATCH,
        errors=Errors(on_error="quarantine", max_rate=1.0, quarantine=tmp_path / "q.jsonl"),
        reader="arrow",
    ) as loader:
        place = loader.sparse_names.index("x")
        for batch in loader:
            counts = batch.lengths.view(len(loader.sparse_names), -1).sum(1)
            ids = torch.split(batch.values, counts.tolist())[place]
            assert set(ids[batch.weight == 1].tolist()) <= {5}
            assert set(ids[batch.weight == 0].tolist()) <= {0}
            kept += int((batch.weight == 1).sum())
            bad += int((batch.weight == 0).sum())
        assert loader.quarantined["rows_set_aside"] == bad
    assert kept > 500
    assert bad > 0


def test_a_function_is_imported_only_if_the_user_allows_it_and_is_named_if_it_is_gone(made, plain):
    with raises(OperatorError, "'ratio'", f"{MODULE}:ratio", f"--allow-code {MODULE}"):
        BatchLoader(FeatureTable.open(made), batch_size=BATCH)
    table = FeatureTable.open(
        plain.uri, allow_code=("nowhere_to_be_found",), transforms=("nowhere_to_be_found:f",)
    )
    with raises(OperatorError, "'f'", "nowhere_to_be_found:f", "No module named", "PYTHONPATH"):
        BatchLoader(table, batch_size=BATCH)


def test_a_column_that_a_transform_needs_and_a_version_lacks_is_named(plain):
    with raises(SpecError, f"{plain.uri}, version 0", "'f'", "'C77'"):
        FeatureTable.open(plain.uri, transforms=("mine:f:C77>x",))
