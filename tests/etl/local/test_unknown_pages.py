"""Parquet with pages that Arrow cannot decode: an encoding of a later format, or bytes that are none."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.ingest.plain.probe import ParquetError
from sluice.tools.guess import main as guess
from tests.etl.jobs import run
from tests.open_loader import open_loader
from tests.product import JobFailure, SourceError
from tests.raises import raises

SPEC = """
[input]
format = "parquet"
columns = ["click:int", "user:int", "price:float"]

[table]
split = {train = 1}

[[column]]
name = "click"
role = "label"

[[column]]
name = "user"
role = "sparse"
ops = [{op = "hash", size = 2000}]

[[column]]
name = "price"
role = "dense"
ops = [{op = "fill"}]
"""
HEADER = bytes([0x2C, 0x15, 0xE8, 0x07, 0x15])  # of a page of 500 values; its encoding follows
ALP, UNKNOWN, NEGATIVE = 0x14, 0x7E, 0x01  # 10, 63 and -1, as Thrift writes them


@pytest.fixture(params=[ALP, UNKNOWN, NEGATIVE])
def path(request, tmp_path):
    """A file in whose second row group one page of `price` is of an encoding that Arrow does not know."""
    draw = np.random.default_rng(0)
    columns = {
        "click": draw.integers(0, 2, 2000).astype("int8"),
        "user": draw.integers(0, 500, 2000),
        "price": draw.random(2000),
    }
    path = tmp_path / "later.parquet"
    pq.write_table(
        pa.table(columns),
        path,
        row_group_size=500,
        use_dictionary=False,
        compression="none",
        write_statistics=False,
    )
    data = bytearray(path.read_bytes())
    page = pq.read_metadata(path).row_group(1).column(2).data_page_offset
    data[data.index(HEADER, page, page + 40) + len(HEADER)] = request.param
    path.write_bytes(data)
    return path


def test_pages_of_an_unknown_encoding_are_refused_by_name_by_every_reader(path, tmp_path):
    with raises(JobFailure, str(path), "row groups", "encoding", "does not know", "published"):
        run(None, tmp_path / "made", path, text=SPEC)
    assert not (tmp_path / "made" / "_delta_log").exists()
    with (
        open_loader(
            str(path), roles={"label": "click", "dense": "price"}, batch_size=100
        ) as loader,
        raises(SourceError, str(path), "row group 1", "encoding"),
    ):
        list(loader)
    with raises(ParquetError, str(path), "encoding", "does not know"):
        guess([str(path)])
