"""How good a shuffle is, window by window, against a global one: how far rows travel, what neighbours still share, and
what that does to a model.

    python -m benchmarks.shuffle [--rows 1048576] [--row-group 32768]

The table is the worst case: rows in the order of time, with a click rate and tastes that drift. For each window:

* travel: the mean distance between a row's place in the table and in the epoch, as a share of a global shuffle's;
* drift of batches: how much more the batches' mean time varies than it does after a global shuffle (1 is as good);
* cover: how evenly a batch of 8,192 rows draws from the tenths of the table (1 is as evenly as a global shuffle);
* label autocorrelation: how well one batch's click rate foretells the next one's (0 after a global shuffle);
* AUC of a small model (logistic regression on hashed ids, Adagrad, one epoch in this order), over all rows.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from sluice.common.program import run, say
from sluice.ingest.row_order import RowsPlan

BATCH = 8192
SEEDS = 3
IDS, FEATURES, DAYS = 2000, 4, 4
MODEL_BATCH, RATE = 2048, 0.1


def epoch_order(plan: RowsPlan, epoch: int) -> np.ndarray:
    """Places in the table of the rows of an epoch, in the order in which they come."""
    first = np.cumsum([0, *plan.groups[0]])
    streams = []
    for stream in range(plan.streams):
        rows = []
        for window in plan.windows(epoch, (stream,)):
            places = np.concatenate(
                [
                    np.arange(first[s.group] + s.start, first[s.group] + s.stop)
                    for s in window.slices
                ]
            )
            order = plan.order(epoch, window)
            rows.append(places if order is None else places[order])
        streams.append(
            np.concatenate(rows)[: plan.steps * plan.stream_rows].reshape(
                plan.steps, plan.stream_rows
            )
        )
    return np.concatenate(streams, axis=1).reshape(-1)


def figures(order: np.ndarray, rows: int) -> tuple[float, float, float]:
    """Travel, spread of the batches' mean place, and entropy of the tenths in a batch, not yet compared."""
    batches = order[: len(order) // BATCH * BATCH].reshape(-1, BATCH)
    travel = np.abs(order - np.arange(len(order))).mean() / rows
    tenths = np.stack([(batches * 10 // rows == t).mean(1) for t in range(10)])
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nansum(tenths * np.log(tenths), 0).mean() / np.log(10)
    return travel, batches.mean(1).std() / rows, entropy


def clicks(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ids [rows, FEATURES], each below IDS, and labels, in the order of time. The click rate follows days and a trend;
    which ids are seen, and what they are worth, changes slowly."""
    random = np.random.default_rng(seed)
    time = np.arange(rows) / rows
    centre = (time * IDS * 0.5)[:, None]  # the ids that are in fashion
    seen = centre + random.exponential(IDS * 0.15, (rows, FEATURES))
    ids = (seen.astype(np.int64) + 7919 * np.arange(FEATURES)) % IDS
    taste = random.normal(0, 0.5, (2, FEATURES, IDS))
    worth = taste[0][np.arange(FEATURES), ids] + time[:, None] * taste[1][np.arange(FEATURES), ids]
    logits = worth.sum(1) - 1.5 + 0.8 * np.sin(2 * np.pi * DAYS * time) + 0.8 * time
    return ids, (random.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.float64)


def autocorrelation(labels: np.ndarray) -> float:
    """How the batches' click rates go along with those one batch on."""
    rates = labels[: len(labels) // BATCH * BATCH].reshape(-1, BATCH).mean(1)
    return float(np.corrcoef(rates[:-1], rates[1:])[0, 1])


def learned(ids: np.ndarray, labels: np.ndarray, order: np.ndarray) -> float:
    """AUC over all rows after one epoch in this order."""
    weights, sums, bias, bias_sum = (
        np.zeros((FEATURES, IDS)),
        np.full((FEATURES, IDS), 1e-6),
        0.0,
        1e-6,
    )
    features = np.arange(FEATURES)
    for at in range(0, len(order) - MODEL_BATCH + 1, MODEL_BATCH):
        rows = order[at : at + MODEL_BATCH]
        gap = 1 / (1 + np.exp(-weights[features, ids[rows]].sum(1) - bias)) - labels[rows]
        slope = np.zeros_like(weights)
        np.add.at(slope, (features, ids[rows]), gap[:, None] / MODEL_BATCH)
        sums += slope**2
        weights -= RATE * slope / np.sqrt(sums)
        bias_sum += gap.mean() ** 2
        bias -= RATE * gap.mean() / np.sqrt(bias_sum)
    return auc(weights[features, ids].sum(1), labels)


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """The share of pairs of a click and a non-click that are in the right order."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, len(scores) + 1)
    ones = labels.sum()
    return float((ranks[labels > 0].sum() - ones * (ones + 1) / 2) / (ones * (len(labels) - ones)))


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shuffle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rows", type=int, default=2**20, help="rows of the table (default %(default)s)"
    )
    parser.add_argument(
        "--row-group", type=int, default=2**15, help="rows of a row group (default %(default)s)"
    )
    arguments = parser.parse_args(argv)
    rows = arguments.rows
    groups = (tuple([arguments.row_group] * (rows // arguments.row_group)),)
    ids, labels = clicks(rows)
    shuffled = [np.random.default_rng(s).permutation(rows) for s in range(SEEDS)]
    best = np.mean([figures(order, rows) for order in shuffled], 0)
    found: dict[str, Any] = {}

    def tell(name: str, orders: list[np.ndarray]) -> None:
        travel, drift, cover = np.mean([figures(order, rows) for order in orders], 0) / best
        same = np.mean([autocorrelation(labels[order]) for order in orders])
        score = np.mean([learned(ids, labels, order) for order in orders])
        found[name] = {
            "travel": round(travel, 3),
            "drift": round(drift, 2),
            "cover": round(cover, 3),
            "autocorrelation": round(same, 3),
            "auc": round(score, 4),
        }
        say(
            f"{name:24} travel {travel:5.2f}   drift of batches {drift:6.2f}×   cover {cover:5.2f}   label "
            f"autocorrelation {same:6.2f}   AUC {score:.4f}"
        )

    tell("global", shuffled)
    tell("in the order of time", [np.arange(rows)])
    for streams, window in (
        (1, 32768),
        (8, 4096),
        (8, 32768),
        (8, 131072),
        (16, 32768),
        (32, 32768),
        (64, 32768),
    ):
        plans = [
            RowsPlan(groups=groups, batch_size=BATCH, seed=s, streams=streams, window_rows=window)
            for s in range(SEEDS)
        ]
        tell(f"{streams} streams of {window}", [epoch_order(p, 0) for p in plans])
    return found


if __name__ == "__main__":
    run(main)
