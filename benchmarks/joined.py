"""Readers that place rows at once beside readers and a shuffle stage of their own, beside the same from a packed copy,
and, of numbers, beside the tight loop: in turns.

    python -m benchmarks.joined [--rounds 6] [--seconds 3] [--bags]

Ratios are medians over rounds. A quiet machine is needed for the rates; the processor time a row bears more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.loaders import made_table, tight_loop
from benchmarks.shapes import cpu_s as processor_s
from benchmarks.shapes import multi_hot_files
from sluice.common.program import run, say
from sluice.ingest.columns import Columns
from sluice.ingest.knobs import Knobs
from sluice.ingest.loader import BatchLoader
from sluice.ingest.read.packed_copy import PackedCopy
from sluice.ingest.read.sources import Reading
from sluice.ingest.stages.transform import Transform

ARMS = {
    "split": Knobs(workers={"read": 1, "shuffle": 1}),
    "joined": Knobs(workers={"read": 2}, fused=frozenset({"shuffle"})),
}
Turn = Callable[
    [float], tuple[float, float]
]  # seconds → rows a second, nanoseconds of processor time a row


def loader_turn(
    source: Any,
    knobs: Knobs,
    packed: PackedCopy | None = None,
    transforms: Sequence[Transform] = (),
) -> Turn:
    """A fresh loader each turn: one that waits would fill its buffers while others are measured."""

    def turn(seconds: float) -> tuple[float, float]:
        with BatchLoader(
            source,
            batch_size=8192,
            read_ahead_epochs=sys.maxsize,
            knobs=knobs,
            transforms=transforms,
            reading=Reading(packed=packed),
        ) as loader:
            rows, began, cpu_s, first = 0, 0.0, 0.0, 0.0
            while True:
                for batch in loader:
                    now = time.perf_counter()
                    first = first or now
                    if began:
                        rows += batch.rows
                    elif now >= first + seconds / 3:
                        began, cpu_s = now, processor_s()
                    if rows and now >= first + seconds:
                        return rows / (now - began), (processor_s() - cpu_s) / rows * 1e9

    return turn


def loop_turn(source: Any) -> Turn:
    contender = tight_loop(source, Columns.of(source.fields))

    def turn(seconds: float) -> tuple[float, float]:
        began, cpu_s = time.perf_counter(), processor_s()
        rate = contender(seconds)
        return rate, (processor_s() - cpu_s) / (rate * (time.perf_counter() - began)) * 1e9

    return turn


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6, help="turns of each (default %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="of each turn (default %(default)s)"
    )
    parser.add_argument("--bags", action="store_true", help="214 ids a row instead of 26")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        source = (
            multi_hot_files(Path(folder)) if arguments.bags else made_table(Path(folder), 1_600_000)
        )
        turns = {name: loader_turn(source, knobs) for name, knobs in ARMS.items()}
        turns["packed"] = loader_turn(source, ARMS["joined"], PackedCopy())
        turns["packed"](arguments.seconds)  # makes the copy
        if not arguments.bags:
            turns["loop"] = loop_turn(source)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
        for number in range(arguments.rounds):
            for name in list(turns)[:: 1 if number % 2 else -1]:
                found[name].append(turns[name](arguments.seconds))
            say(
                f"round {number + 1}: "
                + ", ".join(
                    f"{n} {f[-1][0] / 1e6:.2f} M rows/s, {f[-1][1]:.0f} ns"
                    for n, f in found.items()
                )
            )

    def ratio(one: str, other: str, which: int) -> float:
        pairs = zip(found[one], found[other], strict=True)
        return round(statistics.median(a[which] / b[which] for a, b in pairs), 3)

    others = [name for name in found if name != "joined"]
    return {
        "rounds": arguments.rounds,
        "bags": arguments.bags,
        "rows_per_s": {
            name: round(statistics.median(rate for rate, _ in f)) for name, f in found.items()
        },
        "rate": {f"joined/{name}": ratio("joined", name, 0) for name in others},
        "processor_time": {f"joined/{name}": ratio("joined", name, 1) for name in others},
    }


if __name__ == "__main__":
    run(main)
