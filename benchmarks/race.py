"""A race of loaders over the same rows, drawn as it goes: no Java, no Spark, about a minute.

    python -m benchmarks.race [--rows 1600000] [--seconds 2]

Each loader makes the same batches: 8,192 shuffled rows, 13 float32 features, 26 int32 ids and a label as torch tensors.
The line across the bars is what the decoder alone can do on these files: no loader that reads them can pass it. Each
runs twice, in turns; its better turn counts.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.loaders import contenders, made_table
from etl.program import UsageError, run, say

LIMIT = "decode only"
ROUNDS = 2
BATCH_SIZE = 8192
_LABEL = 27
_LINE = 0.8  # of the bar's width
_SKIPPED = ("tight loop", "ours, plain Arrow")


def bar(rate: float, limit: float, width: int) -> str:
    """As long as `rate` of a little more than `limit`, at which there is a line. An arrow: it goes on."""
    filled, line = int(rate / limit * _LINE * width), int(_LINE * width)
    return "".join("▶" if filled >= width == n + 1 else "│" if n == line else "█" if n < filled else " "
                   for n in range(width))


def drawn(rates: Mapping[str, float], limit: float, width: int) -> list[str]:
    """A line for each loader, the fastest first."""
    label = max(_LABEL, *map(len, rates))
    return [f"{name:{label}} {bar(rate, limit, max(10, width - label - 28))} {rate / 1e6:6.2f} M rows/s "
            f"{rate / limit:6.2f}" for name, rate in sorted(rates.items(), key=lambda r: -r[1])]


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_600_000, help="rows of the table (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn (default %(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.seconds <= 0 or arguments.rows < 8 * BATCH_SIZE:
        raise UsageError(f"--seconds is positive, and --rows at least {8 * BATCH_SIZE}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        found, closing = contenders(made_table(Path(folder), arguments.rows), BATCH_SIZE, Path(folder))
        for close in closing:
            stack.callback(close)
        rates: dict[str, float] = {}
        width = shutil.get_terminal_size().columns
        limit = found.pop(LIMIT)
        limits: list[float] = []
        for number in range(ROUNDS):
            limits.append(limit(arguments.seconds))
            say(f"round {number + 1} of {ROUNDS}: the decoder alone does {limits[-1] / 1e6:.2f} M rows/s")
            for name, contender in found.items():
                if name not in _SKIPPED:
                    rates[name] = max(rates.get(name, 0.0), contender(arguments.seconds))
                    if number == 0 or not sys.stderr.isatty():
                        say(drawn({name: rates[name]}, max(limits), width)[0])
    say("\nbest of each; │ is the decoder's limit, the last column the share of it")
    for line in drawn(rates, max(limits), width):
        say(line)
    return {"rows_per_s": {name: round(rate) for name, rate in rates.items()}, "decode_rows_per_s": round(max(limits))}


if __name__ == "__main__":
    run(main)
