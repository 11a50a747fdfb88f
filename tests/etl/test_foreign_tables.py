"""No data file in a table's folder is read by listing: the table may have removed it."""

import fnmatch
import os
import random

import fsspec
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from benchmarks.small_table import small_table
from sluice.etl.read import input_paths
from sluice.etl.table.foreign_tables import ForeignTableError
from sluice.ingest.__main__ import main as ingest_program
from sluice.ingest.read.parquet_files import table_of
from sluice.tools import guess
from tests.etl.tables import put, write_rows
from tests.ingest.s3 import S3Server, with_bucket
from tests.product import (
    BatchLoader,
    InputError,
    ParquetFiles,
    facts_of,
    files_of,
    find_files,
    make_batch_reader,
)
from tests.raises import raises

ROWS = pa.table(
    {"click": [0, 1, 0, 1], "price": [1.0, 2.0, 3.0, 4.0], "day": ["a", "a", "b b", "b b"]}
)
MARKS = {
    "Delta": "_delta_log/00000000000000000000.json",
    "Iceberg": "metadata/00001-a1.metadata.json",
    "Hudi": ".hoodie/hoodie.properties",
}
WAYS = {
    "the folder": "t",
    "a folder in it": "t/day=a",
    "a glob": "t/*/*.parquet",
    "a glob of folders": "t/day=*",
    "a folder that holds it": ".",
    "a link to a folder in it": "link",
    "a file that is a link": "links",
    "a file": "t/day=a/0.parquet",
}
READERS = {
    "loader": lambda path: BatchLoader(path, batch_size=2),
    "facts": facts_of,
    "paths": find_files,
    "guess": lambda path: guess.main([path]),
    "job": lambda path: files_of([path]),
    "doctor": lambda path: ingest_program(["doctor", path]),
    "petastorm": lambda path: make_batch_reader(f"file://{path}"),
}


def refused_by(read, path, capsys) -> str:
    """What a reader says as it refuses; empty if it does not."""
    try:
        read(path)
    except InputError as error:
        return str(error)
    except SystemExit:
        return capsys.readouterr().out
    return ""


@pytest.mark.parametrize("kind", MARKS)
@pytest.mark.parametrize("way", WAYS)
def test_no_reader_lists_files_in_a_tables_folder(tmp_path, capsys, kind, way):
    for path in ("t/day=a/0.parquet", "t/day=b/1.parquet"):
        write_rows(tmp_path / path, ROWS)
    put(tmp_path / "t" / MARKS[kind], "{}")
    (tmp_path / "link").symlink_to(tmp_path / "t" / "day=a")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "one.parquet").symlink_to(tmp_path / "t" / "day=a" / "0.parquet")
    for name, read in READERS.items():
        path = os.path.normpath(tmp_path / WAYS[way])
        if (name == "petastorm" and "*" in path) or (
            name == "doctor" and way == "a file that is a link"
        ):
            continue
        said = refused_by(read, path, capsys)
        assert f"{tmp_path}/t" in said, (name, said)
        if (kind, way) != (
            "Delta",
            "a file",
        ):  # a file that is named may be one of the newest version
            assert f"{kind} table" in said, (name, said)


@pytest.fixture
def removed(tmp_path):
    """A Delta table in which the rows of a day were replaced."""
    write_deltalake(tmp_path / "t", ROWS, partition_by=["day"])
    old = ParquetFiles.open(sorted(DeltaTable(tmp_path / "t").file_uris())).files
    write_deltalake(
        tmp_path / "t",
        ROWS.slice(2, 1).append_column("n", [[1]]),
        mode="overwrite",
        partition_by=["day"],
        schema_mode="merge",
        predicate="day = 'b b'",
    )
    return tmp_path / "t", old


def test_files_that_are_named_are_read_as_long_as_the_newest_version_holds_them(removed):
    folder, old = removed
    assert sum(file.rows for file in old) == 4
    current = DeltaTable(folder).file_uris()
    assert (
        sum(file.rows for file in ParquetFiles.open(current, "label=click;dense=price").files) == 3
    )
    gone = next(file.path for file in old if file.path not in current)
    for asked in ([file.path for file in old], gone, [gone]):
        with raises(ForeignTableError, f"{gone}:", "Delta", folder, "file_uris"):
            ParquetFiles.open(asked)


def test_a_feature_table_is_read_by_its_folder_and_not_by_its_files(tmp_path):
    table = small_table(tmp_path / "clicks", rows=8, files=1)
    assert table_of(str(tmp_path / "clicks")).rows == 8
    folder = os.path.dirname(table.files[0].path)
    with raises(ForeignTableError, f"{tmp_path}/clicks:", "feature table"):
        ParquetFiles.open(folder)


@pytest.mark.parametrize("seed", range(12))
def test_of_drawn_folders_and_marks_a_path_is_refused_if_and_only_if_a_table_holds_a_file_of_it(
    tmp_path, seed
):
    """Loader and local engine, on local files and in a store of fsspec."""
    chance = random.Random(seed)
    folders = ["top"]
    while len(folders) < 8:
        folders.append(
            f"{chance.choice(folders)}/{chance.choice(('a', 'b=1', 'metadata', 'data'))}{len(folders)}"
        )
    tables = [folder for folder in folders if chance.random() < 0.15]
    files = [
        f"{folder}/{chance.randrange(9)}.parquet"
        for folder in folders
        if folder in ("top", *tables) or chance.random() < 0.6
    ]
    marks = [f"{folder}/{chance.choice(list(MARKS.values()))}" for folder in tables]
    harmless = [f"{folder}/metadata/notes.json" for folder in folders if chance.random() < 0.2]
    store = fsspec.filesystem("memory")
    for name in (*files, *marks, *harmless):
        path = tmp_path / name
        write_rows(path, ROWS) if name in files else put(path, "{}")
        store.pipe_file(f"/{seed}/{name}", path.read_bytes())

    folder, name = os.path.split(chance.choice(files))
    up = os.path.dirname(folder)
    asked = chance.choice(
        [
            folder,
            "top",
            f"{folder}/*.parquet",
            os.path.join(up, "*", name),
            os.path.join(up, "*[0-9p]", "*.parquet"),
        ]
    )
    parts = asked.split("/")
    wanted = [
        file
        for file in files
        if len(file.split("/")) == len(parts)
        and all(map(fnmatch.fnmatchcase, file.split("/"), parts))
    ] or [file for file in files if file.startswith(f"{asked}/")]
    held = [
        table
        for table in tables
        if any(file.startswith(f"{table}/") for file in wanted) or table == asked
    ]
    try:
        for read in (
            lambda: sorted(find_files(f"{tmp_path}/{asked}").paths),
            lambda: [file.path for file in files_of([f"{tmp_path}/{asked}"])],
            lambda: [file.path for file in files_of([f"memory://{seed}/{asked}"])],
        ):
            if held:
                with pytest.raises(ForeignTableError, match=rf"/({'|'.join(held)}): "):
                    read()
            else:
                refused = [
                    path for path in read() if path.endswith(".parquet")
                ]  # a job takes files of any name
                assert [
                    path[-len(file) :] for path, file in zip(refused, sorted(wanted), strict=True)
                ] == sorted(wanted)
    finally:
        store.rm(f"/{seed}", recursive=True)


def test_a_store_far_away_is_asked_no_more_for_many_folders_than_for_few(monkeypatch):
    """A listing that is made in any case shows the tables in it; only the folders above it are looked at besides."""
    server, refuse = S3Server(), input_paths._refuse_tables

    def requests(path: str, checked: bool) -> int:
        monkeypatch.setattr(input_paths, "_refuse_tables", refuse if checked else lambda *_: None)
        before = server.requests
        assert len(files_of([f"{path}?{server.query}"])) == days
        return server.requests - before

    try:
        bucket, more = with_bucket(server, monkeypatch), {}
        for days in (2, 20):
            top = f"data/logs{days}"
            for day in range(days):
                with bucket.open_output_stream(f"{top}/day={day}/0.parquet") as out:
                    out.write(b"PAR1")
            for pattern in ("", "/*", "/*/*.parquet"):
                path = f"s3://{top}{pattern}"
                more[days, pattern] = requests(path, checked=True) - requests(path, checked=False)
            monkeypatch.setattr(input_paths, "_refuse_tables", refuse)
            with bucket.open_output_stream(f"{top}/{MARKS['Iceberg']}") as out:
                out.write(b"{}")
            for pattern in ("", "/*", "/*/*.parquet", "/day=1"):
                with raises(ForeignTableError, f"s3://{top}:", "Iceberg"):
                    files_of([f"s3://{top}{pattern}?{server.query}"])
    finally:
        server.close()
    assert set(more.values()) <= {*range(13)}, more
    assert [more[20, pattern] for pattern in ("", "/*", "/*/*.parquet")] == [
        more[2, pattern] for pattern in ("", "/*", "/*/*.parquet")
    ], more
