"""Delta and Iceberg tables of any program, and folders such as `day=2026-01-01`, as sources of a loader."""

import contextlib
import json
import os
import random
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from benchmarks.small_table import small_table
from sluice import Loader, Order, Reading
from sluice.etl.table.table_columns import folders_of, partitions_of
from sluice.ingest.read.pages import StoredColumns
from sluice.ingest.read.parquet_files import ParquetError
from sluice.tools import guess, pack
from tests.ingest.s3 import S3Server, with_bucket
from tests.lake_tables import (
    KINDS,
    change_delta_schema,
    clicks,
    make,
    newest,
    start_threads_of_iceberg,
)
from tests.product import LoaderError, PartitionError, Spec, TableFiles, TableFilesError, UsageError
from tests.raises import raises

ROLES = {"label": "click", "dense": ["price", "hour"]}
HASH = {"user": 1000, "day": 1000}
EVERY = Order(last="pad")


@pytest.fixture(scope="module", autouse=True)
def threads():
    start_threads_of_iceberg()


def load(source, roles=ROLES, hash=HASH, **options) -> tuple[list[tuple[float, ...]], str]:
    """The rows of an epoch, sorted, and its order hash."""
    options = {"order": EVERY, "tuning": "fixed", **options}
    if "spec" in options:
        roles = hash = None
    with Loader(source, batch_size=40, roles=roles, hash=hash, **options) as loader:
        rows = []
        for batch in loader:
            columns = [batch.label, *batch.dense.T, *batch.values.view(-1, len(batch.label))]
            kept = batch.weight > 0
            rows += zip(*(column[kept].tolist() for column in columns), strict=True)
        return sorted(rows), loader.order_hash


@pytest.fixture
def rows():
    return clicks(0), clicks(1)


@pytest.fixture
def wanted(rows, tmp_path):
    """What a loader makes of the same rows in one plain file."""
    pq.write_table(pa.concat_tables(rows), tmp_path / "plain.parquet")
    return load(tmp_path / "plain.parquet")[0]


@pytest.mark.parametrize(
    ("kind", "reader"),
    [
        *((kind, "arrow") for kind in KINDS),
        ("delta by name", "petastorm"),
        ("folders", "petastorm"),
    ],
)
def test_each_kind_gives_the_rows_of_plain_files(tmp_path, rows, wanted, kind, reader):
    source = make(kind, tmp_path / "t", *rows)
    assert load(source, reading=Reading(reader=reader))[0] == wanted
    if kind == "delta by id":
        assert load(source, workers="local:1")[0] == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_guessed_spec_loads_each_kind(tmp_path, rows, kind, capsys, monkeypatch):
    """By a path from here, too."""
    monkeypatch.chdir(tmp_path)
    source = os.path.relpath(make(kind, tmp_path / "t", *rows))
    guess.main([source, "--label", "click"])
    text = capsys.readouterr().out
    spec = Spec.own(text)
    assert spec.input.format == {"folders": "parquet"}.get(kind, kind.split()[0])
    assert {"price", "user", "day", "hour"} <= spec.input.columns.keys()
    loaded = {
        split: len(load(source, spec=spec, split=split)[0])
        for split in ("train", "validation", "test")
    }
    assert sum(loaded.values()) == 600
    assert loaded["train"] > 300


@pytest.mark.parametrize("kind", ["delta", "iceberg", "folders"])
def test_the_order_does_not_depend_on_how_files_are_listed(tmp_path, rows, kind, monkeypatch):
    source = make(kind, tmp_path / "t", *rows)
    before = load(source)[1]
    real = os.scandir

    class Shuffled(contextlib.nullcontext):
        def __init__(self, path="."):
            entries = list(real(path))
            random.Random(3).shuffle(entries)
            super().__init__(iter(entries))

        def __iter__(self):
            return self.enter_result

    monkeypatch.setattr(os, "scandir", Shuffled)
    if kind.startswith("delta"):
        actions = DeltaTable.get_add_actions

        def turned(table, **options):
            rows = pa.table(actions(table, **options))
            return rows.take(list(range(len(rows)))[::-1])

        monkeypatch.setattr(DeltaTable, "get_add_actions", turned)
    assert load(source)[1] == before


def opened(source, **options) -> Loader:
    return Loader(
        source, batch_size=20, roles=ROLES, hash=HASH, tuning="fixed", order=EVERY, **options
    )


def kept(batches) -> int:
    return sum(int((batch.weight > 0).sum()) for batch in batches)


@pytest.mark.parametrize("kind", ["delta", "delta by id"])
def test_a_version_stays_as_it_was_and_a_state_names_it(tmp_path, rows, kind):
    source = make(kind, tmp_path / "t", rows[0])
    alone = load(source)
    with opened(source) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        write_deltalake(source, rows[1], mode="append")
        assert kept(batches) == 280
    assert len(load(source)[0]) == 600
    assert load(f"{source}@v0") == load(source, version=0) == alone
    with opened(source) as loader, raises(LoaderError, "version=0"):
        loader.load_state_dict(state)
    with opened(source, version=0) as loader:
        loader.load_state_dict(state)
        assert kept(loader) == 280
    with opened(source, run_dir=tmp_path / "run") as loader:
        kept(loader)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["data"] == f"{source}@v1"
    assert config["version"].startswith("v1-")


def test_a_snapshot_stays_as_it_was(tmp_path, rows):
    source = make("iceberg", tmp_path / "t", *rows)
    first, second = (
        snapshot["snapshot-id"] for snapshot in json.loads(Path(source).read_text())["snapshots"]
    )
    (tmp_path / "alone").mkdir()
    alone = load(make("iceberg", tmp_path / "alone", rows[0]))[0]
    assert load(source, version=first)[0] == load(f"{source}@v{first}")[0] == alone
    assert load(source, version=second) == load(source)
    with raises(TableFilesError, source, 77, first, second):
        load(source, version=77)


def test_a_catalog_names_a_table(tmp_path, rows, monkeypatch):
    source = make("iceberg", tmp_path / "t", *rows)
    monkeypatch.setenv("PYICEBERG_CATALOG__HERE__TYPE", "sql")
    monkeypatch.setenv("PYICEBERG_CATALOG__HERE__URI", f"sqlite:///{tmp_path}/t/catalog.db")
    kept_open = []
    from pyiceberg import catalog
    from pyiceberg.utils.config import Config

    monkeypatch.setattr(catalog, "_ENV_CONFIG", Config())  # else it is read when it is imported
    real = catalog.load_catalog
    monkeypatch.setattr(
        catalog, "load_catalog", lambda name: kept_open.append(real(name)) or kept_open[-1]
    )
    try:
        assert load("iceberg://here/lake.clicks") == load(source)
        with raises(TableFilesError, "iceberg://here/lake.nothing", "lake.nothing"):
            load("iceberg://here/lake.nothing")
    finally:
        for opened in kept_open:
            opened.close()


@pytest.mark.parametrize("kind", ["delta by name", "delta by id"])
def test_a_renamed_column_keeps_its_values(tmp_path, rows, wanted, kind):
    source = make(kind, tmp_path / "t", *rows)
    new = {"user": "visitor"}
    change_delta_schema(
        source,
        lambda fields: [
            field | {"name": new.get(field["name"], field["name"])} for field in fields
        ],
    )
    assert load(source, hash={"visitor": 1000, "day": 1000})[0] == wanted
    assert load(source, version=1)[0] == wanted


@pytest.mark.parametrize("kind", ["delta by name", "delta by id", "iceberg"])
def test_two_columns_that_swap_their_names_keep_their_values(tmp_path, kind):
    rows = clicks(0).append_column("size", pa.array(np.arange(300), pa.float32()))
    source = make(kind, tmp_path / "t", rows)

    def loaded(*names):
        return load(source, {"label": "click", "dense": names})[0]

    before = loaded("price", "size")
    new = {"price": "size", "size": "price"}
    if kind == "iceberg":
        table = iceberg_table(tmp_path / "t")
        with table.update_schema() as schema:
            schema.rename_column("price", "other")
        with table.update_schema() as schema:
            schema.rename_column("size", "price").rename_column("other", "size")
        table.append(
            rows.slice(0, 0).select(["click", "size", "user", "day", "hour", "at", "price"])
        )
        table.catalog.close()
        source = newest(table)
    else:
        change_delta_schema(
            source,
            lambda fields: [
                field | {"name": new.get(field["name"], field["name"])} for field in fields
            ],
        )
    assert loaded("size", "price") == before != loaded("price", "size")
    spec = Spec.own(BY_PRICE.format(form=kind.split()[0]))
    late = load(source, spec=spec, split="late")[0]
    assert {row[1] for row in late} == set(range(200, 300)), "the split goes by what is price now"


BY_PRICE = """
[input]
format = "{form}"
columns = ["click:int", "price:float", "size:float"]
[table]
split_time = "price"
split = {{train = 0, late = 200}}
[[column]]
name = "click"
role = "label"
[[column]]
name = "price"
role = "dense"
ops = [{{op = "fill"}}]
"""


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_column_that_was_added_later_is_null_in_older_files(tmp_path, rows, kind):
    later = rows[1].append_column("age", pa.array(np.arange(300), pa.int64()))
    if kind == "iceberg":
        from pyiceberg.types import LongType

        make(kind, tmp_path / "t", rows[0])
        table = iceberg_table(tmp_path / "t")
        with table.update_schema() as schema:
            schema.add_column("age", LongType())
        table.append(later)
        table.catalog.close()
        source = newest(table)
    else:
        source = make(kind, tmp_path / "t", rows[0])
        write_deltalake(source, later, mode="append", schema_mode="merge")
    roles = {"label": "click", "dense": ["price", "age"]}
    with raises(ValueError, "age", "fill"):
        load(source, roles=roles)
    rows_loaded = load(source, roles=roles, fill=-1.0)[0]
    assert sorted(row[2] for row in rows_loaded) == [-1.0] * 300 + list(range(300))


def iceberg_table(folder):
    from pyiceberg.catalog.sql import SqlCatalog

    where = {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}
    return SqlCatalog("here", **where).load_table("lake.clicks")


def test_deleted_rows_that_are_only_marked_are_refused(tmp_path, rows, monkeypatch):
    delta = make("delta", tmp_path / "d", *rows)
    file = DeltaTable(delta).file_uris()[0]
    marked = pa.table({"filepath": [file], "selection_vector": [[True]]})
    monkeypatch.setattr(DeltaTable, "deletion_vectors", lambda _: marked)
    with raises(TableFilesError, delta, file, "deletion vector", "REORG"):
        load(delta)

    ice = make("iceberg", tmp_path / "i", *rows)
    from pyiceberg.table import DataScan

    real = DataScan.plan_files

    def marked_tasks(scan):
        for task in real(scan):
            task.delete_files = {task.file}
            yield task

    monkeypatch.setattr(DataScan, "plan_files", marked_tasks)
    with raises(TableFilesError, ice, "snapshot", "rewrite_data_files"):
        load(ice)

    def by_equality(_):
        raise ValueError("PyIceberg does not yet support equality deletes")

    monkeypatch.setattr(DataScan, "plan_files", by_equality)
    with raises(TableFilesError, ice, "equality deletes", "rewrite_data_files"):
        load(ice)


def test_what_is_no_table_and_what_is_gone_is_named(tmp_path, rows):
    delta = make("delta", tmp_path / "d", *rows)
    folders = make("folders", tmp_path / "f", *rows)
    for error, facts, source, version in (
        (TableFilesError, (delta, "there is no version 9: the newest is 1"), f"{delta}@v9", None),
        (TableFilesError, ("@v1", "version=0"), f"{delta}@v1", 0),
        (ParquetError, ("version=1", "plain files"), folders, 1),
        (ParquetError, (delta, "alone"), [delta, folders], None),
        (TableFilesError, ("iceberg://",), str(tmp_path / "nothing.metadata.json"), None),
    ):
        with raises(error, *facts):
            load(source, version=version)
    gone = DeltaTable(delta).file_uris()[0]
    os.remove(gone)
    with raises(TableFilesError, gone, "vacuumed"):
        load(delta)


# ---- folders


@pytest.mark.parametrize(
    ("path", "columns"),
    [
        ("/run=7/t/day=2026-01-01/hour=07/part.parquet", {"day": "2026-01-01", "hour": "07"}),
        ("/t/day=a%20b%2Fc/part.parquet", {"day": "a b/c"}),
        ("/t/day=__HIVE_DEFAULT_PARTITION__/part.parquet", {"day": None}),
        ("/t/day=/part.parquet", {"day": ""}),
        ("/t/=3/part.parquet", {}),
        ("/day=1/t/part.parquet", {}),
        ("day=1/part.parquet", {"day": "1"}),
    ],
)
def test_folders_right_above_a_file_are_columns(path, columns):
    assert folders_of(path) == columns


def test_a_folders_column_is_whole_numbers_or_texts_in_all_files():
    for days, texts, kind in (
        (["1", "-20", "__HIVE_DEFAULT_PARTITION__"], (), "int64"),
        (["1", "1.5"], (), "string"),
        (["1", "9" * 19], (), "string"),
        (["1", ""], (), "string"),
        (["01", "02"], ["day"], "string"),
    ):
        constants = partitions_of([f"/day={day}/a" for day in days], texts)
        assert {str(own.constants["day"].type) for own in constants} == {kind}
    constants = partitions_of(["/day=1/hour=2/a", "/day=2/b"])
    assert [dict(own.constants) for own in constants] == [{"day": pa.scalar(n)} for n in (1, 2)]


def test_a_column_in_a_file_and_in_its_folders_name_is_refused(tmp_path, rows):
    (tmp_path / "day=1").mkdir()
    pq.write_table(rows[0], tmp_path / "day=1" / "a.parquet")
    with raises(PartitionError, tmp_path / "day=1" / "a.parquet", "'day'", "day=1"):
        load(str(tmp_path))
    with raises(PartitionError, "'day'", "two"):
        folders_of("/day=1/day=2/a.parquet")


def test_a_glob_of_folders_loads_the_files_below_them(tmp_path, rows, monkeypatch):
    source = make("folders", tmp_path / "t", *rows)
    (tmp_path / "t" / "_temporary").mkdir()
    (tmp_path / "t" / "_temporary" / "half.parquet").write_bytes(b"half")
    monkeypatch.chdir(tmp_path)
    wanted = load(source)[0]
    for pattern in ("t/*", "t/day=*", "t/day=*/", "./t/day=*/**", "t/day=*/hour=*"):
        assert load(pattern)[0] == wanted, pattern
    loaded = load(["t/day=*1/", "t/day=*2"])
    assert 0 < len(loaded[0]) < 600
    (tmp_path / "empty" / "day=1").mkdir(parents=True)
    with raises(ParquetError, "empty/*", "no *.parquet file in this folder or below"):
        load("empty/*")
    with raises(ParquetError, "none/*", "no file matches"):
        load("none/*")


@pytest.mark.parametrize("kind", ["delta by id", "iceberg"])
def test_a_table_in_a_bucket(tmp_path, rows, wanted, kind, monkeypatch):
    server = S3Server()
    try:
        bucket = with_bucket(server, monkeypatch)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{server.address}")
        if kind == "iceberg":
            where = "s3://data/warehouse"
            properties = {"s3.endpoint": f"http://{server.address}", "s3.region": "us-east-1"}
            source = make(kind, tmp_path / "t", *rows, warehouse=where, **properties)
            assert source.startswith("s3://data/")
        else:
            local = Path(make(kind, tmp_path / "t", *rows))
            for path in filter(Path.is_file, local.rglob("*")):
                with bucket.open_output_stream(f"data/t/{path.relative_to(local)}") as out:
                    out.write(path.read_bytes())
            source = f"s3://data/t?{server.query}"
        assert load(source)[0] == wanted
        assert len(load(source, version=TableFiles.open(source).version)[0]) == 600
        if kind != "iceberg":
            assert len(load(f"s3://data/t@v0?{server.query}")[0]) == 300
    finally:
        server.close()


# ---- packed


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_are_the_same_for_every_reader(tmp_path, rows, kind):
    source, out = make(kind, tmp_path / "t", *rows), f"{tmp_path}/out"
    source += "@v0" * kind.startswith("delta")
    done = pack.main([source, out])
    assert load(out) == load(source)
    assert done["rows"] == len(load(source)[0])
    packed = pandas.read_parquet(out)
    assert packed.shape == (done["rows"], rows[0].num_columns)
    assert kind == "folders" or [*packed.columns] == rows[0].column_names


def test_packed_columns_stay_stored_until_they_are_moved(tmp_path, monkeypatch):
    pq.write_table(clicks(1), tmp_path / "a.parquet", row_group_size=100, compression="brotli")
    stored, fetch = [], StoredColumns.fetch

    def noted(self, *about):
        stored.append(fetch(self, *about))
        return stored[-1]

    pack.main([f"{tmp_path}/a.parquet", f"{tmp_path}/out"])
    monkeypatch.setattr(StoredColumns, "fetch", noted)
    load(f"{tmp_path}/out", "label=click;dense=price,hour", None)
    assert [{*read.stored} for read in stored] == [{"click", "price", "hour"}] * 3
    group = pq.ParquetFile(f"{tmp_path}/out/part-00000000.parquet").metadata.row_group(0)
    assert [group.column(n).has_dictionary_page for n in range(3)] == [True, False, True]


def test_nothing_is_visible_before_all_files_are_written(tmp_path, rows, monkeypatch):
    source, out = make("folders", tmp_path / "t", *rows), tmp_path / "new" / "out"

    def fails(draft, target):
        assert (target.exists(), len(pq.read_table(draft))) == (False, 600)
        raise OSError("no room")

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OSError, match="no room"):
        pack.main([source, str(out)])
    assert os.listdir(out.parent) == []


def test_what_cannot_be_packed_is_refused_by_name(tmp_path, rows):
    path, out = tmp_path / "day=1" / "a.parquet", f"{tmp_path}/out"
    path.parent.mkdir()
    feature = small_table(tmp_path / "feature").uri
    pq.write_table(rows[0], path, write_page_checksum=True)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 3] ^= 1
    (tmp_path / "c").write_bytes(damaged)
    for source, target, facts in (
        (path, tmp_path, (tmp_path, "does not exist yet")),
        (feature, out, (feature, 'layout = "speed"')),
        (path, out, (path, "2 columns", "'day'")),
        (tmp_path / "c", out, (tmp_path / "c", "damaged")),
    ):
        with raises(UsageError, *facts):
            pack.main([str(source), str(target)])
