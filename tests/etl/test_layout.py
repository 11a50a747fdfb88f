"""A table's files are stored for speed or for size. The rows are the same, and other programs read both."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from sluice import FeatureTable
from sluice.etl.table.new_files import _is_repetitive, speed_layout
from tests.etl.test_placement import SPEC, answer
from tests.product import BatchLoader, synthesize

SPLIT = "split = {train = 0.8, test = 0.2}"


def text(layout=""):
    return SPEC.replace(SPLIT, f"{SPLIT}\n{layout}")


def chunks(table):
    """The codec and the encodings of each column chunk of a table."""
    for file in table.files_of("train"):
        metadata = pq.read_metadata(file.path)
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                yield column.compression, set(column.encodings)


@pytest.fixture
def logs(tmp_path):
    synthesize(tmp_path / "log", rows=3000, seed=2)
    return tmp_path


def test_both_layouts_have_the_same_rows_and_only_size_is_compressed(logs):
    loaded, rows = [], []
    for layout in ("", 'layout = "size"'):
        uri = logs / f"table{len(loaded)}"
        answer(logs, f"--output {uri}", text=text(layout))
        table = FeatureTable.open(uri)
        kinds = list(chunks(table))
        if layout:
            assert {codec for codec, _ in kinds} == {"LZ4"}
        else:
            assert {codec for codec, _ in kinds} == {"UNCOMPRESSED"}
            assert any("RLE_DICTIONARY" in some for _, some in kinds)
            assert any("RLE_DICTIONARY" not in some for _, some in kinds)
        assert table.check() == []
        with BatchLoader(table, batch_size=100) as loader:
            dense = [batch.dense.numpy().tobytes() for batch in loader]
            loaded.append((loader.order_hash, dense))
            group = loader._input.groups.decoded(0, 0)
        assert set(group.stored) == {field.name for field in table.fields}
        paths = [file.path for file in table.files_of("train")]
        frames = [pd.read_parquet(path, engine="pyarrow") for path in paths]
        rows.append(pd.concat(frames).drop(columns="split", errors="ignore"))
        assert DeltaTable(str(uri)).to_pyarrow_dataset().count_rows() == 3000
    assert loaded[0] == loaded[1]
    assert rows[0].equals(rows[1])


def test_an_append_keeps_the_layout_of_the_table_unless_the_spec_names_one(logs):
    answer(logs, f"--output {logs}/table", text=text('layout = "size"'))
    for layout, expected in (
        ("", "LZ4"),
        ('layout = "speed"', "UNCOMPRESSED"),
        ("", "UNCOMPRESSED"),
    ):
        answer(logs, f"--output {logs}/table --mode append", text=text(layout))
        table = FeatureTable.open(logs / "table")
        newest = [file for file in table.files_of("train") if table.record.job in file.path]
        assert {pq.read_metadata(f.path).row_group(0).column(0).compression for f in newest} == {
            expected
        }
    answer(logs, f"--output {logs}/table --mode overwrite", text=text())
    assert FeatureTable.open(logs / "table").record.layout == "speed"


def test_numbers_have_a_dictionary_where_it_takes_fewer_bytes():
    chance = np.random.default_rng(1)

    def column(values, kind):
        return pa.chunked_array([pa.array(values, kind)])

    assert _is_repetitive(column(chance.integers(0, 2, 1000), pa.int8()))
    assert _is_repetitive(column(chance.integers(0, 300, 1000), pa.int32()))
    assert _is_repetitive(column(np.round(chance.normal(size=1000), 1), pa.float32()))
    assert not _is_repetitive(column(chance.integers(0, 2**30, 1000), pa.int32()))
    assert not _is_repetitive(column(chance.normal(size=1000), pa.float32()))
    assert not _is_repetitive(column([], pa.float32()))
    assert not _is_repetitive(column([b"abcd"] * 1000, pa.binary()))


def test_what_repeats_has_a_dictionary_and_of_texts_what_is_named():
    rows = {"few": [7] * 99, "many": range(99), "word": ["a"] * 99, "text": map(str, range(99))}
    first = pa.table({name: pa.array(values) for name, values in rows.items()})
    assert speed_layout(first)["use_dictionary"] == ["few", "word"]
    assert speed_layout(first, {"text"})["use_dictionary"] == ["few", "text"]
