"""Texts that a file stores in few bytes are counted as they are decoded, in any encoding and row group."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.product import BatchLoader, ParquetFiles
from tests.thrift_structs import join_row_groups


@pytest.mark.parametrize("seed", range(12))
def test_memory_covers_each_row_group_of_repeated_texts(tmp_path, monkeypatch, seed):
    """A row group of long texts among longer ones: as a dictionary, as differences or each in another way, alone or in
    lists."""
    chance = np.random.default_rng(seed)
    has_differences, lists, is_mixed = seed % 2, seed % 4 > 1, seed > 7
    leaf = "t.list.element" if lists else "t"
    groups = []
    for rows, length in ((3000, 1), (int(chance.integers(500, 2000)), 20_000), (2500, 2)):
        texts = pa.array([f"{'x' * length}{n}" for n in range(chance.integers(1, 9))])
        values = texts.take(pa.array(chance.integers(0, len(texts), 2 * rows)))
        offsets = pa.array(np.arange(0, 2 * rows + 1, 2), pa.int32())
        column = pa.ListArray.from_arrays(offsets, values) if lists else values[:rows]
        groups.append(pa.table({"label": np.arange(rows) % 2, "t": column}))
    options = {"dictionary_pagesize_limit": 2**28}
    if has_differences:
        options = {"use_dictionary": False, "column_encoding": {leaf: "DELTA_BYTE_ARRAY"}}
    if is_mixed:
        usual = {"use_dictionary": False, "column_encoding": {leaf: "DELTA_LENGTH_BYTE_ARRAY"}}
        parts = [tmp_path / f"part-{number}" for number in range(len(groups))]
        for number, (group, part) in enumerate(zip(groups, parts, strict=True)):
            pq.write_table(group, part, **(options if number % 2 else usual))
        join_row_groups(parts, tmp_path / "a.parquet")
        for part in parts:
            part.unlink()
    else:
        with pq.ParquetWriter(tmp_path / "a.parquet", groups[0].schema, **options) as file:
            for group in groups:
                file.write_table(group)
    roles = {"label": "label", "id_list" if lists else "sparse": ["t"]}
    monkeypatch.delattr(pq.ParquetFile, "read_row_group")  # the footer says how long texts are
    with BatchLoader(ParquetFiles.open(tmp_path, roles, {"t": 100}), batch_size=100) as loader:
        monkeypatch.undo()
        reader = loader._input.groups
        for number, group in enumerate(groups):
            stored = reader._read_stored(0, number, None)
            assert reader.decoding.at_work(len(group)) >= stored.nbytes
            values = stored.column("t").combine_chunks()
            assert values.cast(group.schema.field("t").type).equals(
                group.column("t").combine_chunks()
            )
            if lists or has_differences or is_mixed:
                assert reader.decoding.at_work(len(group)) >= group.nbytes
