"""The ETL job beside what must be done at least: `python -m benchmarks.etl --rows 500000 2000000`.

For each size, in one Spark session whose start is not counted, and one after the other, several times over:

  rewrite   the same session reads the same input and writes as many columns in the same layout, with the same
            shuffle by row and sort within files, but learns and applies nothing: columns are hashed to numbers by Spark
  job       the whole job: fitting, applying, shuffling, sorting, writing, checking, committing
  pandas, polars, duckdb, python
            vocabularies, ids and dense columns of the same spec, written to one Parquet file, in one process, where
            installed (the Python loop on at most 50,000 rows, and scaled); none of them shuffles, splits or publishes

Times are wall-clock; CPU is that of the process tree. One core's rate = rows / CPU seconds of fitting and applying.
The last line is JSON."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from etl.build import Job
from etl.progress import Progress
from etl.rawlog import synthesize
from etl.session import open_session
from etl.spec import Spec
from etl.store import Store
from etl.synthetic import CATEGORIES, INTEGERS
from etl.write import parquet_options

ROOT = Path(__file__).resolve().parent.parent
NAMES = ["label", *INTEGERS, *CATEGORIES]
HASHED = {"C3": 100_000, "C12": 100_000, "C21": 50_000}
_LOOP_ROWS = 50_000


def cpu_s() -> float:
    """Of this process and all its descendants, those that ended included where the kernel says so."""
    me = psutil.Process()
    total = 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            t = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += t.user + t.system + t.children_user + t.children_system
    return total


def timed(work: Callable[[], Any]) -> dict[str, float]:
    start, cpu = time.perf_counter(), cpu_s()
    work()
    return {"seconds": time.perf_counter() - start, "cpu_seconds": cpu_s() - cpu}


def rewrite(spark: Any, raw: Path, out: Path, spec: Spec, rows: int) -> None:
    """Reads and writes in the job's layout, in Spark's own code."""
    from pyspark.sql import functions as sql

    from etl.features import Placement

    files = Placement.of(spec, rows).total
    schema = ", ".join(["label tinyint", *(f"{n} float" for n in INTEGERS), *(f"{n} string" for n in CATEGORIES)])
    frame = spark.read.option("sep", "\t").schema(schema).csv(str(raw))
    key = sql.xxhash64(*NAMES)
    columns = [sql.coalesce(sql.col("label"), sql.lit(0)).cast("tinyint").alias("label"),
               *[sql.coalesce(sql.col(n), sql.lit(0.0)).cast("float").alias(n) for n in INTEGERS],
               *[sql.hash(sql.col(n)).alias(n) for n in CATEGORIES]]
    placed = frame.select(*columns, key.alias("_key")).withColumn("_file", sql.pmod("_key", sql.lit(files)).cast("int"))
    placed = placed.repartitionById(files, "_file").sortWithinPartitions("_key").drop("_key", "_file")
    placed.write.options(**parquet_options(spec.table.row_group_rows)).parquet(str(out))


class Stages(Progress):
    """The job's own words, and the CPU time of each stage."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.cpu: dict[str, float] = {}

    def stage(self, name: str) -> Any:
        import contextlib

        @contextlib.contextmanager
        def counted() -> Any:
            before = cpu_s()
            with super(Stages, self).stage(name):
                yield
            self.cpu[name.split()[0]] = cpu_s() - before
        return counted()


def whole_job(spark: Any, raw: Path, out: Path, spec: Spec, stages: Stages) -> None:
    Job(spec=spec, inputs=(str(raw),), store=Store(out)).run(spark, stages)


def with_pandas(raw: Path, out: Path) -> None:
    import numpy as np
    import pandas as pd

    frame = pd.read_csv(raw, sep="\t", names=NAMES, engine="pyarrow",
                        dtype={**dict.fromkeys(INTEGERS, "float64"), **dict.fromkeys(CATEGORIES, "string")})
    made = {"label": frame["label"].astype("int8")}
    for n in INTEGERS:
        made[n] = np.log(frame[n].fillna(0).clip(lower=-2) + 3).astype("float32")
    for n in CATEGORIES:
        if n in HASHED:
            hashed = pd.util.hash_array(frame[n].fillna("").to_numpy(dtype=object))
            made[n] = pd.Series((hashed % HASHED[n] + 2).astype("int32"))
            continue
        counts = frame[n].value_counts()
        kept = counts[counts >= 4].index
        made[n] = frame[n].map(pd.Series(range(10, 10 + len(kept)), kept)).fillna(2).astype("int32")
    pd.DataFrame(made).to_parquet(out, compression="lz4", index=False)


def with_polars(raw: Path, out: Path) -> None:
    import polars as pl

    schema = {"label": pl.Int8, **dict.fromkeys(INTEGERS, pl.Int64), **dict.fromkeys(CATEGORIES, pl.String)}
    frame = pl.scan_csv(raw, separator="\t", has_header=False, schema=schema)
    made = [pl.col("label"), *[(pl.col(n).fill_null(0).clip(lower_bound=-2) + 3).log().cast(pl.Float32)
                               for n in INTEGERS]]
    whole = frame.collect()
    for n in CATEGORIES:
        if n in HASHED:
            made.append((pl.col(n).hash() % HASHED[n] + 2).cast(pl.Int32))
            continue
        kept = whole[n].drop_nulls().value_counts(sort=True).filter(pl.col("count") >= 4)[n]
        made.append(pl.col(n).replace_strict(kept, range(10, 10 + len(kept)), default=2, return_dtype=pl.Int32))
    whole.select(made).write_parquet(out, compression="lz4")


def with_duckdb(raw: Path, out: Path) -> None:
    import duckdb

    types = {"label": "TINYINT", **dict.fromkeys(INTEGERS, "BIGINT"), **dict.fromkeys(CATEGORIES, "VARCHAR")}
    db = duckdb.connect()
    db.execute(f"create table raw as from read_csv('{raw}', delim='\t', header=false, columns={types})")
    made, joins = ["label", *[f"ln(greatest(coalesce({n}, 0), -2) + 3)::float as {n}" for n in INTEGERS]], []
    for n in CATEGORIES:
        if n in HASHED:
            made.append(f"(hash(raw.{n}) % {HASHED[n]} + 2)::int as {n}")
            continue
        db.execute(f"create table v_{n} as select {n}, row_number() over (order by count(*) desc, {n}) + 9 as id "
                   f"from raw where {n} is not null group by {n} having count(*) >= 4")
        made.append(f"coalesce(v_{n}.id, 2)::int as {n}")
        joins.append(f"left join v_{n} on raw.{n} = v_{n}.{n}")
    db.execute(f"copy (select {', '.join(made)} from raw {' '.join(joins)}) to '{out}' (format parquet)")


def with_python(raw: Path, _out: Path) -> None:
    """Row by row, on the first rows."""
    with open(raw, newline="") as file:
        rows = [row for row, _ in zip(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), range(_LOOP_ROWS),
                                      strict=False)]
    ids = []
    for i in range(14, 40):
        counts = Counter(row[i] for row in rows if row[i])
        ids.append({v: 10 + k for k, (v, c) in enumerate(counts.most_common()) if c >= 4})
    for row in rows:
        [math.log(max(float(row[i] or 0), -2) + 3) for i in range(1, 14)]
        [ids[i - 14].get(row[i], 2) for i in range(14, 40)]


ARMS = {"pandas": with_pandas, "polars": with_polars, "duckdb": with_duckdb, "python": with_python}


def arm(name: str, raw: Path, out: Path, rows: int) -> dict[str, Any]:
    """One equivalent in a process of its own, whose peak memory is its own."""
    if name != "python" and importlib.util.find_spec(name) is None:
        return {"skipped": f"{name} is not installed here"}
    code = ("import resource, sys, time; from pathlib import Path; from benchmarks.etl import ARMS;"
            f"t = time.perf_counter(); ARMS[{name!r}](Path({str(raw)!r}), Path({str(out)!r}));"
            "print(time.perf_counter() - t, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1]}
    seconds, peak = map(float, done.stdout.split())
    if name == "python":
        seconds *= rows / min(rows, _LOOP_ROWS)
    return {"seconds": round(seconds, 2), "rows_per_s": round(rows / seconds), "peak_mib": round(peak / 1024)}


def measure(spark: Any, rows: int, repeats: int, arms: list[str]) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="sluice-bench-"))
    try:
        raw, spec = folder / "raw.tsv", Spec.read(ROOT / "features/criteo.toml")
        synthesize(raw, rows=rows, seed=1)
        rewrites, jobs, stages = [], [], Stages()
        for turn in range(repeats):
            rewrites.append(timed(lambda: rewrite(spark, raw, folder / f"w{turn}", spec, rows)))  # noqa: B023
            jobs.append(timed(lambda: whole_job(spark, raw, folder / f"t{turn}", spec, stages)))  # noqa: B023
        job, least = (statistics.median(r["seconds"] for r in runs) for runs in (jobs, rewrites))
        found: dict[str, Any] = {
            "rows": rows, "job_seconds": round(job, 2), "rewrite_seconds": round(least, 2),
            "job_over_rewrite": round(job / least, 2), "rows_per_s": round(rows / job),
            "job_cpu_seconds": round(statistics.median(r["cpu_seconds"] for r in jobs), 2),
            "fit_rows_per_s_a_core": round(rows / stages.cpu["fitting"]),
            "write_rows_per_s_a_core": round(rows / stages.cpu["writing"]),
            "fit_and_apply_rows_per_s_a_core": round(rows / (stages.cpu["fitting"] + stages.cpu["writing"]))}
        return found | {name: arm(name, raw, folder / f"{name}.parquet", rows) for name in arms}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[500_000, 2_000_000],
                        help="sizes (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, interleaved (default: %(default)s)")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS), help="equivalents to run")
    args = parser.parse_args()
    spark = open_session("sluice-bench")
    try:
        results = []
        for rows in args.rows:
            results.append(measure(spark, rows, args.repeats, args.arms))
            print(json.dumps(results[-1], indent=1), file=sys.stderr, flush=True)
    finally:
        spark.stop()
    print(json.dumps({"cores": psutil.cpu_count(), "load": psutil.getloadavg()[0], "results": results}))


if __name__ == "__main__":
    main()
