"""How good a shuffle is, window by window, against a global one: how far rows travel, what neighbours still share.

    python -m benchmarks.shuffle [--rows 1048576] [--row-group 32768]

The table is the worst case: rows in the order of time, with a click rate that drifts. Three figures for each window:

* travel: the mean distance between a row's place in the table and in the epoch, as a share of a global shuffle's;
* drift of batches: how much more the batches' mean time varies than it does after a global shuffle (1 is as good);
* cover: how evenly a batch of 8,192 rows draws from the tenths of the table (1 is as evenly as a global shuffle).
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from etl.program import run, say
from ingest.plan import RowsPlan

BATCH = 8192
SEEDS = 3


def epoch_order(plan: RowsPlan, epoch: int) -> np.ndarray:
    """Places in the table of the rows of an epoch, in the order in which they come."""
    first = np.cumsum([0, *plan.groups[0]])
    streams = []
    for stream in range(plan.streams):
        rows = []
        for window in plan.windows(epoch, (stream,)):
            places = np.concatenate([np.arange(first[s.group] + s.start, first[s.group] + s.stop)
                                     for s in window.slices])
            order = plan.order(epoch, window)
            rows.append(places if order is None else places[order])
        streams.append(np.concatenate(rows)[:plan.steps * plan.stream_rows].reshape(plan.steps, plan.stream_rows))
    return np.concatenate(streams, axis=1).reshape(-1)


def figures(order: np.ndarray, rows: int) -> tuple[float, float, float]:
    """Travel, spread of the batches' mean place, and entropy of the tenths in a batch, not yet compared."""
    batches = order[:len(order) // BATCH * BATCH].reshape(-1, BATCH)
    travel = np.abs(order - np.arange(len(order))).mean() / rows
    tenths = np.stack([(batches * 10 // rows == t).mean(1) for t in range(10)])
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nansum(tenths * np.log(tenths), 0).mean() / np.log(10)
    return travel, batches.mean(1).std() / rows, entropy


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shuffle", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2**20, help="rows of the table (default %(default)s)")
    parser.add_argument("--row-group", type=int, default=2**15, help="rows of a row group (default %(default)s)")
    arguments = parser.parse_args(argv)
    rows = arguments.rows
    groups = (tuple([arguments.row_group] * (rows // arguments.row_group)),)
    best = np.mean([figures(np.random.default_rng(s).permutation(rows), rows) for s in range(SEEDS)], 0)
    found: dict[str, Any] = {}
    for streams, window in ((1, 32768), (8, 4096), (8, 32768), (8, 131072), (16, 32768), (32, 32768), (64, 32768)):
        plans = [RowsPlan(groups=groups, batch_size=BATCH, seed=s, streams=streams, window_rows=window)
                 for s in range(SEEDS)]
        travel, drift, cover = np.mean([figures(epoch_order(p, 0), rows) for p in plans], 0) / best
        name = f"{streams} streams of {window}"
        found[name] = {"travel": round(travel, 3), "drift": round(drift, 2), "cover": round(cover, 3)}
        say(f"{name:24} travel {travel:5.2f}   drift of batches {drift:6.2f}×   cover {cover:5.2f}")
    return found


if __name__ == "__main__":
    run(main)
