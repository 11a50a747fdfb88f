"""Tables in a bucket, over the real S3 protocol on 127.0.0.1."""

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from pyarrow.fs import S3FileSystem

from benchmarks.small_table import small_table
from sluice import FeatureTable
from tests.ingest.s3 import KEYS, LOST
from tests.product import (
    Base,
    CommitConflict,
    InputError,
    Pin,
    TableError,
    TableFiles,
    TableStore,
    publish,
    vacuum,
)
from tests.raises import raises

pytestmark = pytest.mark.slow

_SERVER = """
import sys
from tests.ingest.s3 import S3Server
server = S3Server()
print(server.address, flush=True)
for line in sys.stdin:
    rate, status = line.split()
    print(server.refused, flush=True)
    server.refuse(float(rate), int(status))
    server._chance.seed(1)  # the same requests fail, whatever other tests have asked
server.close()
"""


class Refusing:
    """A server in a process of its own: delta-rs keeps the interpreter's lock while it waits for an answer."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process
        self.address = process.stdout.readline().strip()

    def refuse(self, rate: float, status: int = 503) -> int:
        """From now on refuses this share of reads. Returns how many were refused before."""
        self._process.stdin.write(f"{rate} {status}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@pytest.fixture(scope="module")
def server(repo) -> Iterator[Refusing]:
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        cwd=repo,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        yield Refusing(process)
        process.communicate(timeout=60)


@pytest.fixture
def address(server) -> str:
    server.refuse(0)
    return server.address


@pytest.fixture
def place(address, monkeypatch) -> str:
    """A folder in a bucket, with where the bucket is."""
    store = {"AWS_ENDPOINT_URL": f"http://{address}"}
    for name, value in (KEYS | store).items():
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


def test_a_table_is_made_and_read_with_the_variables_of_the_launch_page(address, monkeypatch, repo):
    (row,) = re.findall(r"^\| the job, to publish.*", (repo / "docs/launch.md").read_text(), re.M)
    values = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{address}",
    }
    assert set(re.findall(r"AWS_[A-Z_]+", row)) == values.keys()
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    S3FileSystem(endpoint_override=address, scheme="http", allow_bucket_creation=True).create_dir(
        "recipe"
    )
    small_table("s3://recipe/t", rows=300)
    small_table("s3://recipe/t", rows=100, mode="append", first=300)
    table = FeatureTable.open("s3://recipe/t")
    assert (table.rows, table.check()) == (400, [])


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


@pytest.mark.parametrize("status", [503, 429, LOST])
def test_a_table_is_opened_although_a_third_of_all_requests_fail(place, server, status):
    made = small_table(place, rows=300, mode="overwrite")
    server.refuse(0.33, status)
    for _ in range(3):
        assert FeatureTable.open(place).files == made.files
    assert server.refuse(0) > 3


@pytest.mark.parametrize("status", [503, 429, 403, LOST])
def test_a_store_that_refuses_for_good_is_an_error_with_the_tables_uri(place, server, status):
    small_table(place, rows=300, mode="overwrite")
    server.refuse(1, status)
    with raises(TableError, place, "_delta_log", status or "retries") as caught:
        FeatureTable.open(place)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    with raises(InputError, place, "_delta_log"):
        TableFiles.open(place)
    assert 1 <= server.refuse(0) <= 40, "retries are bounded"
