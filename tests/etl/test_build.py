"""Whole jobs on a real Spark session, held against a slow twin that reads, fits and applies row by row in Python."""

import math
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice import FeatureTable
from sluice.etl.apply.rejected import check_rejects_folder
from sluice.etl.ops.hashing import mix
from sluice.etl.spec.row_split import split_of
from tests.etl import jobs
from tests.etl.tables import batch_of, column, lines_in, put, write_spec
from tests.product import (
    FileAssignment,
    InputError,
    Spec,
    hash_rows,
    hash_texts,
    row_keys,
    synthesize,
)
from tests.raises import raises

pytestmark = pytest.mark.spark

TEXT = write_spec(
    "label:int I1..I3:int C1..C7:text",
    column("I*", "dense", "fill, value = 0; clip, low = -2; log, shift = 3"),
    column("C*", "sparse", "categorify, min_count = 3, oov = 4"),
    column("C3", "sparse", "hash, size = 100"),
    column("C7", "sparse", "categorify, min_count = 1, max_size = 50"),
    form="tsv",
    table="seed = 5\nrow_group_rows = 128\nfile_rows = 350\nsplit = {train = 0.7, test = 0.3}",
)


ROWS = 2000
COLUMNS = ("label", "I1", "I2", "I3", *(f"C{i}" for i in range(1, 8)))


run = partial(jobs.run, text=TEXT)


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> Path:
    """A few columns of a few clicks: a job's cost here is Spark's own, for each column and each file."""
    folder = tmp_path_factory.mktemp("raw")
    synthesize(folder / "all.tsv", rows=ROWS, seed=2)
    lines = [line.split("\t") for line in (folder / "all.tsv").read_text().splitlines()]
    kept = ("\t".join([*line[:4], *line[14:21]]) + "\n" for line in lines)
    return put(folder / "clicks.tsv", "".join(kept))


@pytest.fixture(scope="module")
def made(spark, raw, tmp_path_factory) -> FeatureTable:
    output = tmp_path_factory.mktemp("made") / "t"
    result = run(spark, output, raw)
    assert (result.rows_in, result.rows_out, result.rejected, result.version) == (ROWS, ROWS, {}, 0)
    return FeatureTable.open(output)


def content(table: FeatureTable, split: str | None = None) -> list[tuple]:
    files = table.files if split is None else table.files_of(split)
    return [
        row
        for f in files
        for row in zip(
            *(c.to_pylist() for c in pq.read_table(f.path, partitioning=None)), strict=True
        )
    ]


def splits_of(raw: Path) -> tuple[np.ndarray, np.ndarray]:
    """Each line's key, and the number of its split."""
    from sluice.etl.apply.parse import InputParser

    spec, lines = Spec.parse(TEXT), raw.read_bytes().splitlines()
    columns = InputParser(spec).parse(batch_of(lines)).columns
    keys = row_keys(columns, spec)
    return keys, split_of(columns, keys, spec)


def twin(raw: Path) -> list[tuple]:
    """Every row of the table, made one at a time from the raw lines; vocabularies from those of the training split."""
    lines = [
        dict(zip(COLUMNS, line.split("\t"), strict=True)) for line in raw.read_text().splitlines()
    ]
    _, split = splits_of(raw)
    made = {"label": [int(line["label"]) for line in lines]}
    for i in range(1, 4):
        values = [float(line[f"I{i}"] or 0) for line in lines]
        made[f"I{i}"] = pa.array(
            [math.log(max(v, -2) + 3) for v in values], pa.float32()
        ).to_pylist()
    for i in range(1, 8):
        name = f"C{i}"
        values = [line[name] or None for line in lines]
        if name == "C3":
            made[name] = [
                1 if v is None else 2 + int(hash_texts(pa.array([v]))[0]) % 100 for v in values
            ]
            continue
        least, most, oov = (1, 50, 1) if name == "C7" else (3, None, 4)
        counted = Counter(
            v for v, number in zip(values, split, strict=True) if v is not None and number == 0
        )
        words = sorted(
            (w for w, n in counted.items() if n >= least), key=lambda w: (-counted[w], w.encode())
        )[:most]
        ids = {w: 2 + oov + place for place, w in enumerate(words)}
        bucket = {
            v: 2 + int(hash_texts(pa.array([v]), 0x0F0F)[0]) % oov for v in values if v is not None
        }
        made[name] = [1 if v is None else ids.get(v, bucket[v]) for v in values]
    return list(zip(*made.values(), strict=True))


def test_a_job_equals_its_slow_twin_row_for_row(made, raw):
    got, want = content(made), twin(raw)
    rounded = [
        sorted((row[0], *(round(x, 4) for x in row[1:4]), *row[4:]) for row in rows)
        for rows in (got, want)
    ]
    assert rounded[0] == rounded[1]


def test_files_have_exact_row_groups_codec_types_and_no_nulls(made):
    assert made.check() == []
    for file in made.files:
        reader = pq.ParquetFile(file.path)
        groups = [reader.metadata.row_group(i) for i in range(reader.metadata.num_row_groups)]
        assert [g.num_rows for g in groups] == list(file.row_group_rows)
        assert all(rows == 128 for rows in file.row_group_rows[:-1])
        for chunk in (groups[0].column(i) for i in range(groups[0].num_columns)):
            assert chunk.compression == "UNCOMPRESSED"
            assert "PLAIN" in chunk.encodings
        types = {f.name: str(f.type) for f in reader.schema_arrow}
        assert (types["label"], types["I1"], types["C1"]) == ("int8", "float", "int32")
        assert all(c.null_count == 0 for c in reader.read())


def test_splits_have_their_shares_and_the_table_its_numbers_of_files(made):
    assert set(made.splits) == {"train", "test"}
    assert made.rows_of("train") / made.rows == pytest.approx(0.7, abs=0.03)
    assert (len(made.files_of("train")), len(made.files_of("test"))) == (4, 2)


def test_rows_are_where_their_keys_say(made, raw):
    """Recomputed from the raw lines alone: split, file and order within it."""
    spec, (keys, split) = Spec.parse(TEXT), splits_of(raw)
    files, want = FileAssignment.of(spec, ROWS).file(keys, split), twin(raw)
    names = list(spec.table.split)
    label = pa.array([int(line[:1]) for line in raw.read_bytes().splitlines()])
    within = mix(keys ^ hash_rows([label], 0)).view("int64")  # the label is no part of the key
    order = sorted(range(ROWS), key=lambda i: (int(files[i]), int(within[i])))
    by_split = [[want[i] for i in order if split[i] == number] for number in range(2)]
    for number, name in enumerate(names):
        assert [row[4:] for row in content(made, name)] == [row[4:] for row in by_split[number]]


def test_the_content_does_not_depend_on_partitions_or_on_how_the_input_is_cut(
    spark, made, raw, tmp_path
):
    lines = raw.read_bytes().splitlines(keepends=True)
    for number in range(5):  # in another order, too
        part = lines[number * 400 : (number + 1) * 400]
        put(tmp_path / "in" / f"{9 - number}.tsv", b"".join(part))
    changed = {"shuffle_partitions": "5", "execution_arrow_maxRecordsPerBatch": "301"}
    with jobs.spark_settings(spark, **changed):
        run(spark, tmp_path / "t", tmp_path / "in" / "*.tsv")
    other = FeatureTable.open(tmp_path / "t")
    assert content(other) == content(made)
    assert other.record.state == made.record.state
    assert other.fingerprint == made.fingerprint


@pytest.fixture
def broken(raw, tmp_path) -> Path:
    lines = raw.read_text().splitlines()[:1000]
    lines[1] = "only\tthree\tfields"
    fields = lines[5].split("\t")
    lines[5] = "\t".join([fields[0], "many", *fields[2:]])
    lines[9] = "7" + lines[9][1:]
    return put(tmp_path / "broken.tsv", "\n".join(lines))  # nor does it end in a line feed


REASONS = {
    "I1: not a whole number of 64 bits": 1,
    "label: neither 0 nor 1": 1,
    "wrong number of fields": 1,
}


def test_rejects_are_counted_and_kept_with_file_reason_and_text(spark, broken, tmp_path):
    result = run(spark, tmp_path / "t", broken, rejects=str(tmp_path / "rejects"))
    assert (result.rows_in, result.rows_out, result.rejected) == (1000, 997, REASONS)
    kept = lines_in(tmp_path / "rejects")
    assert Counter(row["reason"] for row in kept) == REASONS
    assert all(row["file"].endswith("/broken.tsv") for row in kept)
    assert "only\tthree\tfields" in [row["raw"] for row in kept]
    assert dict(FeatureTable.open(tmp_path / "t").record.rejected) == REASONS
    # The next job's replace them; but nothing goes that no job set aside.
    kept = {place: place.read_text() for place in (broken, *(tmp_path / "rejects").glob("*.json"))}
    (tmp_path / "rejects" / "notes.md").write_text("mine")
    for place in (tmp_path, tmp_path / "rejects", broken):
        with raises(InputError, f"--rejects {place}:", "holds"):
            run(spark, tmp_path / "t", broken, rejects=str(place), mode="overwrite")
    assert kept == {place: place.read_text() for place in kept}
    (tmp_path / "rejects" / "notes.md").unlink()
    check_rejects_folder(str(tmp_path / "rejects"))
