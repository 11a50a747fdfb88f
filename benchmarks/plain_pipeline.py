"""The simplest way from raw clicks to an AUC: pandas, then a hand-written loop. It does not use Sluice.

    python benchmarks/plain_pipeline.py RAW.tsv [--width 16] [--batch-size 800]

All of the file is read at once, counts are squashed, categories get ids from the training rows (those seen less than
four times share one), and a DLRM with plain `torch.nn.Embedding`s, sparse gradients, Adagrad for them and Adam for the
rest sees the training rows once. `benchmarks/end_to_end.py` runs this beside Sluice. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time

import numpy as np
import pandas as pd
import torch
from torch import nn

COUNTS, CATEGORIES = [f"I{n}" for n in range(1, 14)], [f"C{n}" for n in range(1, 27)]
SEEN_AT_LEAST = 4


class Model(nn.Module):
    """A DLRM: embeddings and the counts' layer, their inner products, a tower over both."""

    def __init__(
        self, sizes: list[int], width: int, dense_layers: list[int], over_layers: list[int]
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width, sparse=True) for size in sizes)
        for table in self.tables:
            nn.init.uniform_(
                table.weight, -(table.num_embeddings**-0.5), table.num_embeddings**-0.5
            )
        self.bottom = tower([len(COUNTS), *dense_layers, width])
        features = len(sizes) + 1
        self.left, self.right = torch.tril_indices(features, features, -1)
        self.top = tower([width + len(self.left), *over_layers, 1])

    def forward(self, counts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(counts).relu()
        vectors = torch.stack(
            [bottom, *(table(ids[:, n]) for n, table in enumerate(self.tables))], 1
        )
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.left, self.right]
        return self.top(torch.cat([bottom, products], 1)).squeeze(1)


def tower(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for here, there in itertools.pairwise(widths):
        layers += [nn.Linear(here, there), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def features(path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """The counts, the ids, the labels, which rows are for the test, and the sizes of the tables."""
    names = ["label", *COUNTS, *CATEGORIES]
    frame = pd.read_csv(
        path, sep="\t", header=None, names=names, dtype=dict.fromkeys(CATEGORIES, "string")
    )
    part = np.random.default_rng(1).random(len(frame))
    train = part < 0.8
    counts = np.log(frame[COUNTS].fillna(0).clip(lower=-2) + 3).to_numpy(np.float32)
    ids, sizes = np.empty((len(frame), len(CATEGORIES)), np.int64), []
    for n, name in enumerate(CATEGORIES):
        seen = frame.loc[train, name].value_counts()
        known = {
            value: number + 1 for number, value in enumerate(seen.index[seen >= SEEN_AT_LEAST])
        }
        ids[:, n] = frame[name].map(known).fillna(0).astype(np.int64)
        sizes.append(len(known) + 1)
    return counts, ids, frame["label"].to_numpy(np.float32), part, sizes


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    ranks, good = pd.Series(scores).rank().to_numpy(), labels > 0
    return float(
        (ranks[good].sum() - good.sum() * (good.sum() + 1) / 2) / (good.sum() * (~good).sum())
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("raw", metavar="RAW.tsv")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--dense-layers", type=int, nargs="+", default=[64])
    parser.add_argument("--over-layers", type=int, nargs="+", default=[64, 32])
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--embedding-rate", type=float, default=0.03)
    parser.add_argument("--dense-rate", type=float, default=0.001)
    args = parser.parse_args()
    torch.manual_seed(1)
    begun = time.perf_counter()
    counts, ids, labels, part, sizes = features(args.raw)
    prepared = time.perf_counter()
    print(f"prepared in {prepared - begun:.1f} s", flush=True)
    model = Model(sizes, args.width, args.dense_layers, args.over_layers)
    of_tables = torch.optim.Adagrad(model.tables.parameters(), lr=args.embedding_rate)
    of_rest = torch.optim.Adam(
        [*model.bottom.parameters(), *model.top.parameters()], lr=args.dense_rate
    )
    train, test = np.flatnonzero(part < 0.8), np.flatnonzero(part >= 0.9)
    np.random.default_rng(2).shuffle(train)
    for first in range(0, len(train), args.batch_size):
        rows = train[first : first + args.batch_size]
        logits = model(torch.from_numpy(counts[rows]), torch.from_numpy(ids[rows]))
        loss = nn.functional.binary_cross_entropy_with_logits(
            logits, torch.from_numpy(labels[rows])
        )
        of_tables.zero_grad()
        of_rest.zero_grad()
        loss.backward()
        of_tables.step()
        of_rest.step()
    trained = time.perf_counter()
    with torch.no_grad():
        scores = np.concatenate(
            [
                model(torch.from_numpy(counts[rows]), torch.from_numpy(ids[rows])).numpy()
                for rows in np.array_split(test, max(1, len(test) // 4096))
            ]
        )
    print(
        json.dumps(
            {
                "auc": auc(labels[test], scores),
                "prepare_s": prepared - begun,
                "train_s": trained - prepared,
                "samples_per_s": len(train) / (trained - prepared),
                "rows": len(labels),
            }
        )
    )


if __name__ == "__main__":
    main()
