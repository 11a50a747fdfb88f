"""Measures what Petastorm's Reader and worker cost compared with plain Arrow: processor time per row, in pairs.

    python -m benchmarks.readers [TABLE] [--batch-size 8192] [--epochs 3] [--pairs 9]

Each turn is a process of its own that loads some epochs with fixed knobs; the two readers take turns, which of them is
first changes from pair to pair, and the ratio is taken within a pair. Processor time hardly depends on what else runs,
as far as it does not share the caches: the median of the ratios is quoted with its quartiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from typing import Any

from benchmarks.results import run_python
from benchmarks.small_table import small_table
from sluice.common.lines import say
from sluice.common.program import run

_TURN = """
import json, sys, time
from collections import deque
from sluice.ingest.knobs import Knobs
from sluice.ingest.loader import BatchLoader
from sluice.ingest.read.sources import Reading

table, reader, batch_size, epochs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
with BatchLoader(table, batch_size=batch_size, reading=Reading(reader=reader), read_ahead_epochs=epochs + 1,
                 knobs=Knobs(workers={"decode": 2})) as loader:
    deque(loader, maxlen=0)  # imports, compiled code and the files' pages are there after it
    began = time.process_time()
    for _ in range(epochs):
        deque(loader, maxlen=0)
    print(json.dumps({"ns": 1e9 * (time.process_time() - began) / (epochs * loader.plan.used),
                      "order_hash": loader.order_hash}))
    assert loader.reader == reader
"""


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.readers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "table", nargs="?", help="a feature table (default: one of 1.6 M rows is made)"
    )
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=9)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        table = (
            args.table
            or small_table(
                os.path.join(folder, "clicks"), rows=2_000_000, files=4, row_group_rows=32768
            ).uri
        )
        ratios, times = [], {"petastorm": [], "arrow": []}
        for pair in range(args.pairs):
            turns = {
                name: run_python("-c", _TURN, table, name, args.batch_size, args.epochs)["last"]
                for name in (("arrow", "petastorm") if pair % 2 else ("petastorm", "arrow"))
            }
            assert turns["arrow"]["order_hash"] == turns["petastorm"]["order_hash"]
            for name, turn in turns.items():
                times[name].append(turn["ns"])
            ratios.append(turns["petastorm"]["ns"] / turns["arrow"]["ns"])
            say(
                f"pair {pair + 1}: petastorm {turns['petastorm']['ns']:6.1f}, arrow "
                f"{turns['arrow']['ns']:6.1f} ns of processor time a row: {ratios[-1]:.3f}"
            )
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    say(
        f"Petastorm's Reader and worker cost {middle:.3f} times plain Arrow (quartiles {low:.3f} and {high:.3f})"
    )
    return {
        "ratio": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
        **{
            f"{name}_ns_a_row": round(statistics.median(values), 1)
            for name, values in times.items()
        },
    }


if __name__ == "__main__":
    run(main)
