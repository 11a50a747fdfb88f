"""Stores: the same bytes from anywhere, through errors, short reads and stalls; no test waits for real."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from types import SimpleNamespace

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from sluice.common.stores import Place
from sluice.etl.table.store import TableStore
from sluice.ingest.read.cache import FileCache
from sluice.ingest.read.remote_files import RemoteFiles
from sluice.ingest.read.retry import Clock, DeliveryError, Retrier, RetryPolicy, StoreClosed
from tests.ingest.s3 import S3Server, with_bucket
from tests.raises import raises

TABLE = pa.table({"a": np.arange(50_000), "b": np.random.default_rng(1).random(50_000)})
GROUPS = 10


class FakeClock(Clock):
    """Sleeping moves it on."""

    def __init__(self):
        super().__init__()
        self.time, self.slept = 0.0, []

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.time += seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    pq.write_table(
        TABLE,
        folder / "part-0.parquet",
        row_group_size=len(TABLE) // GROUPS,
        write_page_checksum=True,
    )
    return folder


@pytest.fixture(scope="module")
def server():
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def bucket(server, monkeypatch, folder):
    """The server, with the file in bucket `data`, below the prefix `table`."""
    files = with_bucket(server, monkeypatch)
    with files.open_output_stream("data/table/part-0.parquet") as out:
        out.write((folder / "part-0.parquet").read_bytes())
    return server


def read(store, path="part-0.parquet"):
    """All row groups, one at a time, as a loader does."""
    with store.open(path) as file:
        parquet = pq.ParquetFile(file, page_checksum_verification=True)
        return pa.concat_tables(parquet.read_row_group(g) for g in range(parquet.num_row_groups))


# ---- the same bytes from anywhere


@pytest.mark.parametrize("uri", ["{0}", "file://{0}", "latency://{0}", "latency://file://{0}"])
def test_local_files(folder, uri):
    store = RemoteFiles.at(uri.format(folder))
    assert read(store).equals(TABLE)
    assert read(store, str(folder / "part-0.parquet")).equals(TABLE)
    assert read(RemoteFiles.at(uri.format(folder / "part-0.parquet")), "").equals(TABLE), (
        "the root may be the file"
    )
    assert store.local == (not uri.startswith("latency"))


def test_what_fsspec_opens(folder):
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/table/part-0.parquet", (folder / "part-0.parquet").read_bytes())
    try:
        store = RemoteFiles.at("memory://table")
        assert read(store).equals(TABLE)
        with pytest.raises(FileNotFoundError):
            store.open("part-1.parquet")
    finally:
        memory.store.clear()


def test_s3_is_read_in_ranges(bucket):
    store = RemoteFiles.at("s3://data/table?" + bucket.query)
    assert read(store).equals(TABLE)
    assert len(bucket.ranges) == GROUPS + 1  # the footer, then each row group
    assert read(store, "s3://data/table/part-0.parquet").equals(TABLE)
    with raises(FileNotFoundError, "data/table/part-1.parquet"):
        store.open("part-1.parquet")


# ---- errors that pass, and errors that do not


@pytest.mark.parametrize("status", [503, 500, 429])
def test_a_third_of_s3_requests_refused(bucket, status):
    clock = FakeClock()
    store = RemoteFiles.at(
        "s3://data/table?" + bucket.query,
        clock=clock,
        retry=RetryPolicy(attempts=50, deadline_s=1000),
    )
    bucket.refuse(0.3, status)
    for _ in range(5):
        assert read(store).equals(TABLE)
    assert store.stats()["retries"] == bucket.refused == len(clock.slept) > 5


@pytest.mark.parametrize("status", [503, 429])
def test_heads_lists_openings_and_small_files_outlast_a_store_that_refuses_five_times(
    bucket, monkeypatch, status
):
    place = "s3://data/table?" + bucket.query
    files, path = Place.of(place).files()
    for method, ask in (
        ("HEAD", lambda: files.get_file_info(f"{path}/part-0.parquet").size),
        ("GET", lambda: max(one.size or 0 for one in files.get_file_info(pafs.FileSelector(path)))),
        ("HEAD", lambda: files.open_input_file(f"{path}/part-0.parquet").size()),
        ("GET", lambda: len(TableStore(place).read("part-0.parquet"))),
    ):
        refused = itertools.chain([0] * 5, itertools.repeat(1))
        monkeypatch.setattr(bucket, "_chance", SimpleNamespace(random=partial(next, refused)))
        bucket.refuse(0.5, status, method)
        assert ask() > 1000
        assert bucket.refused == 5


def test_wrong_keys_are_not_tried_again(bucket):
    store = RemoteFiles.at("s3://data/table?" + bucket.query, clock=FakeClock())
    bucket.refuse(1.0, 403)
    with raises(PermissionError, "AWS_ACCESS_KEY_ID"):
        store.open("part-0.parquet")
    assert bucket.refused == 1


def test_everything_arrives_through_errors_short_reads_and_stalls(folder):
    clock = FakeClock()
    store = RemoteFiles.at(
        f"latency://{folder}?error_rate=0.3&short_rate=0.2&stall_rate=0.1&stall_ms=700&latency_ms=5"
        "&bandwidth=1MiB&seed=7",
        clock=clock,
        retry=RetryPolicy(attempts=50, deadline_s=10_000),
    )
    for _ in range(10):
        assert read(store).equals(TABLE)
    done = store.disturbed
    assert store.stats()["retries"] == done.errors + done.shorts
    assert min(done.errors, done.shorts, done.stalls) > 5
    assert clock.time > store.stats()["bytes"] / 2**20 + done.stalls * 0.7


def test_a_stall_holds_reads_until_it_is_over(folder):
    clock = FakeClock()
    store = RemoteFiles.at(f"latency://{folder}", clock=clock)
    store.disturbed.stall(10)
    read(store)
    assert clock.slept == [10.0], "the first read waits, those after do not"


def test_closing_ends_a_wait(folder):
    """With a real clock: a read that would wait for an hour is let go."""
    store = RemoteFiles.at(f"latency://{folder}")
    store.disturbed.stall(3600)
    caught = []

    def opening():
        try:
            store.open("part-0.parquet")
        except StoreClosed as error:
            caught.append(error)

    thread = threading.Thread(target=opening)
    thread.start()
    store.close()
    thread.join(60)
    assert caught


# ---- wrong input


@pytest.mark.parametrize(
    ("uri", "facts"),
    [
        ("latency:///x?eror_rate=1", ("'eror_rate'", "'error_rate'")),
        ("latency:///x?error_rate=2", ("error_rate", 2.0)),
        ("latency:///x?latency_ms=slow", ("latency_ms=slow",)),
        ("latency:///x?bandwidth=fast", ("bandwidth=fast",)),
        ("latency://", ("no path",)),
        ("file://x", ("file:///path",)),
        ("s3://bucket?regoin=x", ("'regoin'", "'region'")),
        ("nowhere://x", ("nowhere://",)),
    ],
)
def test_wrong_uris_are_refused_by_name(uri, facts):
    with raises(ValueError, *facts):
        RemoteFiles.at(uri)


# ---- trying again


def test_waits_double_and_are_shortened_by_chance():
    policy = RetryPolicy(first_wait_s=1, longest_wait_s=5)
    assert [policy.wait_s(n, 1.0) for n in range(1, 6)] == [1, 2, 4, 5, 5]
    assert [policy.wait_s(n, 0.0) for n in range(1, 6)] == [0.5, 1, 2, 2.5, 2.5]


def test_no_attempt_begins_after_the_deadline():
    clock = FakeClock()
    retrier = Retrier(
        RetryPolicy(attempts=100, first_wait_s=1, longest_wait_s=4, deadline_s=10),
        clock,
        lambda: 1.0,
    )
    began = []

    def fail():
        began.append(clock.now())
        clock.time += 0.5
        raise TimeoutError("slow")

    with raises(DeliveryError, "part-3", "4 times", "9.0 s", "TimeoutError: slow"):
        retrier.call(fail, "part-3")
    assert began == [0, 1.5, 4, 8.5]
    assert (retrier.retries, retrier.gave_up) == (3, 1)


# ---- with a cache


def test_a_second_scan_comes_from_the_cache(folder, tmp_path):
    with FileCache(tmp_path, 2**30, "table") as cache:
        store = RemoteFiles.at(
            f"latency://{folder}?latency_ms=10", clock=(clock := FakeClock()), cache=cache
        )
        assert read(store).equals(TABLE)
        cold = clock.time
        assert read(store).equals(TABLE)
        assert clock.time - cold == pytest.approx(0.010), "only the opening went to the store"
        assert store.stats()["cache_hits"] == GROUPS + 1


def test_a_file_that_was_replaced_is_not_read_from_the_cache(tmp_path):
    path, sizes = tmp_path / "x.parquet", set()
    with FileCache(tmp_path / "cache", 2**30, "table") as cache:
        store = RemoteFiles.at(f"latency://{path}", clock=FakeClock(), cache=cache)
        for table in (TABLE, TABLE.set_column(0, "a", pa.array(np.arange(50_000)[::-1]))):
            path.unlink(missing_ok=True)
            pq.write_table(table, path, compression="none", use_dictionary=False)
            sizes.add(path.stat().st_size)
            assert read(store, "").equals(table)
    assert len(sizes) == 1, "the size does not tell them apart"


class GoneFor:
    """A backend whose files cannot be reached for some seconds of a clock; each attempt takes a second to fail."""

    def __init__(self, clock, inner, seconds):
        self._clock, self._inner, self._until = clock, inner, clock.now() + seconds

    def open(self, key):
        self._reach(key)
        source = self._inner.open(key)
        read = source.read
        source.read = lambda offset, length: (self._reach(key), read(offset, length))[1]
        return source

    def _reach(self, key):
        if self._clock.now() < self._until:
            self._clock.sleep(1.0)
            raise TimeoutError(f"{key}: no answer")


def test_a_file_that_is_gone_for_a_minute_is_waited_for(folder):
    clock = FakeClock()
    store = RemoteFiles(
        "/bucket",
        GoneFor(clock, Bytes((folder / "part-0.parquet").read_bytes()), 60.0),
        clock=clock,
    )
    with store.open("part-0.parquet") as file:
        assert pq.read_table(file).equals(TABLE)
    assert store.stats()["gave_up"] == 0
    assert store.stats()["retries"] > 8
    assert 60 <= clock.time < 70


def test_a_file_that_stays_away_is_named_with_the_attempts_and_what_allows_more(folder):
    clock = FakeClock()
    store = RemoteFiles(
        "/bucket",
        GoneFor(clock, Bytes((folder / "part-0.parquet").read_bytes()), 600.0),
        clock=clock,
    )
    with pytest.raises(
        DeliveryError,
        match=r"/bucket/part-0\.parquet: opening: failed \d+ times within \d+\.\d s "
        r"\(allowed: 50 attempts, 90 s; for more, use FileOpener\(retry="
        r".*TimeoutError: /bucket/part-0\.parquet: no answer",
    ):
        store.open("part-0.parquet")
    assert 80 < clock.time < 92


class Bytes:
    """A backend whose every file holds these bytes."""

    def __init__(self, data):
        self.data, self.size, self.tag = data, len(data), "1"

    def open(self, key):
        return Bytes(self.data)

    def read(self, offset, length):
        return self.data[offset : offset + length]

    def close(self): ...
