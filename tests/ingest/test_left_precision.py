"""Numbers that are left to the loader keep all their bits until its operators have worked on them."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sluice import FeatureTable
from tests.etl.jobs import run
from tests.open_loader import open_loader

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
    return pa.table(
        {
            "click": np.arange(ROWS) % 2,
            "at": pa.array(at, mask=at % 50 == 0),
            "price": pa.array(at + np.arange(ROWS) % 7 / 8, mask=at % 70 == 0),
        }
    )


def made(folder: Path, text: str, **options: object) -> FeatureTable:
    pq.write_table(raw(), folder.parent / "rows.parquet")
    run(None, folder, folder.parent / "rows.parquet", text=text, **options)
    return FeatureTable.open(folder)


def dense(table: FeatureTable, **options: object) -> dict[str, torch.Tensor]:
    with open_loader(table, split="all", batch_size=400, **options) as loader:
        rows = torch.cat([batch.dense for batch in loader])
    return {name: rows[:, number] for number, name in enumerate(loader.dense_names)}


@pytest.mark.parametrize("options", [{"reader": "arrow"}, {"reader": "petastorm"}])
def test_the_loader_makes_of_a_time_as_many_values_as_the_etl(tmp_path, options):
    etl, left = made(tmp_path / "etl", ETL), made(tmp_path / "left", SPEC)
    assert {f.name: f.type for f in left.fields if f.online} == {"at": "double", "price": "double"}
    want, got = dense(etl, **options), dense(left, **options)
    assert len(want["at"].unique()) > 2400
    for name, values in want.items():
        assert torch.equal(values.view(torch.int32), got[name].view(torch.int32)), name
