"""Stores: the same bytes from anywhere, through errors, short reads and stalls; no test waits for real."""

import threading
from contextlib import closing

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from sluice.ingest.read import remote_files
from sluice.ingest.read.open_file import StoreFile
from sluice.ingest.read.retry import ThrottledError
from tests.ingest.s3 import with_bucket
from tests.product import (
    Clock,
    DeliveryError,
    FileOpener,
    Place,
    Retrier,
    RetryPolicy,
    Store,
    TableStore,
)
from tests.raises import MISTAKES, raises

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


@pytest.fixture
def bucket(server, monkeypatch, folder):
    """The server, with the file in bucket `data`, below the prefix `table`."""
    files = with_bucket(server, monkeypatch)
    with files.open_output_stream("data/table/part-0.parquet") as out:
        out.write((folder / "part-0.parquet").read_bytes())
    return server


class Folder:
    """A folder of files, in a store or as if it were in one."""

    def __init__(self, uri, **options):
        self._uri, _, self._query = uri.partition("?")
        self.files = FileOpener(**options)
        self.stats, self.close = self.files.stats, self.files.close

    def open(self, name="part-0.parquet"):
        return self.files.open_remote(f"{self._uri}/{name}" + (self._query and f"?{self._query}"))


def read(store):
    """All row groups, one at a time, as a loader does."""
    with store.open() as file:
        parquet = pq.ParquetFile(file, page_checksum_verification=True)
        return pa.concat_tables(parquet.read_row_group(g) for g in range(parquet.num_row_groups))


# ---- the same bytes from anywhere


@pytest.mark.parametrize("uri", ["{0}", "file://{0}", "latency://0ms{0}"])
def test_local_files(folder, uri):
    assert read(Folder(uri.format(folder))).equals(TABLE)


def test_s3_is_read_in_ranges_with_the_keys_of_a_profile(bucket, monkeypatch, tmp_path):
    path = tmp_path / "credentials"
    path.write_text("[default]\naws_access_key_id = a%b\naws_secret_access_key = c\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    store = Folder("s3://data/table?" + bucket.query)
    assert read(store).equals(TABLE)
    assert len(bucket.ranges) == GROUPS + 1  # the footer, then each row group
    with raises(FileNotFoundError, "data/table/part-1.parquet"):
        store.open("part-1.parquet")


def test_a_file_of_s3_that_was_replaced_is_seen_when_it_is_fetched(bucket):
    place = "s3://data/table?" + bucket.query
    file = Folder(place).open()
    opened = file.state
    TableStore(place).write("part-0.parquet", b"another file")
    file.fetch([(0, 4)])
    assert file.state != opened


# ---- errors that pass, and errors that do not


@pytest.mark.parametrize("status", [503, 500, 429])
def test_a_third_of_s3_requests_refused(bucket, status):
    clock = FakeClock()
    store = Folder(
        "s3://data/table?" + bucket.query,
        clock=clock,
        retry=RetryPolicy(attempts=50, deadline_s=1000),
    )
    bucket.refuse(0.3, status)
    for _ in range(5):
        assert read(store).equals(TABLE)
    assert store.stats()["retries"] == bucket.refused == len(clock.slept) > 5
    assert store.stats()["throttled"] == (0 if status == 500 else bucket.refused)


@pytest.mark.parametrize("status", [503, 429])
def test_heads_lists_openings_and_small_files_outlast_a_store_that_refuses_five_times(
    bucket, status
):
    place = "s3://data/table?" + bucket.query
    files, path = Place.of(place).files()
    with files.open_output_stream(f"{path}/small") as out:
        out.write(b"x" * 2000)
    for method, ask in (
        ("HEAD", lambda: files.get_file_info(f"{path}/part-0.parquet").size),
        (
            "GET",
            lambda: max(file.size or 0 for file in files.get_file_info(pafs.FileSelector(path))),
        ),
        ("HEAD", lambda: files.open_input_file(f"{path}/part-0.parquet").size()),
        ("GET", lambda: len(TableStore(place).read("small"))),
    ):
        bucket.refuse(1.0, status, method, most=5)
        assert ask() > 1000
        assert bucket.refused == 5


def test_wrong_keys_are_not_tried_again(bucket):
    store = Folder("s3://data/table?" + bucket.query, clock=FakeClock())
    bucket.refuse(1.0, 403)
    with raises(PermissionError, "AWS_ACCESS_KEY_ID"):
        store.open("part-0.parquet")
    assert bucket.refused == 1


# ---- wrong input


@pytest.mark.parametrize(
    ("uri", "disturbed", "facts"),
    MISTAKES["uri"],
)
def test_wrong_uris_are_refused_by_name(uri, disturbed, facts):
    with raises(ValueError, *facts):
        FileOpener(disturbed=disturbed).open_remote(uri)


# ---- trying again


def test_waits_double_and_no_attempt_begins_after_the_deadline():
    clock = FakeClock()
    retrier = Retrier(
        RetryPolicy(attempts=100, first_wait_s=2, longest_wait_s=4, deadline_s=10),
        clock,
        lambda: 0.0,
    )
    began = []

    def fail():
        began.append(clock.now())
        clock.time += 0.5
        raise TimeoutError("slow")

    with raises(DeliveryError, "part-3", "5 times", "9.5 s", "TimeoutError: slow"):
        retrier.call(fail, "part-3")
    assert began == [0, 1.5, 4, 6.5, 9]
    assert retrier.count() == {"retries": 4, "gave_up": 1, "throttled": 0}


def test_no_request_begins_while_the_store_throttles_another_one():
    clock = FakeClock()
    retrier = Retrier(RetryPolicy(attempts=1, first_wait_s=4), clock, lambda: 1.0)
    with raises(DeliveryError, "503"):
        retrier.call(lambda: (_ for _ in ()).throw(ThrottledError("HTTP status 503")), "part-3")
    assert retrier.call(clock.now, "part-4") == 4
    assert retrier.count() == {"retries": 0, "gave_up": 1, "throttled": 1}


# ---- the stored bytes of a row group, before it is decoded


def test_a_row_group_is_fetched_in_parts_at_once_and_decoded_without_its_store(folder, monkeypatch):
    monkeypatch.setattr(remote_files, "_PART_BYTES", 1 << 14)
    with closing(StoreFile(Folder(str(folder)).open(), None, ())) as file:
        chunk = file.metadata.row_group(3).column(1)
        begin = chunk.dictionary_page_offset
        begins = [*range(begin, begin + chunk.total_compressed_size, 1 << 14)]
        together, came, reserved, read = threading.Barrier(len(begins)), [], [], Store.read

        def fetch(self, key, source, offset, length):
            assert reserved == [chunk.total_compressed_size], "the memory is reserved before"
            came.append(offset)
            together.wait(60)
            return read(self, key, source, offset, length)

        monkeypatch.setattr(Store, "read", fetch)
        file.fetch_group(3, ["b"], reserved.append)
        assert sorted(came) == begins
        assert len(begins) > 2
        monkeypatch.setattr(Store, "read", lambda *_: pytest.fail("it was fetched"))
        assert file.read(3, ["b"]).equals(TABLE.select(["b"]).slice(15_000, 5_000))


def test_columns_that_lie_apart_are_fetched_without_those_between(tmp_path):
    values = pa.array(np.random.default_rng(2).random(4000))
    nested = pa.StructArray.from_arrays([values], ["x"])
    wide = pa.table({"a": values, "b": values, "c": nested})
    pq.write_table(wide, tmp_path / "part-0.parquet", use_dictionary=False, compression="none")
    with closing(StoreFile(Folder(str(tmp_path)).open(), None, ())) as file:
        chunks = [file.metadata.row_group(0).column(leaf) for leaf in range(3)]
        a, b, c = (
            (n.data_page_offset, n.data_page_offset + n.total_compressed_size) for n in chunks
        )
        assert file._ranges(0, ["a", "c"]) == file._ranges(0, ["c.x", "a"]) == [a, c]
        assert file._ranges(0, ["b", "a"]) == [(a[0], b[1])]
        assert file.read(0, ["a", "c"]).equals(wide.select(["a", "c"]))


def test_a_file_that_stays_away_is_named_with_the_attempts_and_what_allows_more(folder):
    clock = FakeClock()
    gone = Folder(str(folder), disturbed="error_rate=1&latency_ms=1000", clock=clock)
    with pytest.raises(
        DeliveryError,
        match=rf"{folder}/part-0\.parquet: opening: failed \d+ times within \d+\.\d s "
        r"\(allowed: 50 attempts, 90 s; for more, use FileOpener\(retry="
        r".*OSError: .*/part-0\.parquet: an error injected",
    ):
        gone.open()
    assert 80 < clock.time < 92
