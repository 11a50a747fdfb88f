"""Synthetic clicks with known probabilities, and a small model of them, for the model examples in this folder.

Each id of a column has a vector. The probability of a click depends on numbers, and on products of the vectors of two
columns. A model must learn the vectors and their products.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from sluice import Loader, Order

IDS, NUMBERS, COLUMNS, HIDDEN = 100, 4, 8, 3
ROLES = {"label": "click", "dense": ["I*"], "sparse": ["C*"]}
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def write_clicks(folder: Path, rows: int, *, seed: int, shop: int = 0, drift: float = 0.0) -> float:
    """Writes clicks to a new folder, and returns the AUC of their true probabilities. `drift` is the share of each
    vector's variance that only this shop has. With 0, all shops are the same."""
    world, random = np.random.default_rng(0), np.random.default_rng(seed)
    common, own = (
        rng.normal(size=(COLUMNS, IDS, HIDDEN))
        for rng in (world, np.random.default_rng(1000 + shop))
    )
    vectors = np.sqrt(1 - drift) * common + np.sqrt(drift) * own
    numbers = random.normal(size=(rows, NUMBERS)).astype(np.float32)
    ids = (IDS * random.random((rows, COLUMNS)) ** 2).astype(np.int32)
    looked_up = np.stack([vectors[c, ids[:, c]] for c in range(COLUMNS)], 1)
    logit = numbers @ np.linspace(0.8, -0.4, NUMBERS) - 1
    for column, other in zip(range(0, COLUMNS, 2), range(1, COLUMNS, 2), strict=True):
        logit = logit + 0.6 * (looked_up[:, column] * looked_up[:, other]).sum(1)
    clicks = (random.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    folder.mkdir(parents=True)
    pq.write_table(
        pa.table(
            {
                **{f"I{n}": numbers[:, n] for n in range(NUMBERS)},
                **{f"C{n}": ids[:, n] for n in range(COLUMNS)},
                "click": clicks,
            }
        ),
        folder / "clicks.parquet",
        row_group_size=16_384,
    )
    return auc(torch.from_numpy(logit), torch.from_numpy(clicks))


def load_batches(folder: Path, batch_size: int = 256, *, shuffle: bool = True) -> list[Batch]:
    """Returns all batches of an epoch as a list: numbers [rows, NUMBERS], ids [COLUMNS, rows] and clicks."""
    with Loader(
        str(folder),
        batch_size=batch_size,
        roles=ROLES,
        order=Order(shuffle=shuffle, last="pad"),
        tuning="fixed",
    ) as loader:
        batches = []
        for batch in loader:
            real = batch.weight > 0
            batches.append(
                (
                    batch.dense[real],
                    batch.values.view(COLUMNS, -1)[:, real].long(),
                    batch.label[real],
                )
            )
    return batches


class Model(torch.nn.Module):
    """A model of embeddings and linear layers. The layers get numbers, vectors, and the products of all pairs of
    vectors."""

    def __init__(self, width: int = 8, layers: Sequence[int] = (64, 32)) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(COLUMNS * IDS, width)
        torch.nn.init.normal_(self.table.weight, std=0.1)
        self.register_buffer("first", torch.arange(COLUMNS).unsqueeze(1) * IDS)
        self.register_buffer("pairs", torch.triu_indices(COLUMNS, COLUMNS, 1))
        sizes = [NUMBERS + COLUMNS * width + self.pairs.shape[1], *layers]
        parts = [
            part
            for a, b in itertools.pairwise(sizes)
            for part in (torch.nn.Linear(a, b), torch.nn.ReLU())
        ]
        self.over = torch.nn.Sequential(*parts, torch.nn.Linear(sizes[-1], 1))

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        vectors = self.table(ids + self.first).transpose(0, 1)
        dots = (vectors @ vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.over(torch.cat([dense, vectors.flatten(1), dots], 1)).squeeze(1)


def train_model(
    model: Model, batches: Sequence[Batch], *, rate: float = 0.01, loss: Loss | None = None
) -> Model:
    """Returns the model after an epoch of Adam. `loss` gets logits, clicks, and a batch's numbers and ids. None is the
    cross-entropy."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for dense, ids, clicks in batches:
        optimizer.zero_grad()
        logits = model(dense, ids)
        (
            binary_cross_entropy_with_logits(logits, clicks)
            if loss is None
            else loss(logits, clicks, dense, ids)
        ).backward()
        optimizer.step()
    return model


def auc(scores: torch.Tensor, clicks: torch.Tensor) -> float:
    """Returns the probability that a row with a click has a higher score than one without."""
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    hits = clicks.sum().item()
    above = float(ranks[clicks > 0].sum()) - hits * (hits + 1) / 2
    return above / (hits * (len(scores) - hits))


@torch.no_grad()
def compute_auc(model: Model, batches: Sequence[Batch]) -> float:
    """Returns a model's AUC."""
    scores = torch.cat([model(dense, ids) for dense, ids, _ in batches])
    return auc(scores, torch.cat([clicks for *_, clicks in batches]))
