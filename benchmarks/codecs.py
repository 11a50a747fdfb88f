"""What a shard's format costs: codec × encoding × rows a row group × layout of bags, on tables of our own specs.

    python -m benchmarks.codecs --work DIR [criteo] [sessions]

The job makes each table once; Spark then writes its rows again from memory, in two files, once for each format.
Columns: bytes a row; seconds to write all rows; rows a second that the loader's reader decodes with page checksums
verified, its tables dropped: the best of 1, 2 and 4 threads, formats taking turns, medians over the rounds; and bare,
without checksums. Formats already measured are in DIR/results.jsonl and not measured again. The last line is JSON."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.etl import submit_words
from benchmarks.etl_turns import ROOT, parquet_options, raw_of
from benchmarks.results import Results, table
from sluice.common.program import run, say
from sluice.etl.jobs.job import Job
from sluice.etl.jobs.job_run import run_job
from sluice.etl.jobs.progress import JobProgress
from sluice.etl.schema import DataFile
from sluice.etl.spark.engine import SparkEngine
from sluice.etl.spark.session import open_session
from sluice.etl.spec.spec import Spec
from sluice.etl.synth.other_shapes import synthesize_shape
from sluice.etl.table.store import TableStore
from sluice.ingest.read.reader import RowGroupReader
from sluice.ingest.read.sources import source_of
from sluice.tools.decode_limit import decode_rows_per_s

ROWS = {"criteo": 1_000_000, "sessions": 400_000}
CODECS = ("uncompressed", "snappy", "lz4_raw", "zstd")
GROUPS = (16_384, 65_536, 131_072, 262_144)
USUAL = 32_768


@dataclass(frozen=True, kw_only=True)
class Format:
    """One way to write a table."""

    table: str
    bags: str
    """`bytes` or `lists`; `-` where there are none."""
    codec: str
    dictionary: bool
    group_rows: int = USUAL

    @property
    def options(self) -> dict[str, str]:
        return {
            **parquet_options(self.group_rows),
            "compression": self.codec,
            "parquet.enable.dictionary": str(self.dictionary).lower(),
        }


def formats(name: str) -> list[Format]:
    """All codecs and encodings at the usual row groups; other row groups for the default and for zstd."""
    layouts = ("bytes", "lists") if name == "sessions" else ("-",)
    found = [
        Format(table=name, bags=bags, codec=codec, dictionary=dictionary)
        for bags in layouts
        for codec in CODECS
        for dictionary in (False, True)
    ]
    if name == "criteo":
        found += [
            Format(table=name, bags="-", codec=codec, dictionary=codec == "zstd", group_rows=rows)
            for codec in ("lz4_raw", "zstd")
            for rows in GROUPS
        ]
    return found


def made(spark: Any, work: Path, name: str, bags: str, rows: int) -> Path:
    """The Parquet files of a table that the job made."""
    home = work / f"codecs-{name}-{rows}-{bags.strip('-')}"
    if not home.exists():
        text = (ROOT / f"features/{name}.toml").read_text()
        if name == "criteo":
            raw = raw_of(work, rows)
        else:
            raw = work / f"{name}-{rows}.json"
            synthesize_shape(name, raw, rows=rows, seed=1)
        if bags == "lists":
            text = text.replace("[table]", "[table]\nplain_lists = true", 1)
        part = home.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        job = Job(spec=Spec.parse(text), inputs=(str(raw),), store=TableStore(str(part)))
        run_job(job, SparkEngine(spark, job, JobProgress(sys.stderr)))
        part.rename(home)
    return home / "data"


def written(spark: Any, work: Path, form: Format, rows: int) -> tuple[Path, float]:
    """The table in another format, and how long that took. Rows come from memory."""
    source = made(spark, work, form.table, form.bags, rows)
    frame = (
        spark.read.option("recursiveFileLookup", "true").parquet(str(source)).coalesce(2).persist()
    )
    frame.count()
    out = work / "codecs-out" / "-".join(map(str, asdict(form).values()))
    shutil.rmtree(out, ignore_errors=True)
    seconds = []
    for _ in range(2):  # the first also compiles
        start = time.perf_counter()
        frame.write.mode("overwrite").options(**form.options).parquet(str(out))
        seconds.append(time.perf_counter() - start)
    return out, min(seconds)


def files_of(folder: Path) -> list[DataFile]:
    return [
        DataFile(path=str(path), rows=pq.read_metadata(path).num_rows, bytes=path.stat().st_size)
        for path in sorted(folder.rglob("*.parquet"))
    ]


def decoded(folder: Path, seconds: float, threads: tuple[int, ...]) -> float:
    """Rows a second of the loader's reader."""
    files = files_of(folder)
    groups = RowGroupReader(files, pq.read_schema(files[0].path).names)
    try:
        return max(
            decode_rows_per_s(source_of("arrow", groups), groups, n, seconds) for n in threads
        )
    finally:
        groups.close()


def bare(folder: Path, seconds: float) -> float:
    """Rows a second of pyarrow alone, in one thread, checksums unread."""
    rows, start = 0, time.perf_counter()
    while True:
        for file in files_of(folder):
            opened = pq.ParquetFile(file.path)
            for group in range(opened.num_row_groups):
                rows += opened.read_row_group(group, use_threads=False).num_rows
                if (spent := time.perf_counter() - start) > seconds:
                    return rows / spent


def measured(
    spark: Any, work: Path, forms: list[Format], rows: int, rounds: int
) -> Iterator[tuple[Format, dict[str, Any]]]:
    """Writes all, then reads them in turns, so that a slow minute of the machine meets each alike."""
    written_as = {form: written(spark, work, form, rows) for form in forms}
    spark.catalog.clearCache()
    rates: dict[Format, list[tuple[float, float, float]]] = {form: [] for form in forms}
    for _ in range(rounds):
        for form, (folder, _) in written_as.items():
            rates[form].append(
                (decoded(folder, 0.3, (1, 2, 4)), decoded(folder, 0.3, (1,)), bare(folder, 0.3))
            )
    for form, (folder, seconds) in written_as.items():
        files = files_of(folder)
        best, one, plain = (statistics.median(r[i] for r in rates[form]) for i in range(3))
        yield (
            form,
            {
                "bytes a row": sum(f.bytes for f in files) / sum(f.rows for f in files),
                "write s": seconds,
                "decode, M rows/s": best / 1e6,
                "one thread": one / 1e6,
                "one thread, bare": plain / 1e6,
            },
        )
        shutil.rmtree(folder)


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.codecs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE", help=f"of {', '.join(ROWS)} (default: all)"
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for tables, copies and results; some 3 GB"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of decoding (default: %(default)s)")
    parser.add_argument("--rows", type=int, help=f"of each table (default: {ROWS})")
    args = parser.parse_args(argv)
    if wrong := [name for name in args.tables if name not in ROWS]:
        parser.error(f"no such table: {wrong[0]} (there are: {', '.join(ROWS)})")
    args.work.mkdir(parents=True, exist_ok=True)
    os.environ["PYSPARK_SUBMIT_ARGS"] = shlex.join(submit_words("local[2]"))
    results, found, spark = Results(args.work / "results.jsonl"), [], open_session("sluice-codecs")
    try:
        for name in args.tables or ROWS:
            count = args.rows or ROWS[name]
            rows = results.once(
                {"figure": "codecs", "table": name, "rows": count},
                lambda: [
                    {**asdict(form), **about}
                    for form, about in measured(
                        spark,
                        args.work,
                        formats(name),  # noqa: B023
                        count,  # noqa: B023
                        args.rounds,
                    )
                ],
            )
            say(f"\n{name}\n{table(rows)}\n")
            found += rows
    finally:
        spark.stop()
    return {"load": round(os.getloadavg()[0], 1), "rows": found}


if __name__ == "__main__":
    run(main)
