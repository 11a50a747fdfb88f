"""Tables in a bucket, over the real S3 protocol on 127.0.0.1."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator

import pytest
from pyarrow.fs import S3FileSystem

from benchmarks.small_table import small_table
from sluice.common.stores import StoreError
from sluice.etl.table.commit import Base, CommitConflict, publish
from sluice.etl.table.pins import Pin
from sluice.etl.table.store import TableStore
from sluice.etl.table.table import FeatureTable, TableError
from sluice.etl.table.vacuum import vacuum
from tests.ingest.s3 import KEYS
from tests.raises import raises

pytestmark = pytest.mark.slow

_SERVER = """
import sys
from tests.ingest.s3 import S3Server
server = S3Server()
print(server.address, flush=True)
sys.stdin.read()
server.close()
"""


@pytest.fixture(scope="module")
def address(repo) -> Iterator[str]:
    """Of a server in a process of its own: delta-rs keeps the interpreter's lock while it waits for an answer."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        cwd=repo,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        yield process.stdout.readline().strip()
        process.communicate(timeout=60)


@pytest.fixture
def place(address, monkeypatch) -> str:
    """A folder in a bucket, with where the bucket is."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    S3FileSystem(endpoint_override=address, scheme="http", allow_bucket_creation=True).create_dir(
        "data"
    )
    return f"s3://data/t?endpoint_override={address}&scheme=http&region=us-east-1"


def test_a_query_stands_behind_the_files_name():
    store = TableStore(
        "s3://bucket/deep/t/?region=eu-west-1&scheme=http&endpoint_override=127.0.0.1:1"
    )
    assert store.root == "bucket/deep/t"
    assert (
        store.url("a/b.parquet")
        == "s3://bucket/deep/t/a/b.parquet?region=eu-west-1&scheme=http&endpoint_override=127.0.0.1:1"
    )
    assert store.relative(store.url("a/b.parquet")) == "a/b.parquet"
    assert store.spark_url("data") == "s3a://bucket/deep/t/data"
    assert store.delta == {
        "table_uri": "s3://bucket/deep/t",
        "storage_options": {
            "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "eu-west-1",
        },
    }


def test_a_question_mark_in_a_folders_name_is_no_query(tmp_path):
    store = TableStore(tmp_path / "why?")
    assert store.url("x") == f"{tmp_path}/why?/x"
    assert store.relative(store.url("x")) == "x"
    assert small_table(store.uri, rows=50).check() == []


def test_a_table_in_a_bucket_is_made_read_checked_pinned_and_vacuumed(place):
    store = TableStore(place)
    store.probe()
    with raises(TableError, place.partition("?")[0], "no feature table"):
        FeatureTable.open(place)
    made = small_table(place, rows=300, row_group_rows=64)
    assert all(f.path.endswith(f"?{place.partition('?')[2]}") for f in made.files)
    assert made.check() == []
    stale = Base.read(store)
    small_table(place, rows=100, mode="append", first=300, row_group_rows=64)
    assert FeatureTable.open(place).rows == 400
    with raises(CommitConflict, "version 1", "version 0"):
        publish(
            store,
            stale,
            dataclasses.replace(made.record, mode="overwrite", job="late"),
            made.fields,
        )
    small_table(place, rows=50, mode="overwrite")
    Pin(name="reader", version=0, expires=3e9).save(store)
    gone = vacuum(store, keep=1, now=2e9)
    assert (gone.kept_versions, gone.pinned) == ((0, 2), (0,))
    assert FeatureTable.open(place, 0).check() == []
    assert [v.version for v in FeatureTable.open(place).history()] == [2, 0]


def test_a_bucket_that_cannot_be_written_is_named_before_any_work(place):
    with raises(StoreError, "s3://no-such/t", "written"):
        TableStore(place.replace("//data/", "//no-such/")).probe()
