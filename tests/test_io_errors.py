"""A disk that answers with EIO, at each reader and writer: its message, what survives, that nothing is half written."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.small_table import small_table
from sluice import FeatureTable
from sluice.dlrm.checkpoint.meta import check
from sluice.etl.jobs.engine import os_errors_as_job_failure
from sluice.ingest.read.parquet_files import ParquetError
from tests.dlrm.rig import META, Alone
from tests.dlrm.test_checkpoint import parts_of
from tests.etl.jobs import run
from tests.etl.tables import write_rows
from tests.io_errors import fail_from_now_on, is_known, struck
from tests.product import (
    CheckpointError,
    Checkpoints,
    JobFailure,
    ParquetFiles,
    PinKeeper,
    RowGroupReader,
    SourceError,
    TableError,
    latest,
)
from tests.raises import assert_names, raises

pytestmark = pytest.mark.skipif(
    not is_known, reason="the numbers of the system's calls are those of x86-64"
)
READ, WRITE, SYNC = (
    ("read", "pread64", "readv"),
    ("write", "pwrite64", "writev"),
    ("fsync", "fdatasync"),
)
NAME = ("rename", "renameat", "renameat2", "link", "linkat")
WRITES = pytest.mark.parametrize("calls", [WRITE, SYNC, NAME], ids=["write", "sync", "rename"])
SPEC = """
[input]
format = "parquet"
columns = ["click:int", "item:text"]
[table]
split = {all = 1.0}
[[column]]
name = "click"
role = "label"
[[column]]
name = "item"
role = "sparse"
ops = [{op = "categorify"}]
"""


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return small_table(
        tmp_path_factory.mktemp("table") / "clicks", rows=5000, files=3, row_group_rows=256
    )


@pytest.fixture
def rows(tmp_path):
    (tmp_path / "in").mkdir()
    write_rows(
        tmp_path / "in" / "0.parquet",
        row_group_size=100,
        click=np.arange(400) % 2,
        item=[f"i{n % 30}" for n in range(400)],
    )
    return tmp_path / "in"


def test_a_row_group_that_cannot_be_read_is_named(table):
    file = table.files_of("train")[0]
    groups = RowGroupReader([file], [field.name for field in table.stored if field.role == "dense"])
    before = groups.decoded(0, 0)
    error = struck(lambda: groups.decoded(0, 1), "pread64")
    assert isinstance(error, SourceError), error
    assert str(error).startswith(f"{file.path}, row group 1: ")
    assert "Input/output error" in str(error)
    assert groups.decoded(0, 0).equals(before)  # the file is opened anew
    groups.close()


def test_a_table_or_a_folder_that_cannot_be_read_is_named_with_what_to_do(table, rows):
    error = struck(lambda: FeatureTable.open(table.uri), *READ)
    assert isinstance(error, TableError), error
    assert_names(str(error), "Input/output error", "disk or store")
    ParquetFiles.open(rows, "label=click;sparse=item")  # imports
    error = struck(lambda: ParquetFiles.open(rows, "label=click;sparse=item"), *READ)
    assert isinstance(error, ParquetError), error
    assert f"{rows}/0.parquet: " in str(error)
    assert "Input/output error" in str(error)


@pytest.mark.parametrize(
    "calls", [READ, WRITE, SYNC, NAME], ids=["read", "write", "sync", "rename"]
)
def test_a_job_on_such_a_disk_publishes_nothing_and_the_version_before_stays(rows, tmp_path, calls):
    run(None, tmp_path / "t", rows, text=SPEC)
    before = FeatureTable.open(tmp_path / "t")

    def job():
        with os_errors_as_job_failure():
            run(None, tmp_path / "t", rows, text=SPEC, mode="append")

    error = struck(job, *calls)
    assert isinstance(error, Exception), "it went through"
    assert "Input/output error" in str(error)
    assert "\n" not in str(error)
    if isinstance(error, JobFailure):
        assert "nothing was published" in str(error)
    after = FeatureTable.open(tmp_path / "t")
    assert (after.version, after.files) == (before.version, before.files)
    assert after.check() == []
    run(None, tmp_path / "t", rows, text=SPEC, mode="append")  # once the disk works again
    assert FeatureTable.open(tmp_path / "t").rows == 2 * before.rows


def test_a_job_that_may_not_use_a_file_names_its_input_too():
    with raises(JobFailure, "No", "input", "output", "TMPDIR"), os_errors_as_job_failure():
        raise PermissionError(13, "No")


@WRITES
def test_a_pin_costs_a_line(table, calls):
    lines: list[str] = []

    def pin():
        with PinKeeper("reader", lines.append) as keeper:
            keeper.take(table.uri, 0)

    assert struck(pin, *calls) is None
    assert len(lines) == 1
    assert_names(lines[0], "pinned", "Input/output error")


@WRITES
def test_a_checkpoint_that_cannot_be_written_keeps_the_last_good_one(tmp_path, calls):
    def save(step: int, *strike: str) -> None:
        if strike:
            fail_from_now_on(*strike)  # the thread that writes is started by the first save
        checkpoints = Checkpoints(
            tmp_path, parts_of(lambda: {"weight": torch.ones(3)}), Alone(), keep=2
        )
        try:
            checkpoints.save(replace(META, step=step))
            checkpoints.wait()
        finally:
            checkpoints.close()

    save(1)
    error = struck(lambda: save(2, *calls))
    assert isinstance(error, CheckpointError), error
    assert f"{tmp_path}/step-000000002" in str(error)
    assert "Input/output error" in str(error)
    path, meta = latest(tmp_path)[:2]
    assert meta.step == 1
    check(path)
    assert os.listdir(tmp_path) != []
    save(3)
    assert latest(tmp_path)[1].step == 3
