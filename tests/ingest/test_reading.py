"""A loader whose files lie in stores, misbehave, or are damaged."""

import dataclasses
import threading
import time
from collections import deque
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from sluice import Errors, Knobs
from sluice.ingest.read import remote_files
from sluice.ingest.read.range_files import ArrowFile
from tests.ingest import twin
from tests.ingest.s3 import with_bucket
from tests.open_loader import load_epoch, open_loader, quarantined_rows
from tests.product import (
    BatchLoader,
    Clock,
    DeliveryError,
    FileOpener,
    Position,
    Read,
    RetryPolicy,
    RowGroupReader,
    SourceError,
    WindowPart,
)
from tests.raises import raises
from tests.run_program import run_program

pytestmark = pytest.mark.slow

PATIENT = RetryPolicy(attempts=60, first_wait_s=0.001, longest_wait_s=0.01)


@pytest.fixture
def bucket(server, table, monkeypatch):
    """The table's files in a bucket, and the table that names them there."""
    files = with_bucket(server, monkeypatch)
    for file in table.files_of("train"):
        with (
            files.open_output_stream(f"data/{file.path.rpartition('/')[2]}") as out,
            open(file.path, "rb") as whole,
        ):
            out.write(whole.read())
    return dataclasses.replace(
        table,
        files=tuple(
            dataclasses.replace(f, path=f"s3://data/{f.path.rpartition('/')[2]}?{server.query}")
            for f in table.files
        ),
    )


@pytest.mark.parametrize("reader", ["arrow", "petastorm"])
def test_a_table_in_s3_is_read_as_a_local_one(table, bucket, reader):
    order, store = load_epoch(bucket, reader=reader)
    assert (order, {}) == load_epoch(table)
    assert store["reads"] > 10
    assert store["retries"] == 0


def test_a_store_that_refuses_for_good_is_never_quarantined(bucket, server, tmp_path):
    loader = open_loader(
        bucket,
        batch_size=80,
        errors=Errors(on_error="quarantine", max_rate=1, quarantine=tmp_path / "aside"),
        files=FileOpener(retry=RetryPolicy(attempts=2, first_wait_s=0.001)),
    )
    server.refuse(1)
    with loader, raises(SourceError, "s3://data/part", "2 times", 503) as caught:
        deque(loader, maxlen=0)
    assert isinstance(caught.value.__cause__, DeliveryError)
    assert loader.snapshot().throttled == server.refused > 0


def test_errors_and_short_reads_change_nothing(table, monkeypatch):
    files, whole, calls = (
        FileOpener(disturbed="error_rate=0.3", retry=PATIENT),
        ArrowFile.read,
        count(),
    )
    monkeypatch.setattr(
        ArrowFile, "read", lambda *at: whole(*at)[: None if next(calls) % 5 else -1]
    )
    order, store = load_epoch(table, files=files)
    assert order == load_epoch(table)[0]
    assert store["retries"] > 0


def test_a_loader_whose_store_does_not_answer_is_closed_at_once_and_leaves_no_thread(
    table, monkeypatch
):
    monkeypatch.setattr(remote_files, "_PART_BYTES", 512)  # a thread for each part
    waiting, sleep = threading.Semaphore(0), Clock.sleep
    monkeypatch.setattr(Clock, "sleep", lambda *given: (waiting.release(), sleep(*given)))
    files = FileOpener(disturbed="latency_ms=0")
    before = set(threading.enumerate())
    loader = open_loader(table, batch_size=80, files=files, knobs=Knobs(workers={"fetch": 2}))
    deque(loader, maxlen=0)
    files.faults.stall(3600)
    loader.pipeline.start(Position(), 1)
    for _ in range(4):  # more than there are workers
        assert waiting.acquire(timeout=60)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 2
    assert set(threading.enumerate()) <= before


GROUP = 2


def damaged(table, folder, place=""):
    """A table whose first file has a flipped bit in one row group."""
    first = table.files_of("train")[0]
    column = pq.read_metadata(first.path).row_group(GROUP).column(5)
    data = bytearray(Path(first.path).read_bytes())
    data[column.data_page_offset + column.total_compressed_size * 3 // 4] ^= 4
    (folder / "harmed.parquet").write_bytes(data)
    harmed = dataclasses.replace(first, path=f"{place}{folder}/harmed.parquet")
    return dataclasses.replace(table, files=tuple(harmed if f is first else f for f in table.files))


class TestDamage:
    @pytest.mark.parametrize(
        ("reader", "place"), [("arrow", ""), ("petastorm", ""), ("arrow", "latency://0ms")]
    )
    def test_a_damaged_row_group_is_quarantined_and_all_other_rows_stay_in_their_places(
        self, table, reader, place, tmp_path
    ):
        harmed, path = damaged(table, tmp_path, place), tmp_path / "aside"
        data = twin.Table(table.files_of("train"))
        with open_loader(
            harmed,
            batch_size=80,
            epochs=2,
            errors=Errors(on_error="quarantine", quarantine=path),
            last="pad",
            reader=reader,
        ) as loader:
            for epoch in range(2):
                for batch, rows in zip(loader, twin.batches(loader.plan, epoch), strict=True):
                    lost = np.array([row is not None and row[:2] == (0, GROUP) for row in rows])
                    real = np.array([row is not None for row in rows])
                    np.testing.assert_array_equal(batch.weight.numpy(), (real & ~lost).astype("f4"))
                    np.testing.assert_array_equal(
                        batch.label.numpy()[~lost], data.column("label", rows)[~lost]
                    )
            summary = loader.quarantined
        lines = quarantined_rows(path)
        assert {(x["file"], x["row_group"]) for x in lines} == {
            (harmed.files_of("train")[0].path, GROUP)
        }
        assert summary["rows_set_aside"] == len(lines) == len(data.groups[0, GROUP]["label"])

    def test_ranks_stay_even_although_rows_of_one_are_set_aside(self, table, tmp_path):
        harmed, steps, aside = damaged(table, tmp_path), [], []
        for rank in range(2):
            with BatchLoader(
                harmed,
                batch_size=80,
                rank=rank,
                ranks=2,
                errors=Errors(
                    on_error="quarantine", max_rate=1, quarantine=tmp_path / f"aside{rank}"
                ),
            ) as loader:
                batches = [(batch.rows, int((batch.weight == 0).sum())) for batch in loader]
            assert {rows for rows, _ in batches} == {40}, "every batch has its shape"
            steps.append(len(batches))
            aside.append(sum(zeros for _, zeros in batches))
        assert steps[0] == steps[1] == len(loader)
        assert aside[0] != aside[1], "they did not lose the same number of rows"

    def test_a_bit_flipped_on_the_way_is_found(self, table):
        """The disturbed store, which bench and the demo use as well."""
        whole, files = table.files_of("train")[0], FileOpener(disturbed="latency_ms=0")
        whole = dataclasses.replace(whole, path=f"latency://0ms{whole.path}")
        groups = RowGroupReader([whole], ("I1",), opened=files)
        files.faults.corrupt = "part-"
        with raises(SourceError, "part-00000.parquet", "row group 0"):
            groups.read(Read(0, 0, whole.row_group_rows[0], (WindowPart(0, 0, 0, 1),)))
        assert files.faults.corrupt is None
        groups.close()


_MUTATE = """
import os, random, sys
from sluice.etl.schema import DataFile
from sluice.ingest.errors import LoaderError, SourceError
from sluice.ingest.loader import BatchLoader
from sluice.ingest.read.sources import Reading
from sluice.ingest.columns import ColumnError
from sluice.ingest.read.parquet_files import ParquetError
from sluice.ingest.row_order import PlanError

good = open(sys.argv[1], "rb").read()
path = os.path.join(sys.argv[2], "mutated.parquet")
chance, refused, read = random.Random(7), 0, 0
for n in range(300):
    data = bytearray(good)
    kind = n % 4
    if kind == 0:  # the footer
        for _ in range(chance.randint(1, 4)):
            data[-chance.randint(1, min(4000, len(data)))] = chance.randrange(256)
    elif kind == 1:  # anywhere
        for _ in range(chance.randint(1, 30)):
            data[chance.randrange(len(data))] = chance.randrange(256)
    elif kind == 2:  # cut short
        del data[chance.randrange(len(data)):]
    else:  # a series of zeros
        at = chance.randrange(len(data))
        data[at:at + 500] = bytes(len(data[at:at + 500]))
    with open(path, "wb") as file:
        file.write(data)
    try:
        with BatchLoader([path], batch_size=80, reading=Reading(reader="arrow"),
                         roles={"label": "label", "dense": "I*", "sparse": "C*"}) as loader:
            for batch in loader:
                read += 1
    except (SourceError, ParquetError, ColumnError, PlanError, LoaderError) as error:
        assert "mutated.parquet" in str(error) or isinstance(error, (PlanError, ColumnError)), repr(error)
        refused += 1
print(refused, read)
"""


def test_three_hundred_mutated_files_give_our_errors_only_and_the_process_lives(table, tmp_path):
    done = run_program("-c", _MUTATE, table.files_of("train")[0].path, tmp_path, check=True)
    refused, read = map(int, done.stdout.split())
    assert refused > 200
    assert read > 0, "some came out unharmed"
