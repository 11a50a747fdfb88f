"""Measures whether the cost of a row grows with the work: with rows, columns, files, row groups and epochs.

    python -m benchmarks.scale [DIMENSION …] [--rounds 3] [--seconds 2] [--data FOLDER]

Each dimension varies alone around one centre. Every case runs in a process of its own, and the cases take turns.
Processor time is measured after a start, so it has no opening in it. It is divided by the rows that were read. `decode`
is Arrow alone on the same files, in one thread, with footers at hand: what no loader can avoid. Figures are medians
over the rounds. Ratios compare a case with the first case of its dimension, within a round. They are of values, that is
of rows times columns.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.joined import ARMS
from benchmarks.results import Cases, table
from benchmarks.shapes import OPTIONS, cpu_s
from sluice.common.errors import UsageError
from sluice.common.program import run, say
from sluice.common.suggest import nearest

ROLES = {"label": "label", "dense": "I*", "sparse": "C*"}
BATCH_SIZE = 8192
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Case:
    """Parquet files of equal size, and how often they are read."""

    rows: int
    columns: int = 40
    files: int = 4
    group: int = 32_768
    """The most rows of a row group."""
    epochs: int = 0
    """0: as many as fit into the time."""

    @property
    def folder(self) -> str:
        return f"{self.rows}-{self.columns}-{self.files}-{self.group}"

    def smaller(self, factor: int) -> Case:
        """Returns the case with fewer rows and files, for tests."""
        files = max(1, self.files // factor)
        return replace(self, rows=max(2 * BATCH_SIZE, self.rows // factor), files=files)


ROWS = Case(rows=1_000_000)
COLUMNS = Case(rows=200_000)
FILES = Case(rows=1_000_000, files=1)
EPOCHS = Case(rows=100_000)
DIMENSIONS: dict[str, Mapping[str, Case]] = {
    "rows": {f"{n:,}": replace(ROWS, rows=n) for n in (1_000_000, 100_000, 10_000_000)},
    "columns": {f"{n:,}": replace(COLUMNS, columns=n) for n in (40, 10, 100, 300, 1000)},
    "files": {f"{n:,}": replace(FILES, files=n) for n in (1, 10, 100, 1000, 10_000)},
    "row groups": {
        "31 in one file": FILES,
        "1,000 in one file": replace(FILES, group=1000),
        "10,000 in one file": replace(FILES, group=100),
    },
    "epochs": {f"{n:,}": replace(EPOCHS, epochs=n) for n in (10, 100)},
}


def make_files(case: Case, folder: Path) -> None:
    """Writes the files of a case. A third of the columns are numbers. The values repeat after 32,768 rows."""
    random = np.random.default_rng(0)
    numbers = (case.columns - 1) // 3
    block = min(case.rows, 32_768)
    columns = {"label": pa.array(random.integers(0, 2, block).astype(np.int8))}
    for n in range(numbers):
        columns[f"I{n}"] = pa.array(random.normal(size=block).astype(np.float32))
    for n in range(case.columns - 1 - numbers):
        columns[f"C{n}"] = pa.array(random.integers(0, 1000, block).astype(np.int32))
    made = pa.table(columns)
    folder.mkdir(parents=True)
    bounds = [case.rows * n // case.files for n in range(case.files + 1)]
    for number in range(case.files):
        with pq.ParquetWriter(folder / f"part-{number:05}.parquet", made.schema, **OPTIONS) as file:
            left = bounds[number + 1] - bounds[number]
            while left:
                count = min(left, case.group, block)
                file.write_table(made.slice(0, count))
                left -= count


def measure(folder: str, seconds: float, epochs: int, arm: str) -> dict[str, Any]:
    """Loads the files in this process. Returns the figures of one turn."""
    if arm == "decode":
        return decode(folder, seconds)
    from sluice import Loader

    before = resident_bytes()
    began = time.perf_counter()
    chosen: dict[str, Any] = {"knobs": ARMS["joined"]} if arm == "fixed" else {}
    with Loader(
        folder,
        batch_size=BATCH_SIZE,
        roles=ROLES,
        read_ahead_epochs=epochs or 10**6,
        **chosen,
    ) as loader:
        opened = time.perf_counter()
        first = 0.0
        rows, first_rows, marks = 0, 0, list[tuple[int, float]]()
        for batch in batches(loader, epochs):
            now = time.perf_counter()
            if not first:
                first = now
            rows += batch.rows
            if epochs and batch.step + 1 == len(loader):
                marks.append(read_and_spent(loader))
            if not epochs and not first_rows and now >= first + seconds / 2:
                first_rows = rows
                marks.append(read_and_spent(loader))
            if first_rows and now >= first + 1.5 * seconds and rows >= first_rows + 10 * BATCH_SIZE:
                marks.append(read_and_spent(loader))
                break
        # Of epochs, the first tenth does not count.
        (first_rows, spent_s), (rows, end_s) = marks[max(0, epochs // 10 - 1)], marks[-1]
        return {
            "open_s": opened - began,
            "first_batch_s": first - began,
            "ns_a_row": (end_s - spent_s) / (rows - first_rows) * 1e9,
            "peak_mib": (peak_bytes() - before) / MIB,
        }


def read_and_spent(loader: Any) -> tuple[int, float]:
    """Returns the rows that were read, of which some may wait for the consumer, and the processor seconds."""
    return loader.snapshot().stages[0].rows, cpu_s()


def batches(loader: Any, epochs: int) -> Iterator[Any]:
    done = 0
    while not epochs or done < epochs:
        yield from loader
        done += 1


def decode(folder: str, seconds: float) -> dict[str, Any]:
    """Decodes row groups in one thread, with their footers read before and each file opened again."""
    paths = sorted(Path(folder).glob("*.parquet"))
    footers = [pq.read_metadata(path) for path in paths]
    rows, began, spent_s = 0, time.perf_counter(), cpu_s()
    while True:
        for path, footer in zip(paths, footers, strict=True):
            with pq.ParquetFile(path, metadata=footer, page_checksum_verification=True) as file:
                for group in range(footer.num_row_groups):
                    rows += file.read_row_group(group, use_threads=False).num_rows
                    if time.perf_counter() > began + seconds:
                        return {"ns_a_row": (cpu_s() - spent_s) / rows * 1e9}


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def summary(
    dimension: str, cases: Mapping[str, Case], found: Mapping[tuple[str, str], Sequence[Any]]
) -> list[dict[str, Any]]:
    """Returns a row of the table for each case of a dimension."""

    def median(name: str, arm: str, of: Callable[[Any], float]) -> float:
        return statistics.median(map(of, found[name, arm]))

    def ratio(name: str, arm: str) -> float:
        pairs = zip(found[name, arm], found[base, arm], strict=True)
        values = cases[base].columns / cases[name].columns
        return round(statistics.median(a["ns_a_row"] / b["ns_a_row"] for a, b in pairs) * values, 3)

    base = next(iter(cases))
    rows = []
    for name, case in cases.items():
        fixed = median(name, "fixed", lambda turn: turn["ns_a_row"])
        rows.append(
            {
                dimension: name,
                "fixed, ns a row": round(fixed),
                "ns a value": round(fixed / case.columns, 2),
                "÷ first": ratio(name, "fixed"),
                "default, ns a row": round(median(name, "default", lambda turn: turn["ns_a_row"])),
                "default ÷ first": ratio(name, "default"),
                "decode, ns a row": round(median(name, "decode", lambda turn: turn["ns_a_row"])),
                "decode ÷ first": ratio(name, "decode"),
                "peak, MiB": round(median(name, "fixed", lambda turn: turn["peak_mib"])),
                "open, s": round(median(name, "fixed", lambda turn: turn["open_s"]), 3),
                "first batch, s": round(
                    median(name, "fixed", lambda turn: turn["first_batch_s"]), 3
                ),
            }
        )
    return rows


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "dimensions", nargs="*", metavar="DIMENSION", help=f"of {', '.join(DIMENSIONS)}"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="of each turn (default %(default)s)"
    )
    parser.add_argument("--data", type=Path, help="keep the files here, for the next run")
    parser.add_argument("--turns", type=Path, help="keep the turns here, to go on with them")
    parser.add_argument(
        "--smaller", type=int, default=1, help="divide rows and files by this (default %(default)s)"
    )
    arguments = parser.parse_args(argv)
    for name in arguments.dimensions:
        if name not in DIMENSIONS:
            raise UsageError(
                f"there is no dimension {name!r}{nearest(name, DIMENSIONS)}: {', '.join(DIMENSIONS)}"
            )
    with tempfile.TemporaryDirectory() as work:
        data = arguments.data or Path(work, "data")
        chosen = {
            name: {value: case.smaller(arguments.smaller) for value, case in cases.items()}
            for name, cases in DIMENSIONS.items()
            if name in (arguments.dimensions or DIMENSIONS)
        }
        for case in (case for cases in chosen.values() for case in cases.values()):
            if not (data / case.folder).exists():
                say(f"making {asdict(case)}")
                make_files(case, data / case.folder)
        lines = arguments.turns or Path(work, "turns")
        turns = Cases(lines)
        for number in range(arguments.rounds):
            for dimension, cases in chosen.items():
                for value in list(cases)[:: 1 if number % 2 else -1]:
                    for arm in ("fixed", "default", "decode"):
                        case = cases[value]
                        asked = {
                            "folder": str(data / case.folder),
                            "seconds": arguments.seconds,
                            "epochs": case.epochs,
                            "arm": arm,
                        }
                        name = json.dumps([dimension, value, arm, number])
                        turns.run(name, "scale", "measure", asked)
        found: dict[tuple[str, str, str], list[Any]] = {}
        for line in map(json.loads, lines.read_text().splitlines()):
            if "error" in line:
                raise RuntimeError(line["error"])
            dimension, value, arm, _ = json.loads(line["case"])
            found.setdefault((dimension, value, arm), []).append(line)
    tables = {
        dimension: summary(
            dimension,
            cases,
            {(value, arm): turns for (of, value, arm), turns in found.items() if of == dimension},
        )
        for dimension, cases in chosen.items()
    }
    for rows in tables.values():
        say(table(rows) + "\n")
    return {"rounds": arguments.rounds, "seconds": arguments.seconds, **tables}


if __name__ == "__main__":
    run(main)
