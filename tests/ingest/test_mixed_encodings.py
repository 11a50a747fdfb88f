"""Row groups of one file may store a column in different encodings. Loaders read them as any other file."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice import Errors, Loader
from tests.thrift_structs import join_row_groups

TEXTS = ("DICTIONARY", "PLAIN", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY")
ENCODINGS = {
    "label": ("DICTIONARY", "PLAIN", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"),
    "single": ("DICTIONARY", "PLAIN", "BYTE_STREAM_SPLIT"),
    "double": ("DICTIONARY", "PLAIN", "BYTE_STREAM_SPLIT"),
    "id": ("DICTIONARY", "PLAIN", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"),
    "long": ("DICTIONARY", "PLAIN", "DELTA_BINARY_PACKED"),
    "word": TEXTS,
    "other": TEXTS,
    "words": TEXTS,
}
ROLES = {
    "label": "label",
    "dense": ["single", "double"],
    "sparse": ["id", "long", "word", "other"],
    "id_list": ["words"],
}
HASHED = dict.fromkeys(("word", "other", "words"), 1000)


def drawn_rows(chance, rows):
    numbers = chance.integers(0, chance.choice([1, 5, 400]), rows)
    words = [f"{'w' * int(chance.choice([0, 3, 40]))}{n}" for n in numbers]
    return pa.table(
        {
            "label": numbers.astype(np.int32) % 2,
            "single": numbers.astype(np.float32) / 3,
            "double": numbers / 2,
            "id": numbers.astype(np.int32),
            "long": numbers * 3,
            "word": words,
            "other": pa.array([None if n % 7 == 3 else word for n, word in enumerate(words)]),
            "words": [words[n : n + n % 3] for n in range(rows)],
        }
    )


def write_drawn(chance, table, path):
    """Writes a file of one row group in a drawn layout."""
    drawn = {name: str(chance.choice(kinds)) for name, kinds in ENCODINGS.items()}
    leaves = {name: "words.list.element" if name == "words" else name for name in drawn}
    pq.write_table(
        table,
        path,
        use_dictionary=[leaves[name] for name, kind in drawn.items() if kind == "DICTIONARY"],
        column_encoding={leaves[n]: kind for n, kind in drawn.items() if kind != "DICTIONARY"},
        compression=str(chance.choice(["none", "snappy", "zstd", "gzip"])),
        data_page_version=str(chance.choice(["1.0", "2.0"])),
        dictionary_pagesize_limit=int(chance.choice([60, 2**20])),
        write_page_checksum=bool(chance.random() < 0.5),
    )


def batches_of(path, **more):
    with Loader(
        str(path),
        batch_size=40,
        roles=ROLES,
        hash=HASHED,
        fill={"other": 0},
        tuning="fixed",
        **more,
    ) as loader:
        batches = [batch.numpy() for batch in loader]
    return [
        {
            name: (column.values.tolist(), column.lengths.tolist())
            if name == "words"
            else column.tolist()
            for name, column in batch.items()
        }
        for batch in batches
    ]


@pytest.mark.parametrize("seed", range(12))
def test_row_groups_of_drawn_encodings_give_the_batches_of_a_file_of_one(tmp_path, seed):
    chance = np.random.default_rng(seed)
    rows = int(chance.choice([30, 200]))
    tables = [drawn_rows(chance, rows) for _ in range(4)]
    parts = [tmp_path / f"part-{number}" for number in range(len(tables))]
    for table, part in zip(tables, parts, strict=True):
        write_drawn(chance, table, part)
    for folder in ("mixed", "same"):
        (tmp_path / folder).mkdir()
    join_row_groups(parts, tmp_path / "mixed/a.parquet")
    whole = pa.concat_tables(tables)
    assert pq.read_table(tmp_path / "mixed/a.parquet").equals(whole)
    pq.write_table(whole, tmp_path / "same/a.parquet", row_group_size=rows)
    mixed = batches_of(tmp_path / "mixed")
    assert mixed == batches_of(tmp_path / "same")
    kept = batches_of(tmp_path / "mixed", errors=Errors(on_error="quarantine"))
    assert [batch["id"] for batch in kept] == [batch["id"] for batch in mixed]
