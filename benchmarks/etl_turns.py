"""Runs turns of the ETL job and of minimal jobs in one Spark session. `benchmarks.etl` starts this program.

    python -m benchmarks.etl_turns --work DIR job:500000 rewrite:2000000 job:2000000

A turn is `kind:rows`. The rows have the Criteo shape. They are made once and kept in DIR.

  job      the complete job: fitting, applying, shuffling, sorting, writing, checking, committing
  rewrite  reads the same input and writes as many columns in the same layout, with the same shuffle and sort, but
           learns and applies nothing: Spark hashes columns to numbers
  rowwise  makes 13 logarithms and 26 hashed columns with a Python function per row, and writes nothing
  udf      the same with rows from Arrow batches instead of pickles
  columns  the same with our parser and operators on whole columns

`set:KEY=VALUE` between turns sets an option of the session, or `worker_mib`, the job's --worker-memory.

Each turn prints a line of JSON: seconds, CPU seconds of all processes by stage, and the peaks of resident memory so far
(JVM, Python driver, all Python workers together). The last line has all turns."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

from sluice.common.errors import UsageError
from sluice.common.program import run, say
from sluice.common.suggest import nearest
from sluice.etl.apply.features import Features, FileAssignment
from sluice.etl.apply.parse import Batches, InputParser
from sluice.etl.jobs.job import WORKER_BYTES, Job
from sluice.etl.jobs.job_run import run_job
from sluice.etl.jobs.progress import JobProgress
from sluice.etl.spark.engine import SparkEngine
from sluice.etl.spark.read_input import RawInput
from sluice.etl.spark.session import open_session
from sluice.etl.spec.spec import Spec
from sluice.etl.synth.criteo import CATEGORIES, INTEGERS
from sluice.etl.synth.raw_logs import synthesize
from sluice.etl.table.fitted_state import FittedState
from sluice.etl.table.store import TableStore

ROOT = Path(__file__).resolve().parent.parent
NAMES = ["label", *INTEGERS, *CATEGORIES]
HASHED = 100_000


def raw_of(work: Path, rows: int) -> Path:
    """Returns the input with so many rows. It is made on first use, completely or not at all."""
    path = work / f"rows-{rows}.tsv"
    if not path.exists():
        part = path.with_suffix(".part")
        synthesize(part, rows=rows, seed=1)
        part.rename(path)
    return path


class Tree:
    """Measures the processes of a session: CPU seconds and peaks of memory."""

    def __init__(self) -> None:
        self._me = psutil.Process()

    def _each(self) -> Iterator[tuple[str, psutil.Process]]:
        yield "driver", self._me
        for process in self._me.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                yield ("jvm" if process.name() == "java" else "workers"), process

    def cpu_s(self) -> float:
        """The CPU seconds of all processes. Those of ended children are in their parents' times."""
        total = 0.0
        for _, process in self._each():
            with contextlib.suppress(psutil.NoSuchProcess):
                t = process.cpu_times()
                total += t.user + t.system + t.children_user + t.children_system
        return total

    def peaks_mib(self) -> dict[str, int]:
        """The peaks of memory of the running processes, from the kernel."""
        found = {"jvm": 0, "driver": 0, "workers": 0}
        for kind, process in self._each():
            with contextlib.suppress(OSError, StopIteration):
                status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                found[kind] += (
                    int(next(line for line in status if line.startswith("VmHWM")).split()[1])
                    // 1024
                )
        return found


class Stages(JobProgress):
    """Collects the job's messages, and the CPU time of each stage."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(sys.stderr)
        self._tree = tree
        self.cpu: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        before = self._tree.cpu_s()
        with super().stage(name):
            yield
        self.cpu[name.split()[0]] = self._tree.cpu_s() - before


def job(
    spark: Any,
    raw: Path,
    out: Path,
    _rows: int,
    stages: Stages,
    *,
    worker_bytes: int = WORKER_BYTES,
) -> None:
    made = Job(
        spec=criteo(), inputs=(str(raw),), store=TableStore(str(out)), worker_bytes=worker_bytes
    )
    run_job(made, SparkEngine(spark, made, stages))


def criteo() -> Spec:
    return Spec.read(ROOT / "features/criteo.toml")


def rewrite(spark: Any, raw: Path, out: Path, rows: int, _stages: Stages) -> None:
    """Reads and writes in the job's layout, in Spark's own code."""
    from pyspark.sql import functions as sql

    spec = criteo()
    files = FileAssignment.of(spec, rows).total
    schema = ", ".join(
        ["label tinyint", *(f"{n} float" for n in INTEGERS), *(f"{n} string" for n in CATEGORIES)]
    )
    frame = spark.read.option("sep", "\t").schema(schema).csv(str(raw))
    columns = [
        sql.coalesce(sql.col("label"), sql.lit(0)).cast("tinyint").alias("label"),
        *[sql.coalesce(sql.col(n), sql.lit(0.0)).cast("float").alias(n) for n in INTEGERS],
        *[sql.hash(sql.col(n)).alias(n) for n in CATEGORIES],
    ]
    placed = frame.select(*columns, sql.xxhash64(*NAMES).alias("_key")).withColumn(
        "_file", sql.pmod("_key", sql.lit(files)).cast("int")
    )
    placed = (
        placed.repartitionById(files, "_file").sortWithinPartitions("_key").drop("_key", "_file")
    )
    placed.write.options(**parquet_options(spec.table.row_group_rows)).parquet(str(out))


def parquet_options(row_group_rows: int) -> dict[str, str]:
    """Returns the options with which Spark writes files as the job's: row groups of an exact size, without
    dictionaries, and with a checksum for each page."""
    return {
        "compression": "lz4_raw",
        "parquet.enable.dictionary": "false",
        "parquet.page.write-checksum.enabled": "true",
        "parquet.block.row.count.limit": str(row_group_rows),
        "parquet.block.size": str(2**31 - 1),
    }


def rowwise(
    spark: Any, raw: Path, _out: Path, _rows: int, _stages: Stages, arrow: bool = False
) -> None:
    from pyspark.sql import functions as sql

    made = sql.udf(_row, "array<double>", useArrow=arrow)
    lines = spark.read.option("lineSep", "\n").text(str(raw))
    lines.select(made("value")).write.format("noop").mode("overwrite").save()


def _row(line: str) -> list[float]:
    cells = line.split("\t")
    made = [float(cells[0])]
    for cell in cells[1:14]:
        made.append(math.log(max(int(cell or 0), -2) + 3))
    for cell in cells[14:]:
        made.append(float(zlib.crc32(cell.encode()) % HASHED + 2 if cell else 1))
    return made


def columns(spark: Any, raw: Path, _out: Path, _rows: int, _stages: Stages) -> None:
    text = (ROOT / "features/criteo.toml").read_text()
    categorify = '{op = "categorify", min_count = 4, max_size = 2000000, oov = 8}'
    spec = Spec.parse(text.replace(categorify, f'{{op = "hash", size = {HASHED}}}'))
    types = ", ".join(
        ["label tinyint", *(f"{n} float" for n in INTEGERS), *(f"{n} int" for n in CATEGORIES)]
    )
    made = RawInput(spark, spec, (str(raw),)).map(partial(_columns, spec), types)
    made.write.format("noop").mode("overwrite").save()


def _columns(spec: Spec, batches: Batches) -> Batches:
    parser, features = InputParser(spec), Features(spec, FittedState())
    for batch in batches:
        yield pa.record_batch(features.apply(parser.parse(batch).columns), NAMES)


KINDS = {
    "job": job,
    "rewrite": rewrite,
    "rowwise": rowwise,
    "udf": partial(rowwise, arrow=True),
    "columns": columns,
}


def turns(spark: Any, work: Path, asked: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Runs each turn, and removes what it wrote."""
    tree, kinds = Tree(), dict(KINDS)
    done = []
    for kind, word in asked:
        if kind == "set":
            key, _, value = word.partition("=")
            if key == "worker_mib":
                kinds["job"] = partial(job, worker_bytes=int(value) * 2**20)
            else:
                spark.conf.set(key, value)
            continue
        rows = int(word)
        raw = raw_of(work, rows)
        out = Path(tempfile.mkdtemp(prefix="sluice-turn-", dir=work))
        stages, start, cpu = Stages(tree), time.perf_counter(), tree.cpu_s()
        kinds[kind](spark, raw, out / "table", rows, stages)
        done.append(
            {
                "kind": kind,
                "rows": rows,
                "seconds": round(time.perf_counter() - start, 2),
                "cpu_s": round(tree.cpu_s() - cpu, 2),
                "peak_mib": tree.peaks_mib(),
                "stages_cpu_s": {k: round(v, 2) for k, v in stages.cpu.items()},
            }
        )
        say(f"{kind} of {rows:,} rows: {done[-1]}")
        shutil.rmtree(out)
    return done


def asked_of(words: list[str]) -> list[tuple[str, str]]:
    found = []
    for word in words:
        kind, _, what = word.partition(":")
        if kind not in KINDS and kind != "set":
            raise UsageError(f"{word!r}: unknown kind of turn{nearest(kind, KINDS)}")
        if kind != "set" and not (what.isdigit() and int(what)):
            raise UsageError(f"{word!r}: write kind:rows")
        found.append((kind, what))
    return found


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.etl_turns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("turns", nargs="+", metavar="KIND:ROWS")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for inputs, kept, and outputs, removed"
    )
    args = parser.parse_args(argv)
    asked = asked_of(args.turns)
    spark = open_session("sluice-bench")
    try:
        return {
            "turns": turns(spark, args.work, asked),
            "master": spark.sparkContext.master,
            "load": round(os.getloadavg()[0], 1),
        }
    finally:
        spark.stop()


if __name__ == "__main__":
    run(main)
