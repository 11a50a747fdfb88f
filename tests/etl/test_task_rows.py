"""Spark's workers read text themselves: each task has some ranges of files, and stores its rows in a file."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pyarrow.fs as pafs
import pytest

from sluice.etl.read.input_files import pieces_of_task
from sluice.etl.read.pieces import OPEN_BYTES, split_into_tasks
from sluice.etl.spark import read_input
from tests.etl.jobs import build_table, spark_settings
from tests.etl.tables import column, lines_in, put, write_spec
from tests.etl.test_build import content
from tests.ingest.s3 import KEYS, S3Server
from tests.product import RawInput, files_of

TEXT = write_spec(
    "label:int I1:int C1:text",
    column("C1", "sparse", "categorify, oov = 2"),
    form="tsv",
    table="split = {train = 0.8, test = 0.2}",
)


def write_lines(folder: Path) -> list[str]:
    """Writes files of lines, of which one is compressed. Returns all lines."""
    every = []
    for number in range(3):
        rows = [f"{n % 2}\t{number}\t{'x' * (n % 7)}{n}\n" for n in range(50)]
        every += rows
        if number == 1:
            put(folder / f"{number}.tsv.gz", gzip.compress("".join(rows).encode()))
        else:
            put(folder / f"{number}.tsv", "".join(rows))
    return every


@pytest.mark.parametrize(
    ("size", "cores", "most"), [(0, 4, 4), (76, 8, 10), (76, 1, 64), (54, 1, 58), (60, 1, 64)]
)
def test_a_task_has_a_cores_share_and_no_more_than_spark_allows(monkeypatch, size, cores, most):
    """Of one file, in MiB. Each file counts for as much as it costs to open it."""
    conf = SimpleNamespace(filesMaxPartitionBytes=lambda: 64 << 20)
    session = SimpleNamespace(sessionState=lambda: SimpleNamespace(conf=lambda: conf))
    context = SimpleNamespace(defaultParallelism=cores)
    files = SimpleNamespace(bytes=size << 20, files=[0], tasks=lambda most: most)
    monkeypatch.setattr(read_input, "number_tasks", lambda _, tasks: tasks)
    spark = SimpleNamespace(_jsparkSession=session, sparkContext=context)
    assert RawInput(spark, None, files, 0, {}, ())._tasks == most << 20


@pytest.mark.parametrize("task_bytes", [1, 7, 100, 10_000, 2 * OPEN_BYTES + 2000, 1 << 30])
def test_each_line_belongs_to_one_task_in_the_order_of_the_input(tmp_path, task_bytes):
    every = write_lines(tmp_path / "in")
    tasks = split_into_tasks(files_of([str(tmp_path / "in")]), task_bytes)
    read = [
        (piece.part, line.as_py().decode())
        for task in tasks
        for piece in pieces_of_task(task)
        for batch in piece.batches()
        for line in batch["line"]
    ]
    assert [line for _, line in read] == every
    assert read == sorted(read, key=lambda pair: pair[0])
    assert sum(piece.file.path.endswith(".gz") for task in tasks for piece in task) == 1
    if task_bytes == 1 << 30:
        assert [len(task) for task in tasks] == [3]
    elif task_bytes > OPEN_BYTES:
        assert [len(task) for task in tasks] == [2, 1]


@pytest.mark.spark
def test_tasks_read_what_threads_read_with_the_same_rejects(spark, tmp_path):
    """Rows are split by their places in the input."""
    write_lines(tmp_path / "in")
    with (tmp_path / "in" / "0.tsv").open("a") as file:
        file.write("2\tx\n\n1\t5\tlast")
    text = TEXT.replace("[input]", '[input]\nplace = "place"').replace(
        "split = {train = 0.8, test = 0.2}",
        'split_time = "place"\nsplit = {train = -inf, test = 0.8}',
    )
    tables, rejects = [], []
    with spark_settings(spark, files_maxPartitionBytes="300"):
        for name, engine in (("tasks", spark), ("threads", None)):
            folder = tmp_path / f"{name}-rejects"
            options = {"text": text, "rejects": str(folder), "max_rejects": 0.5}
            tables.append(build_table(engine, tmp_path / name, tmp_path / "in", **options))
            rejects.append(sorted(map(json.dumps, lines_in(folder))))
    assert [json.loads(reject)["line"] for reject in rejects[0]] == [51]
    assert rejects[0] == rejects[1]
    assert tables[0].record.state == tables[1].record.state
    assert content(tables[0]) == content(tables[1])


@pytest.mark.spark
def test_spark_reads_a_bucket(spark, tmp_path, monkeypatch):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    write_lines(tmp_path / "in")
    server = S3Server()
    try:
        bucket = pafs.S3FileSystem(
            endpoint_override=server.address, scheme="http", allow_bucket_creation=True
        )
        bucket.create_dir("logs")
        pafs.copy_files(str(tmp_path / "in"), "logs/in", destination_filesystem=bucket)
        name = f"s3://test:test@logs/in/*?{server.query}"
        remote = build_table(spark, tmp_path / "remote", name, text=TEXT)
    finally:
        server.close()
    near = build_table(spark, tmp_path / "near", tmp_path / "in", text=TEXT)
    assert (remote.fingerprint, remote.rows) == (near.fingerprint, near.rows)
    assert remote.record.state == near.record.state
