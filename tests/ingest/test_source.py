"""Damaged and hostile files: one clear error that names file and row group, no code run, nothing that hangs."""

import os
import random
import traceback
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.small_table import small_table
from sluice import FeatureTable
from sluice.ingest.read.open_file import OpenFile
from tests.open_loader import open_loader
from tests.product import (
    DataFile,
    ParquetFiles,
    Read,
    RowGroupReader,
    SourceError,
    UsageError,
    WindowPart,
    find_files,
)
from tests.raises import assert_names, raises

pytestmark = pytest.mark.slow

READERS = ["arrow", "petastorm"]


@pytest.fixture
def own(tmp_path) -> FeatureTable:
    """A table that the test may damage."""
    return small_table(tmp_path / "clicks", rows=3000, files=2, row_group_rows=256)


def load(table, reader="arrow", **options):
    with open_loader(table, batch_size=80, reader=reader, **options) as loader:
        deque(loader, maxlen=0)


@pytest.mark.parametrize("reader", READERS)
def test_a_truncated_or_missing_file_is_named_before_the_first_batch(own, reader):
    file, _ = own.files_of("train")
    os.truncate(file.path, file.bytes - 100)
    with raises(SourceError, file.path, "bytes", "truncated"):
        open_loader(own, batch_size=80, reader=reader)
    os.remove(file.path)
    with raises(SourceError, file.path, "No such file"):
        open_loader(own, batch_size=80, reader=reader)


@pytest.mark.parametrize("reader", READERS)
def test_a_flipped_bit_is_found_and_its_row_group_named(own, reader):
    file = own.files_of("train")[1]
    column = pq.read_metadata(file.path).row_group(2).column(17)
    place = column.data_page_offset + column.total_compressed_size - 40
    with open(file.path, "r+b") as data:
        data.seek(place)
        byte = data.read(1)[0]
        data.seek(place)
        data.write(bytes([byte ^ 1]))
    with raises(SourceError, file.path, "row group 2", "CRC"):
        load(own, reader)


def test_a_file_of_other_rows_is_refused(own):
    file = own.files_of("train")[0]
    groups = RowGroupReader(
        [replace(file, row_group_rows=(255, *file.row_group_rows[1:]))], ["label"]
    )
    with raises(SourceError, "row group 0", "256 rows", 255, "replaced"):
        groups.read(Read(0, 0, 255, (WindowPart(0, 0, 0, 255),)))


def files_of_row_groups(folder, count):
    for number in range(count):
        table = pa.table({"label": [number] * 8})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=8)
    return [
        DataFile(
            path=str(folder / f"part-{n}.parquet"),
            rows=8,
            bytes=0,
            row_group_rows=(8,),
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("fault", ["cut short", "damaged page"])
def test_the_traceback_of_damage_is_short_and_ends_with_its_message(tmp_path, reader, fault):
    files_of_row_groups(tmp_path, 2)
    path = tmp_path / "part-1.parquet"
    content = path.read_bytes()
    if fault == "cut short":
        path.write_bytes(content[:50])
    else:
        path.write_bytes(content[:4] + b"\xff" * 30 + content[34:])
    with raises(UsageError, "part-1.parquet") as caught:
        load(ParquetFiles.open(tmp_path, "label=label"), reader)
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert len([line for line in lines if line.startswith("  File")]) <= 7, lines
    assert not any("site-packages" in line for line in lines)


def write_rows(path, value, groups, statistics=True):
    table = pa.table({"label": np.full(8 * groups, value, np.int8)})
    pq.write_table(table, path, row_group_size=8, write_statistics=statistics)


def replace_file(path, chance):
    """Puts a file of ones at the path of a file of zeros, in one of the ways in which programs do it."""
    new = path.with_name("new")
    write_rows(new, 1, chance.choice([6, 6, 3, 9]), statistics=False)
    if chance.random() < 0.5:
        path.write_bytes(new.read_bytes())
    else:
        os.replace(new, path)


@pytest.mark.parametrize("store", ["local", "far away", "fsspec"])
def test_of_drawn_replacements_none_mixes_old_and_new_rows(tmp_path, monkeypatch, store):
    """Before, while or after a row group is read. With statistics off, even the footers are the same."""
    errors = 0
    for seed in range(20):
        chance = random.Random(seed)
        path = tmp_path / f"part-{seed}.parquet"
        write_rows(path, 0, 6, statistics=False)
        file = DataFile(
            path={"far away": f"latency://1ms{path}", "fsspec": f"local://{path}"}.get(
                store, str(path)
            ),
            rows=48,
            bytes=path.stat().st_size,
            row_group_rows=(8,) * 6,
        )
        groups = RowGroupReader([file], ["label"])
        due, during = chance.randrange(8), chance.random() < 0.5
        read_part = OpenFile.read

        def read(opened, *args, path=path, chance=chance, read_part=read_part):
            table = read_part(opened, *args)
            replace_file(path, chance)
            return table

        for turn in range(12):
            try:
                with monkeypatch.context() as patch:
                    if turn == due and during:
                        patch.setattr(OpenFile, "read", read)
                    elif turn == due:
                        replace_file(path, chance)
                    group = chance.randrange(6)
                    rows = groups.read(Read(0, group, 8, (WindowPart(0, 0, 0, 8),)))
                assert rows["label"].to_pylist() == [0] * 8, (seed, turn, due)
            except SourceError as error:
                if turn < due:
                    raise
                assert_names(str(error), path.name, "row group", "the file was replaced")
                errors += 1
        groups.close()
    assert errors > 50


@pytest.mark.parametrize("reader", READERS)
def test_files_of_no_version_are_not_read(own, reader):
    folder = os.path.dirname(own.files_of("train")[0].path)
    with open(f"{folder}/part-00099.parquet", "wb") as orphan:
        orphan.write(b"no Parquet at all")
    load(own, reader)


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (open, (str(self.marker), "w"))


def test_hostile_metadata_is_never_unpickled(own, tmp_path):
    """What Petastorm itself would unpickle: a schema in `_common_metadata`, in every folder above the files."""
    import pickle  # noqa: TID251  it makes the hostile file; nothing reads it

    marker = tmp_path / "code ran"
    hostile = pickle.dumps(Bomb(marker))
    pickle.loads(hostile).close()
    assert marker.exists()
    marker.unlink()
    schema = pa.schema([("label", pa.int8())], metadata={b"dataset-toolkit.unischema.v1": hostile})
    folder = os.path.dirname(own.files_of("train")[0].path)
    while folder != str(tmp_path):
        for name in ("_common_metadata", "_metadata"):
            pq.write_metadata(schema, f"{folder}/{name}")
        folder = os.path.dirname(folder)
    load(own, "petastorm")
    assert not marker.exists()


def test_the_files_of_a_folder_come_in_the_order_of_their_names(tmp_path):
    for number in range(20):
        write_rows(tmp_path / f"{number * 7 % 20:02}.parquet", 0, 1)
    names = [f"{number:02}.parquet" for number in range(20)]
    for source in (tmp_path, tmp_path / "*.parquet"):
        assert [Path(path).name for path in find_files(str(source)).paths] == names
