"""Several attempts may write one file. Only the files of successful attempts are published."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.etl.spark import write
from sluice.etl.spark.workers.row_file import local_folders
from tests.etl.jobs import build_table, run
from tests.etl.tables import column, put, write_spec
from tests.product import FileAssignment, Spec, TableStore, new_job, vacuum

TEXT = write_spec(
    "label:int I1:int",
    column("I1", "dense", "fill, value = 0"),
    form="tsv",
    table="row_group_rows = 100\nfile_rows = 300\nsplit = {train = 0.5, test = 0.5}",
)


LINES = "".join(f"{n % 2}\t{n}\n" for n in range(900))


def cells_of(files: int) -> list[pa.RecordBatch]:
    """The cells of two tasks, as they are shuffled."""
    draw = np.random.default_rng(1)
    cells, rows = [], 2000
    for _ in range(2):
        columns = [
            pa.array(np.zeros(rows, np.int8)),
            pa.array(draw.random(rows).astype(np.float32)),
            pa.array(draw.integers(-(2**62), 2**62, rows)),
        ]
        batch = pa.record_batch(columns, ["label", "I1", "_key"])
        cells += write._in_cells([(batch, draw.integers(0, files, rows).astype(np.int32))], files)
    return cells


def test_attempts_have_files_of_their_own_and_only_one_of_them_stays(tmp_path, monkeypatch):
    store, job = TableStore(tmp_path), new_job()
    placement = FileAssignment(Spec.own(TEXT), (1, 2))
    cells = cells_of(placement.total)
    made = []
    for file in range(placement.total):
        mine = [
            pa.record_batch([[file], [cell]], schema=batch.schema)
            for batch in cells
            for number, cell in zip(
                batch["file"].to_pylist(), batch["cell"].to_pylist(), strict=True
            )
            if number == file
        ]
        assert len(mine) == 2  # a cell of each task
        for attempt in (10 + file, 20 + file):  # the second one is speculative, and wins
            task = SimpleNamespace(taskAttemptId=lambda attempt=attempt: attempt)
            monkeypatch.setattr("pyspark.TaskContext.get", lambda task=task: task)
            batches = write._write_file(placement, store.uri, job, iter(mine))
            (text,) = [batch["made"][0].as_py() for batch in batches]
        made.append(write._read_file(text))
    cut = tmp_path / "data" / job / "split=train" / "part-00000-30.parquet"
    cut.write_bytes(b"PAR1")  # this attempt was killed
    assert len(store.files("data")) == 7
    won = made[0].record.path
    rows = [
        pq.read_table(tmp_path / path, partitioning=None)
        for path in (won, won.replace("-20.parquet", "-10.parquet"))
    ]
    assert rows[0].equals(rows[1])
    write._remove_others(store, job, made)
    assert store.files("data") == sorted(file.record.path for file in made)
    assert [file.record.path.rpartition("/")[2] for file in made] == [
        f"part-0000{file}-2{file}.parquet" for file in range(3)
    ]
    assert sum(file.record.rows for file in made) == 4000
    assert [file.record.row_group_rows[:-1] for file in made] == [
        (100,) * (len(file.record.row_group_rows) - 1) for file in made
    ]
    assert list(write._write_file(placement, store.uri, job, iter([]))) == []  # a file without rows


@pytest.mark.spark
def test_a_job_leaves_no_parsed_rows_on_the_executors_disk(spark, tmp_path):
    """Spark removes its folders when the executor ends. In a long session, other jobs need the space before."""

    def stored() -> set[str]:
        tasks = spark.sparkContext.parallelize([0], 1)
        ((*folders,),) = tasks.map(lambda _: local_folders()).collect()
        return {str(path) for folder in folders for path in Path(folder).glob("sluice-rows-*")}

    before = stored()
    run(spark, tmp_path / "t", put(tmp_path / "in.tsv", LINES), text=TEXT)
    assert stored() == before


@pytest.mark.spark
def test_a_file_that_an_attempt_leaves_late_is_not_published_and_vacuum_removes_it(
    spark, tmp_path, monkeypatch
):
    late: list[str] = []
    real = write._remove_others

    def leave_one(store: TableStore, job: str, files: list) -> None:
        real(store, job, files)
        path = files[0].record.path.replace(".parquet", "9.parquet")
        shutil.copy(store.path(files[0].record.path), store.path(path))
        late.append(path)

    monkeypatch.setattr(write, "_remove_others", leave_one)
    table = build_table(spark, tmp_path / "t", put(tmp_path / "in.tsv", LINES), text=TEXT)
    assert table.rows == 900
    assert late[0] not in [str(Path(file.path).relative_to(tmp_path / "t")) for file in table.files]
    (problem,) = table.check()
    assert late[0] in problem
    assert "orphan" in problem
    assert vacuum(TableStore(table.uri), keep=1, now=2e9).files == (late[0],)
    assert table.check() == []
