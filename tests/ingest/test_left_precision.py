"""Numbers that are left to the loader keep all their bits until its operators have worked on them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sluice.etl.placing import CannotPlace, placed
from sluice.etl.spec import columns as spec_columns
from sluice.etl.spec.spec import Spec
from sluice.etl.table.commit import CommitError
from sluice.etl.table.table import FeatureTable
from sluice.ingest.loader import BatchLoader
from sluice.ingest.read.packed_copy import PackedCopy
from tests.dlrm.serving.test_left_ids import served
from tests.etl.jobs import run
from tests.etl.test_placement import ran

ROWS = 3600
SPEC = """
[input]
format = "parquet"
columns = ["click:int", "at:int", "price:float"]
[table]
split = {all = 1}
[[column]]
name = "click"
role = "label"
[[column]]
name = "at"
role = "dense"
ops = [{op = "fill", value = 1700001800}, {op = "standardise", online = true}]
[[column]]
name = "price"
role = "dense"
ops = [{op = "fill_mean"}, {op = "log", shift = -1700000000.25, online = true}]
[[column]]
name = "at_id"
from = "at"
role = "sparse"
ops = [{op = "hash", size = 1000}]
"""
ETL = SPEC.replace(", online = true", "")


def raw() -> pa.Table:
    """Unix times of one hour, and prices that float32 holds in steps of 128."""
    at = np.arange(ROWS) + 1_700_000_000
    return pa.table({"click": np.arange(ROWS) % 2, "at": pa.array(at, mask=at % 50 == 0),
                     "price": pa.array(at + np.arange(ROWS) % 7 / 8, mask=at % 70 == 0)})


def made(folder: Path, text: str, **options: object) -> FeatureTable:
    pq.write_table(raw(), folder.parent / "rows.parquet")
    run(None, folder, folder.parent / "rows.parquet", text=text, **options)
    return FeatureTable.open(folder)


def dense(table: FeatureTable, **options: object) -> dict[str, torch.Tensor]:
    with BatchLoader(table, split="all", batch_size=400, **options) as loader:
        rows = torch.cat([batch.dense for batch in loader])
    return {name: rows[:, number] for number, name in enumerate(loader.dense_names)}


@pytest.fixture
def stored_by_an_older_program(tmp_path, monkeypatch) -> FeatureTable:
    """A table in which a column lies as float32 until the loader's operators work on it."""
    def left_as(role: str, kind: str, ops: object, online: int) -> tuple[str, bool]:
        return "float", False

    with monkeypatch.context() as before:
        before.setattr(spec_columns, "left_as", left_as)
        return made(tmp_path / "older", SPEC)


@pytest.mark.parametrize("options", [{"reader": "arrow"}, {"reader": "petastorm"}, {"packed": PackedCopy()}])
def test_the_loader_makes_of_a_time_as_many_values_as_the_etl(tmp_path, options):
    etl, left = made(tmp_path / "etl", ETL), made(tmp_path / "left", SPEC)
    assert {f.name: f.type for f in left.fields if f.online} == {"at": "double", "price": "double"}
    want, got = dense(etl, **options), dense(left, **options)
    assert len(want["at"].unique()) > 2400
    for name, values in want.items():
        assert torch.equal(values.view(torch.int32), got[name].view(torch.int32)), name


def test_a_table_of_an_older_program_gives_what_its_models_were_trained_on(stored_by_an_older_program):
    older = stored_by_an_older_program
    assert {f.name: (f.type, f.nullable) for f in older.fields if f.online} == {
        "at": ("float", False), "price": ("float", False)}
    mean, spread = older.state()["at/1"].to_pylist()[0].values()
    narrow = np.where(np.arange(ROWS) % 50 == 0, 1_700_001_800, np.arange(ROWS) + 1_700_000_000).astype(np.float32)
    want = np.sort(((narrow.astype(np.float64) - mean) / spread).astype(np.float32))
    with BatchLoader(older, split="all", batch_size=400) as loader:
        at = loader.dense_names.index("at")
        assert set(loader.operators.chains) == {"at", "price"}
        assert np.array_equal(np.sort(torch.cat([batch.dense[:, at] for batch in loader]).numpy()), want)
    columns = {name: raw()[name].combine_chunks() for name in ("at", "price")}
    assert np.array_equal(np.sort(served(older).batch(columns).dense[:, at].numpy()), want)


def test_what_is_added_to_it_or_placed_by_it_is_refused_by_name(stored_by_an_older_program, tmp_path):
    older = stored_by_an_older_program
    with pytest.raises(CommitError, match=r"column .at. is .*float.* in the table and .*double.* in this spec; "):
        made(tmp_path / "older", SPEC, mode="append")
    job = SimpleNamespace(spec=Spec.own(SPEC))
    with pytest.raises(CannotPlace, match=r"an older program stored column .at. as float32 .* give a run over"):
        placed(job, lambda _: None, ran(tmp_path / "run", Path(older.uri)), None)
