"""Measures the loader and the decoder alone on one feature table, in turns in one run.

    python -m benchmarks.loaders [TABLE] [--batch-size 8192] [--seconds 3] [--rounds 5]

`python -m benchmarks.race` compares the loader with others. Figures are medians over the rounds. A ratio is the median
of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.decode_limit import decode_rows_per_s
from benchmarks.results import median_ratio
from benchmarks.small_table import small_table
from sluice.common.errors import UsageError
from sluice.common.lines import say
from sluice.common.program import run
from sluice.etl.table.table import FeatureTable
from sluice.ingest.columns import Columns
from sluice.ingest.loader import BatchLoader
from sluice.ingest.read.reader import RowGroupReader
from sluice.ingest.read.sources import Reading
from sluice.ingest.row_order import Order

Contender = Callable[[float], float]  # seconds → rows a second


def ours(
    table: FeatureTable,
    batch_size: int,
    reader: str,
    shuffle: bool,
) -> tuple[Contender, Callable[[], None]]:
    """One iteration goes on over all turns. What was read ahead between turns is used up before the clock starts."""
    loader = BatchLoader(
        table,
        batch_size=batch_size,
        read_ahead_epochs=sys.maxsize,
        order=Order(shuffle=shuffle),
        reading=Reading(reader=reader),
    )
    batches = (batch for _ in itertools.count() for batch in loader)
    ahead = 2 * loader.pipeline.footprint.total

    def contender(seconds: float) -> float:
        used = 0
        while used < ahead:
            batch = next(batches)
            used += 4 * len(batch.values) + batch.dense.nbytes
        rows, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds:
            rows += next(batches).rows
        return rows / spent

    return contender, loader.close


def decode_only(table: FeatureTable, columns: Columns) -> Contender:
    groups = RowGroupReader(table.files_of("train"), columns.names)
    return lambda seconds: max(decode_rows_per_s(groups, n, seconds / 3) for n in (1, 2, 4))


def made_table(folder: Path, rows: int) -> FeatureTable:
    """Synthetic clicks, as the ETL lays them out."""
    say(f"making {rows:,} rows of 13 numbers and 26 ids in {folder}")
    return small_table(folder / "table", rows=rows, row_group_rows=32768, splits={"train": 1.0})


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "table", nargs="?", help="a feature table with a train split (default: a new one)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=8192, help="rows of a batch (default %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (%(default)s)")
    options = parser.parse_args(argv)
    if options.seconds <= 0 or options.rounds < 1:
        raise UsageError("--seconds and --rounds are positive")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        table = (
            FeatureTable.open(options.table)
            if options.table
            else made_table(Path(folder), 1_600_000)
        )
        contenders = {"decode only": decode_only(table, Columns.of(table.fields))}
        for name, reader, shuffle in (
            ("ours", "petastorm", True),
            ("ours, plain Arrow", "arrow", True),
            ("ours, unshuffled", "petastorm", False),
        ):
            contenders[name], close = ours(table, options.batch_size, reader, shuffle)
            stack.callback(close)
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(options.rounds):
            for name, contender in contenders.items():
                rates[name].append(contender(options.seconds))
            say(
                f"round {number + 1}: "
                + ", ".join(f"{n} {r[-1] / 1e6:.2f} M" for n, r in rates.items())
            )
    for name, values in rates.items():
        rate = statistics.median(values) / 1e6
        share = median_ratio(values, rates["decode only"])
        say(f"{name:30} {rate:8.2f} M rows/s   {share:5.2f} of the decoder alone")
    return {
        "batch_size": options.batch_size,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "rows_per_s": {name: round(statistics.median(values)) for name, values in rates.items()},
        "of_decode_only": median_ratio(rates["ours"], rates["decode only"]),
        "unshuffled_of_decode_only": median_ratio(rates["ours, unshuffled"], rates["decode only"]),
    }


if __name__ == "__main__":
    run(main)
