"""Measures what operators cost in the loader: the same log with all operators in the ETL, and with all in the loader.

    python -m benchmarks.online_operators --work DIR [--rows 1000000] [--rounds 6]

The job makes both tables once, from features/criteo.toml and features/criteo_raw.toml. Then epochs take turns. For each
table: rows a second and processor time a row of the whole process, medians over the rounds; and of the raw one
nanoseconds a row of each column's operators. Both must give the same order hash. The last line is JSON.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.jobs import ROOT, make_tables
from benchmarks.results import table
from sluice.common.program import run as program
from sluice.common.program import say
from sluice.etl.table.table import FeatureTable
from sluice.ingest.knobs import Knobs
from sluice.ingest.loader import BatchLoader
from sluice.ingest.read.sources import Reading
from sluice.ingest.row_order import Order

SPECS = {
    "etl": ROOT / "features/criteo.toml",
    "loader": ROOT / "features/criteo_raw.toml",
}
BATCH = 8192


def epoch(of: FeatureTable, knobs: Knobs) -> dict[str, Any]:
    """One epoch, the first of its loader: its rate, processor time, order hash, and what each column's operators
    took."""
    with BatchLoader(
        of, batch_size=BATCH, knobs=knobs, order=Order(last="pad"), reading=Reading(reader="arrow")
    ) as loader:
        began, used = time.perf_counter(), _cpu_s()
        rows = sum(batch.rows for batch in loader)
        seconds, used = time.perf_counter() - began, _cpu_s() - used
        return {
            "rows_per_s": rows / seconds,
            "cpu_us_a_row": 1e6 * used / rows,
            "order_hash": loader.order_hash,
            "columns": {
                c["column"]: (c["operators"], 1e9 * c["cpu_s"]) for c in loader.operators.costs()
            },
        }


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(of: dict[str, FeatureTable], rounds: int, knobs: Knobs) -> dict[str, Any]:
    """Medians over the rounds, in which the tables take turns."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in of}
    for number in range(rounds):
        for name in (list(of), list(of)[::-1])[number % 2]:
            found[name].append(epoch(of[name], knobs))
    hashes = {one["order_hash"] for each in found.values() for one in each}
    if len(hashes) != 1:
        raise RuntimeError(f"the tables differ: order hashes {sorted(map(str, hashes))}")
    columns = {
        name: (operators, statistics.median(one["columns"][name][1] for one in found["loader"]))
        for name, (operators, _) in found["loader"][0]["columns"].items()
    }
    return {
        "order_hash": hashes.pop(),
        "ns_a_row": {name: round(ns, 1) for name, (_, ns) in columns.items()},
        "operators": {name: operators for name, (operators, _) in columns.items()},
        "operators_us_a_row": round(sum(ns for _, ns in columns.values()) / 1000, 3),
        **{
            name: {
                key: round(statistics.median(one[key] for one in each), 3)
                for key in ("rows_per_s", "cpu_us_a_row")
            }
            for name, each in found.items()
        },
        "bytes_a_row": {
            name: round(sum(f.bytes for f in one.files) / one.rows, 1) for name, one in of.items()
        },
    }


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for the log and the tables"
    )
    parser.add_argument(
        "--rows", type=int, default=1_000_000, help="raw lines (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=6, help="(default: %(default)s)")
    parser.add_argument(
        "--workers", type=int, default=1, help="of each stage (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    options.work.mkdir(parents=True, exist_ok=True)
    knobs = Knobs(workers={"read": options.workers, "shuffle": options.workers})
    tables = make_tables(options.work, options.rows, SPECS)
    opened = {name: FeatureTable.open(path) for name, path in tables.items()}
    found = measured(opened, options.rounds, knobs)
    say(
        table(
            [
                {"column": name, "operators": found["operators"][name], "ns a row": ns}
                for name, ns in found["ns_a_row"].items()
            ]
        )
    )
    say(
        table(
            [
                {"applied by": name, **found[name], "bytes a row": found["bytes_a_row"][name]}
                for name in SPECS
            ]
        )
    )
    return found


if __name__ == "__main__":
    program(main)
