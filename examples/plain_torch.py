"""Trains a plain PyTorch model on plain Parquet files, without a feature table, Spark or our trainer.

python examples/plain_torch.py                      # makes a few files of its own
python examples/plain_torch.py 'clicks/*.parquet'   # roles guessed from names and types, and printed
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from sluice import Loader, report

BATCH_SIZE = 2048
ID_ROWS = 1000


class Model(torch.nn.Module):
    """A linear layer over the dense features and the summed embeddings of hashed ids."""

    def __init__(self, dense: int, keys: int) -> None:
        super().__init__()
        self.bags = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(ID_ROWS, 8, mode="sum") for _ in range(keys)
        )
        self.top = torch.nn.Linear(dense + 8 * keys, 1)

    def forward(
        self, dense: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        lengths = lengths.view(len(self.bags), -1).long()
        ids = torch.split(values.long() % ID_ROWS, lengths.sum(1).tolist())
        looked_up = [
            bag(i, torch.cumsum(n, 0) - n)
            for bag, i, n in zip(self.bags, ids, lengths, strict=True)
        ]
        return self.top(torch.cat([dense, *looked_up], 1)).squeeze(1)


def make_files(folder: Path) -> None:
    """Writes files of clicks that depend on a number and on the user."""
    random = np.random.default_rng(0)
    for number in range(4):
        rows = 20_000
        liking, user = random.normal(size=rows), random.integers(0, 500, rows)
        seen = [random.integers(0, 50, n) for n in random.integers(0, 5, rows)]
        chance = 1 / (1 + np.exp(-(liking + (user % 3) - 1)))
        pq.write_table(
            pa.table(
                {
                    "clicked": (random.random(rows) < chance).astype(np.int8),
                    "liking": liking.astype(np.float32),
                    "user": user.astype(np.int32),
                    "seen": pa.array(seen, pa.list_(pa.int32())),
                }
            ),
            folder / f"part-{number}.parquet",
        )


def main(source: str) -> None:
    torch.manual_seed(0)
    with Loader(source, batch_size=BATCH_SIZE, read_ahead_epochs=3) as loader:
        model = Model(len(loader.dense_names), len(loader.sparse_names))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def step(batch) -> float:
            optimizer.zero_grad()
            logits = model(batch.dense, batch.values, batch.lengths)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                logits, batch.label, batch.weight
            )
            loss.backward()
            optimizer.step()
            return loss.item()

        for epoch in range(3):
            losses = [step(batch) for batch in loader]
            print(
                f"epoch {epoch}: mean loss {np.mean(losses):.4f} over {len(losses)} steps, order {loader.order_hash}"
            )
        print(loader.tuning)
        print(report(loader, step, seconds=1.0))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as made:
            make_files(Path(made))
            main(made)
