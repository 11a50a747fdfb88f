"""Measures the loader on tables of other shapes, and the minimum time to read the same columns.

    python -m benchmarks.shapes [CASE …] [--seconds 3] [--rounds 3]

* wide: 1,000 columns of which 50 are read, beside a file that holds only these 50; the aim is 1.2 times its cost;
* multi-hot: MLPerf's shape, 13 numbers and 26 bags of 214 ids a row in all, packed as bytes;
* large groups: row groups of 1,048,576 rows; small batches: 1,024 rows;
* waiting: processor time of the process while a consumer takes 20 ms for each batch: what the loader costs when it
  has nothing to do but to keep up; the aim is 15 % of a core for all that is not decoding;
* files: how long a table of 2,000 files takes to its first batch, footers read and remembered.

Takes turns with the decoder alone on the same files; figures are medians.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.loaders import Contender, decode_only, ours
from benchmarks.small_table import small_table
from sluice.common.errors import UsageError
from sluice.common.program import run, say
from sluice.common.suggest import nearest
from sluice.ingest.columns import Columns
from sluice.ingest.loader import BatchLoader
from sluice.ingest.read.footers import REMEMBERED
from sluice.ingest.read.parquet_files import ParquetFiles

BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids a row of MLPerf's 26 multi-hot features: 214."""
BATCH_SIZE = 8192
OPTIONS: dict[str, Any] = {
    "compression": "lz4",
    "use_dictionary": False,
    "write_page_checksum": True,
}


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def per_round(ours: Contender, decode: Contender, seconds: float, rounds: int) -> dict[str, Any]:
    """Both in turns."""
    pairs = [(ours(seconds), decode(seconds)) for _ in range(rounds)]
    return {
        "rows_per_s": round(statistics.median(a for a, _ in pairs)),
        "decode_rows_per_s": round(statistics.median(b for _, b in pairs)),
        "of_decode_only": round(statistics.median(a / b for a, b in pairs), 3),
    }


def beside_the_decoder(
    table: Any, arguments: argparse.Namespace, batch_size: int = BATCH_SIZE
) -> dict[str, Any]:
    contender, close = ours(table, batch_size, "petastorm")
    try:
        return per_round(
            contender,
            decode_only(table, Columns.of(table.fields)),
            arguments.seconds,
            arguments.rounds,
        )
    finally:
        close()


def wide(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    random, rows, group = np.random.default_rng(0), 131_072, 32_768
    names = [f"x{n}" for n in range(1000)]
    read = names[7::20]
    columns = {
        "label": pa.array(random.integers(0, 2, rows).astype(np.int8)),
        **{name: pa.array(random.normal(size=rows).astype(np.float32)) for name in names},
    }
    for folder_name, kept in (("all", names), ("few", read)):
        (folder / folder_name).mkdir()
        for file in range(2):
            pq.write_table(
                pa.table({name: columns[name] for name in ("label", *kept)}),
                folder / folder_name / f"{file}.parquet",
                row_group_size=group,
                **OPTIONS,
            )
    del columns
    found, closes = {}, []
    for name in ("all", "few"):
        table = ParquetFiles.open(folder / name, {"label": "label", "dense": read})
        found[name], close = ours(table, BATCH_SIZE, "petastorm")
        closes.append(close)
    pairs = []
    for _ in range(arguments.rounds):
        began = cpu_s()
        whole = found["all"](arguments.seconds)
        between = cpu_s()
        few = found["few"](arguments.seconds)
        pairs.append((whole, few, (between - began) / whole, (cpu_s() - between) / few))
    for close in closes:
        close()
    return {
        "rows_per_s": round(statistics.median(p[0] for p in pairs)),
        "rows_per_s_of_a_file_of_50": round(statistics.median(p[1] for p in pairs)),
        "cost_in_time": round(statistics.median(p[1] / p[0] for p in pairs), 3),
        "cost_in_processor_time": round(statistics.median(p[2] / p[3] for p in pairs), 3),
    }


def multi_hot_files(folder: Path) -> ParquetFiles:
    """Makes files of 26 columns of bags, 214 ids a row."""
    random, rows = np.random.default_rng(0), 262_144
    columns: dict[str, pa.Array] = {"label": pa.array(random.integers(0, 2, rows).astype(np.int8))}
    for n in range(13):
        columns[f"I{n}"] = pa.array(random.normal(size=rows).astype(np.float32))
    for n, ids in enumerate(BAGS):
        values = random.integers(0, 100_000, (rows, ids)).astype("<i4")
        offsets = np.arange(0, 4 * ids * (rows + 1), 4 * ids, dtype=np.int32)
        columns[f"C{n}"] = pa.BinaryArray.from_buffers(
            pa.binary(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(values)]
        )
    for file in range(2):
        pq.write_table(
            pa.table(columns), folder / f"{file}.parquet", row_group_size=32_768, **OPTIONS
        )
    return ParquetFiles.open(folder, {"label": "label", "dense": "I*", "id_list": "C*"})


def multi_hot(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    return beside_the_decoder(multi_hot_files(folder), arguments)


def large_groups(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    table = small_table(
        folder / "table", rows=4 * 2**20, row_group_rows=2**20, splits={"train": 1.0}
    )
    return beside_the_decoder(table, arguments)


def small_batches(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    table = small_table(
        folder / "table", rows=1_600_000, row_group_rows=32_768, splits={"train": 1.0}
    )
    return beside_the_decoder(table, arguments, batch_size=1024)


def waiting(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The consumer sleeps, so all processor time is the loader's; what its stages spend in their own work is decoding,
    gathering and checksums, the rest is Python's: queues, waking, counters."""
    table = small_table(
        folder / "table", rows=400_000, row_group_rows=32_768, splits={"train": 1.0}
    )
    with BatchLoader(table, batch_size=BATCH_SIZE, read_ahead_epochs=sys.maxsize) as loader:

        def take(seconds: float) -> tuple[float, float]:
            """Processor time of everything and of the stages' work."""
            before, began, end = loader.snapshot(), cpu_s(), time.monotonic() + seconds
            while time.monotonic() < end:
                for _batch in loader:
                    time.sleep(0.02)
                    if time.monotonic() >= end:
                        break
            after = loader.snapshot()
            return cpu_s() - began, sum(s.cpu_s for s in after.stages) - sum(
                s.cpu_s for s in before.stages
            )

        take(1.0)
        turns = [(seconds, *take(seconds)) for seconds in [arguments.seconds] * arguments.rounds]
    return {
        "of_a_core": round(statistics.median(whole / s for s, whole, _ in turns), 4),
        "of_a_core_beside_the_stages": round(
            statistics.median((whole - work) / s for s, whole, work in turns), 4
        ),
    }


def many_files(folder: Path, _arguments: argparse.Namespace) -> dict[str, Any]:
    random, rows = np.random.default_rng(0), 500
    table = pa.table(
        {
            "label": pa.array(random.integers(0, 2, rows).astype(np.int8)),
            **{f"I{n}": random.normal(size=rows).astype(np.float32) for n in range(13)},
            **{f"C{n}": random.integers(0, 1000, rows).astype(np.int32) for n in range(26)},
        }
    )
    for number in range(2000):
        pq.write_table(table, folder / f"part-{number:04}.parquet", **OPTIONS)

    def first_batch() -> float:
        began = time.perf_counter()
        roles = {"label": "label", "dense": "I*", "sparse": "C*"}
        with BatchLoader(folder, batch_size=BATCH_SIZE, roles=roles) as loader:
            next(iter(loader))
            return time.perf_counter() - began

    fresh = first_batch()
    assert (folder / REMEMBERED).exists()
    return {"first_batch_s": round(fresh, 2), "with_remembered_footers_s": round(first_batch(), 2)}


CASES: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    "wide": wide,
    "multi-hot": multi_hot,
    "large-groups": large_groups,
    "small-batches": small_batches,
    "waiting": waiting,
    "files": many_files,
}


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shapes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)"
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="of each turn (default %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default %(default)s)")
    arguments = parser.parse_args(argv)
    for name in arguments.cases:
        if name not in CASES:
            raise UsageError(f"there is no case {name!r}{nearest(name, CASES)}: {', '.join(CASES)}")
    if arguments.seconds <= 0 or arguments.rounds < 1:
        raise UsageError("--seconds and --rounds are positive")
    found = {}
    for name in arguments.cases or CASES:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = CASES[name](Path(folder), arguments)
        say(
            f"{name:14} "
            + ", ".join(
                f"{what.replace('_', ' ')} {value:,}" for what, value in found[name].items()
            )
        )
    return found


if __name__ == "__main__":
    run(main)
