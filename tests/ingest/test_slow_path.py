"""`latency://60ms/PATH`: a local path behind a slow store, in each place that names a table or a file."""

import shutil
import threading
from collections import deque

import pytest

from sluice import FeatureTable, Knobs
from sluice.common.stores import plain_path
from sluice.ingest.read.parquet_files import ParquetError
from tests.open_loader import load_epoch
from tests.product import (
    BatchLoader,
    FileOpener,
    ParquetFiles,
    Place,
    Store,
    TableStore,
    UsageError,
)
from tests.raises import raises


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("latency://60ms/data/clicks", ("latency://60ms", "/data/clicks", 60.0)),
        ("latency://1.5s/data", ("latency://1.5s", "/data", 1500.0)),
        ("latency:///data?latency_ms=5", None),
        ("latency://file:///data", None),
        ("/data", None),
        ("s3://data", None),
    ],
)
def test_a_name_has_a_delay_and_a_path(name, parts):
    place = Place.of(name)
    assert (
        (place.prefix, place.path, place.delay_ms) if place.prefix and not place.scheme else None
    ) == parts
    assert plain_path(name) == (parts[1] if parts else name)


@pytest.mark.parametrize(
    "name",
    [
        "latency://60/data",
        "latency://60ms/",
        "latency://-5ms/data",
        "latency://data/clicks",
        "latency://60msdata",
    ],
)
def test_a_malformed_name_is_refused_with_the_right_form(name):
    opening = FileOpener().open_remote
    for taking in (Place.of, TableStore, opening, ParquetFiles.open, FeatureTable.open):
        with raises(UsageError, "latency://60ms/ABSOLUTE/PATH"):
            taking(name)


def test_a_feature_table_gives_the_same_rows_through_a_slow_store(table):
    slow = FeatureTable.open(f"latency://1ms{table.uri}")
    assert slow.uri == f"latency://1ms{table.uri}"
    assert slow.version == table.version
    assert slow.files_of("train")[0].path == f"latency://1ms{table.files_of('train')[0].path}"
    order, store = load_epoch(slow)
    assert order == load_epoch(table)[0] == load_epoch(slow.uri)[0]
    assert store["reads"] > 0


def test_plain_files_do_so_too(table, tmp_path):
    here = [
        shutil.copy(f.path, tmp_path / f"{n}.parquet")
        for n, f in enumerate(table.files_of("train"))
    ]
    roles = "label=label;dense=I*;sparse=C*"
    assert (
        load_epoch([f"latency://1ms{f}" for f in here], roles=roles)[0]
        == load_epoch(here, roles=roles)[0]
    )
    assert load_epoch(f"latency://1ms{tmp_path}/*.parquet", roles=roles)[1]["reads"] > 0
    with raises(ParquetError, "none-*", "no file matches"):
        ParquetFiles.open(f"latency://1ms{tmp_path}/none-*")
    with raises(ParquetError, "latency://1ms", "one delay"):
        ParquetFiles.open([here[0], f"latency://1ms{here[1]}"])


def test_as_many_row_groups_are_under_way_as_fetch_says_and_decoding_asks_for_nothing(
    table, monkeypatch
):
    workers = 12
    all_there = threading.Barrier(workers)
    row_groups = iter(range(0))
    fetch, names = Store.read, set()

    def read(self, *about):
        name = threading.current_thread().name
        names.add(name.rpartition("-")[0])
        if name.startswith("sluice-fetch") and next(row_groups, None) is not None:
            all_there.wait(60)
        return fetch(self, *about)

    monkeypatch.setattr(Store, "read", read)
    with BatchLoader(
        f"latency://0ms{table.uri}",
        batch_size=80,
        read_ahead_epochs=9,
        knobs=Knobs(workers={"fetch": 1}, read_ahead_bytes=2**20),
    ) as loader:
        next(iter(loader))
        row_groups = iter(range(workers))
        loader.apply(loader.knobs.with_workers(fetch=workers))  # while it runs
        for _ in range(8):
            deque(loader, maxlen=0)
    assert next(row_groups, None) is None
    assert "sluice-decode" not in names
