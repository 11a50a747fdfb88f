"""Compares the tuned loader with fixed numbers of readers on a slow store. The tuned one starts with one reader.

    python benchmarks/latency.py [TABLE] [--latency-ms 50] [--readers 1,2,4,8,16,32] [--seconds 4] [--rounds 3]

Every arm is a new loader in every round, and the arms take turns. A fixed arm warms up and is then measured; the tuned
one is tuned for --settle seconds first. Figures are medians over the rounds; the ratio is that of the tuned arm to the
best fixed one, taken within each round, then the median. Knobs change neither rows nor their order: the order hashes
of all arms that finished an epoch are compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.small_table import small_table
from sluice.agent import policies
from sluice.agent.controller import Controller
from sluice.common.errors import UsageError
from sluice.common.program import run, say
from sluice.etl.table.table import FeatureTable
from sluice.ingest.knobs import Knobs
from sluice.ingest.loader import BatchLoader
from sluice.ingest.row_order import Read
from sluice.tools.bench_outcome import consume

_WARM_S = 1.0
_ROWS, _ROW_GROUP_ROWS = 1_000_000, 20_000  # of the table that is made if none is named


@dataclass(frozen=True, slots=True)
class Turn:
    """One arm in one round."""

    rows_per_s: float
    """Over the last `seconds` alone."""
    order_hash: str | None
    knobs: Knobs
    changes: tuple[float, ...] = ()
    """When the policy changed something, in seconds from the start."""


def turn(
    table: FeatureTable, options: argparse.Namespace, readers: int, tuning: str | None
) -> Turn:
    """A new loader with so many readers, and with a policy if `tuning` names one."""
    before = options.settle if tuning else _WARM_S
    began, changes = time.monotonic(), []

    def record(event: dict[str, Any]) -> None:
        if event["kind"] == "decision":
            changes.append(time.monotonic() - began)

    def before_read(_: Read) -> None:
        time.sleep(options.latency_ms / 1000)

    with (
        BatchLoader(
            table,
            batch_size=options.batch_size,
            read_ahead_epochs=sys.maxsize,
            before_read=before_read,
            knobs=Knobs(workers={"read": readers}),
        ) as loader,
        ExitStack() as stack,
    ):
        if tuning:
            stack.enter_context(Controller(loader.tunable, policies.make(tuning), record=record))
        found = consume(loader, before + options.seconds, lambda: None)
        knobs = loader.knobs
    return Turn(
        found.rows_per_s(options.seconds / (before + options.seconds)),
        found.order_hash,
        knobs,
        tuple(changes),
    )


def measure(table: FeatureTable, options: argparse.Namespace) -> dict[str, list[Turn]]:
    arms = {str(n): (n, None) for n in options.readers} | {options.tuning: (1, options.tuning)}
    turns: dict[str, list[Turn]] = {name: [] for name in arms}
    for number in range(options.rounds):
        for name, (readers, tuning) in arms.items():
            turns[name].append(turn(table, options, readers, tuning))
        say(
            f"round {number + 1}: "
            + ", ".join(f"{n} {t[-1].rows_per_s / 1e6:.2f} M" for n, t in turns.items())
        )
    return turns


def summary(turns: dict[str, list[Turn]], tuned: str) -> dict[str, Any]:
    """The JSON line's figures."""
    medians = {
        name: statistics.median(t.rows_per_s for t in taken) for name, taken in turns.items()
    }
    best = max((name for name in turns if name != tuned), key=lambda name: medians[name])
    ratios = [t.rows_per_s / b.rows_per_s for t, b in zip(turns[tuned], turns[best], strict=True)]
    hashes = {t.order_hash for taken in turns.values() for t in taken if t.order_hash is not None}
    return {
        "rows_per_s": {name: round(rate) for name, rate in medians.items()},
        "best_fixed": int(best),
        "of_best_fixed": round(statistics.median(ratios), 3),
        "ratios": [round(r, 3) for r in ratios],
        "of_one_reader": round(medians[tuned] / medians["1"], 2) if "1" in medians else None,
        "decisions": [len(t.changes) for t in turns[tuned]],
        "last_change_s": [round(t.changes[-1], 1) if t.changes else 0.0 for t in turns[tuned]],
        "knobs": turns[tuned][-1].knobs.to_dict(),
        "order_hashes": len(hashes),
        "same_order": len(hashes) == 1,
    }


def _readers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "table",
        nargs="?",
        help=f"a feature table with a train split (default: one of {_ROWS:,} made-up clicks)",
    )
    add(
        "--latency-ms",
        type=float,
        default=50.0,
        help="before a row group's read answers (default %(default)s)",
    )
    add(
        "--readers",
        type=_readers,
        default=[1, 2, 4, 8, 16, 32],
        help="the fixed arms (default 1,2,4,8,16,32)",
    )
    add("--tuning", default="auto", help="the policy of the tuned arm (default %(default)s)")
    add("--batch-size", type=int, default=8192, help="rows of a batch (default %(default)s)")
    add("--seconds", type=float, default=4.0, help="that count, of each turn (default %(default)s)")
    add(
        "--settle",
        type=float,
        default=16.0,
        help="seconds of tuning before they do (default %(default)s)",
    )
    add("--rounds", type=int, default=3, help="turns of each arm (default %(default)s)")
    options = parser.parse_args(argv)
    if min(options.seconds, options.settle) <= 0 or options.rounds < 1 or options.latency_ms < 0:
        raise UsageError(
            "--seconds, --settle and --rounds are positive, --latency-ms is not negative"
        )
    policies.make(options.tuning)
    with tempfile.TemporaryDirectory() as folder:
        table = (
            FeatureTable.open(options.table)
            if options.table
            else small_table(Path(folder) / "clicks", rows=_ROWS, row_group_rows=_ROW_GROUP_ROWS)
        )
        turns = measure(table, options)
    found = summary(turns, options.tuning)
    for name, rate in found["rows_per_s"].items():
        say(
            f"{name:>8} {'' if name == options.tuning else 'readers':8} {rate / 1e6:8.2f} M rows/s   "
            f"{rate / found['rows_per_s'][str(found['best_fixed'])]:5.2f} of the best fixed"
        )
    say(
        f"{options.tuning} from one reader: {found['of_best_fixed']:.2f} of the best fixed choice "
        f"({found['best_fixed']} readers); decisions {found['decisions']}, the last after {found['last_change_s']} s; "
        + (
            "the same order everywhere"
            if found["same_order"]
            else f"{found['order_hashes']} different orders"
        )
    )
    return {
        "latency_ms": options.latency_ms,
        "batch_size": options.batch_size,
        "seconds": options.seconds,
        "rounds": options.rounds,
        "tuning": options.tuning,
        **found,
    }


if __name__ == "__main__":
    run(main)
