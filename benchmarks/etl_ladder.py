"""Measures the ETL job with one setting changed at a time: `python -m benchmarks.etl_ladder [LEVER…] --work DIR`.

  partitions  size of the pieces that the input is cut into
  memory      memory of the JVM, which is both driver and executor here
  udf         a Python function per row, the same with rows from Arrow, and operators on whole columns
  join        fitted tables broadcast by the driver, read by each worker, or joined by a shuffle
  workers     1 to 2 workers of one core each, on a standalone cluster

The steps of a lever differ only in this setting. DIR/results.jsonl keeps the measurements, and the same command resumes
an interrupted run. The last line is JSON."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.etl import MILLION, ROOT, session
from benchmarks.results import Results, table
from sluice.common.program import run, say
from sluice.etl.spark.processes.standalone_cluster import StandaloneCluster

Row = dict[str, Any]
_SPLIT = "spark.sql.files.maxPartitionBytes"


def partitions(work: Path, rows: int) -> list[Row]:
    sizes = (8, 32, 64, 128)
    words = [word for mib in sizes for word in (f"set:{_SPLIT}={mib * 2**20}", f"job:{rows}")]
    found = session(work, [f"job:{rows}", *words])["turns"][1:]
    return [_row(f"{mib} MiB a split", turn) for mib, turn in zip(sizes, found, strict=True)]


def memory(work: Path, rows: int) -> list[Row]:
    found = []
    for size in ("768m", "2g", "4g"):
        turn = session(
            work, [f"job:{MILLION // 2}", f"job:{rows}"], conf={"spark.driver.memory": size}
        )["turns"][-1]
        found.append({**_row(f"{size} of heap", turn), "JVM MiB": turn["peak_mib"]["jvm"]})
    return found


def udf(work: Path, rows: int) -> list[Row]:
    kinds = {
        "rowwise": "a Python function a row",
        "udf": "the same, rows in Arrow batches",
        "columns": "whole columns",
    }
    found = session(work, [f"columns:{rows}", *[f"{kind}:{rows}" for kind in kinds]])["turns"][1:]
    return [_row(name, turn) for name, turn in zip(kinds.values(), found, strict=True)]


def join(work: Path, rows: int) -> list[Row]:
    """By what a worker may hold; see sluice.etl.spark.vocabulary.strategy. Two million rows have some 460,000 values
    to keep."""
    steps = {256: "sent by the driver", 32: "read by each worker", 1: "shuffle joins"}
    words = [word for mib in steps for word in (f"set:worker_mib={mib}", f"job:{rows}")]
    found = session(work, [f"job:{rows}", *words])["turns"][1:]
    return [
        _row(f"{name} (--worker-memory {mib})", turn)
        for (mib, name), turn in zip(steps.items(), found, strict=True)
    ]


def workers(work: Path, rows: int) -> list[Row]:
    found = []
    for count in (1, 2):
        with (
            tempfile.TemporaryDirectory(prefix="sluice-cluster-") as place,
            StandaloneCluster(Path(place)) as cluster,
        ):
            for _ in range(count):
                cluster.add_worker(cores=1, memory="2g")
            conf = {"spark.executor.memory": "1g", "spark.executorEnv.PYTHONPATH": str(ROOT)}
            turn = session(work, [f"job:{MILLION // 2}", f"job:{rows}"], cluster.url, conf)[
                "turns"
            ][-1]
        found.append(
            {
                "step": f"{count} of one core",
                "rows": turn["rows"],
                "seconds": float(turn["seconds"]),
                "rows/s": turn["rows"] / turn["seconds"],
            }
        )
    return found


def _row(step: str, turn: Row) -> Row:
    return {
        "step": step,
        "rows": turn["rows"],
        "seconds": float(turn["seconds"]),
        "CPU s": float(turn["cpu_s"]),
        "rows/s": turn["rows"] / turn["seconds"],
    }


LEVERS = {
    "partitions": (partitions, 2 * MILLION),
    "memory": (memory, 2 * MILLION),
    "udf": (udf, MILLION // 2),
    "join": (join, 2 * MILLION),
    "workers": (workers, MILLION),
}


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.etl_ladder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "levers", nargs="*", metavar="LEVER", help=f"of {', '.join(LEVERS)} (default: all)"
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for inputs, outputs and results; some 3 GB"
    )
    parser.add_argument(
        "--rows", type=int, help="of each turn (default: 2 M; 1 M for workers, 0.5 M for udf)"
    )
    args = parser.parse_args(argv)
    if wrong := [name for name in args.levers if name not in LEVERS]:
        parser.error(f"no such lever: {wrong[0]} (there are: {', '.join(LEVERS)})")
    args.work.mkdir(parents=True, exist_ok=True)
    results, found = Results(args.work / "results.jsonl"), {}
    for name in args.levers or LEVERS:
        lever, usual = LEVERS[name]
        rows = args.rows or usual
        found[name] = results.once(
            {"figure": "ladder", "lever": name, "rows": rows},
            lambda: lever(args.work, rows),  # noqa: B023
        )
        say(f"\n{name}\n{table(found[name])}\n")
    return {"load": round(os.getloadavg()[0], 1), **found}


if __name__ == "__main__":
    run(main)
