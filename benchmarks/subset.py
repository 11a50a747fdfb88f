"""Checks whether `make bench SUBSET=1` ranks the loaders like `make bench`, and in what share of its time.

    python -m benchmarks.subset --rounds 3              about nine minutes on two quiet cores

The whole and the subset are run in turns, each as a program of its own. Told are, over all pairs of them, Kendall's τ
between their orders of loaders, τ between two runs of the whole (what noise leaves of an order), and the share of time.
The aims, fixed beforehand: τ of .8 or more in the median, in at most 36 % of the time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.results import ROOT
from sluice.common.program import run, say


def kendall(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """The share of pairs in the same order, less the share in the opposite one."""
    signs = [
        (one[a] - one[b]) * (other[a] - other[b]) for a, b in itertools.combinations(sorted(one), 2)
    ]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs)


def timed(*words: str) -> tuple[dict[str, float], float]:
    """The loaders' rows a second, and how long that took to find out."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.loaders", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])["rows_per_s"], time.perf_counter() - began


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default %(default)s)")
    rounds = parser.parse_args(argv).rounds
    wholes, subsets = [], []
    for number in range(rounds):
        for found, words in ((wholes, ()), (subsets, ("--subset",))):
            found.append(timed(*words))
        say(f"round {number + 1}: whole {wholes[-1]}, subset {subsets[-1]}")
    between = [
        kendall(whole, subset) for (whole, _), (subset, _) in itertools.product(wholes, subsets)
    ]
    noise = [kendall(one, other) for (one, _), (other, _) in itertools.combinations(wholes, 2)]
    share = statistics.median(s / w for (_, w), (_, s) in zip(wholes, subsets, strict=True))
    return {
        "kendall": round(statistics.median(between), 3),
        "kendall_least": round(min(between), 3),
        "kendall_of_the_whole_with_itself": round(statistics.median(noise), 3) if noise else None,
        "share_of_time": round(share, 3),
        "rounds": rounds,
    }


if __name__ == "__main__":
    run(main)
