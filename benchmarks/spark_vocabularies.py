"""Compares the Spark job of this checkout with that of another one, on a table with many large vocabularies or, with
--criteo, on rows of Criteo's shape.

    git archive COMMIT | tar -x -C OTHER
    python -m benchmarks.spark_vocabularies --work DIR --against OTHER [--rows 1000000] [--rounds 2] [--criteo]

Each round runs both checkouts in turn, with `spark-submit` and two cores. By default the memory of a worker is so small
that most vocabularies stay in files. The tables must have the same fingerprint, learned state and files.

The last line is JSON: for each run the seconds, the seconds of each stage, and the processor seconds of all its
processes, JVM and Python together."""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.results import ROOT
from benchmarks.spark_scale import columns_spec, submit, write_columns
from sluice.common.program import run, say
from sluice.etl.synth.raw_logs import synthesize
from sluice.etl.table.fitted_state import digest_of
from sluice.etl.table.table import FeatureTable


def measure(checkout: Path, place: Path, name: str, worker_memory: int) -> dict[str, Any]:
    """Runs one job, and returns its cost and what it made."""
    shutil.rmtree(place / name, ignore_errors=True)
    os.environ["PYTHONPATH"] = str(checkout)
    job = submit(
        place,
        place / name,
        *("--master", "local[2]", "--driver-memory", "1g"),
        then=["--worker-memory", str(worker_memory)],
        root=checkout,
    )
    result = job.followed()
    table = FeatureTable.open(place / name)
    return {
        "seconds": round(time.monotonic() - job.began, 1),
        "processor_s": job.processor_s,
        "stages": job.seconds,
        "peak_mib": job.peak_mib["driver"],
        "joined": sum(way == "shuffle join" for way in result["ways"].values()),
        "made": [result["fingerprint"], table.record.state, digest_files(table)],
    }


def digest_files(table: FeatureTable) -> list[tuple[tuple[int, ...], str]]:
    """Returns the row groups of each file, and the digest of its rows in their order. Footers of equal files may differ
    in their metadata."""
    rows = [
        pq.read_table(file.path, partitioning=None).replace_schema_metadata()
        for file in table.files
    ]
    return [
        (file.row_group_rows, digest_of(one.schema, one.to_batches()))
        for file, one in zip(table.files, rows, strict=True)
    ]


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for input and tables")
    parser.add_argument("--against", type=Path, required=True, help="the other checkout")
    parser.add_argument("--rows", type=int, default=1_000_000, help="(default: %(default)s)")
    parser.add_argument("--columns", type=int, default=26, help="(default: %(default)s)")
    parser.add_argument(
        "--values", type=int, default=2_000_000, help="of all columns (default: %(default)s)"
    )
    parser.add_argument(
        "--worker-memory", type=int, default=16, metavar="MIB", help="(default: %(default)s)"
    )
    parser.add_argument("--criteo", action="store_true", help="features/criteo.toml on its rows")
    parser.add_argument("--rounds", type=int, default=2, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    shape = "criteo" if args.criteo else f"{args.columns}-{args.values}"
    place = args.work.resolve() / f"{args.rows}-{shape}"
    if not (place / "spec.toml").exists():  # written last
        shutil.rmtree(place, ignore_errors=True)
        if args.criteo:
            synthesize(place / "in", rows=args.rows, seed=1)
            text = (ROOT / "features/criteo.toml").read_text()
        else:
            write_columns(place / "in", args.rows, args.columns, args.values)
            text = columns_spec(args.columns)
        (place / "spec.toml").write_text(text)
    found: dict[str, list[dict[str, Any]]] = {"this": [], "other": []}
    for _ in range(args.rounds):
        for name, checkout in (("other", args.against.resolve()), ("this", ROOT)):
            found[name].append(measure(checkout, place, name, args.worker_memory))
            say(f"{name}: {found[name][-1]}")
    made = [one.pop("made") for runs in found.values() for one in runs]
    return {
        "rows": args.rows,
        "shape": shape,
        "same": all(one == made[0] for one in made),
        **found,
    }


if __name__ == "__main__":
    run(main)
