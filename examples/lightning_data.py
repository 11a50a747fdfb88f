"""`ClicksData`: a LightningDataModule around `sluice.Loader`.

    trainer.fit(model, datamodule=ClicksData("clicks/*.parquet", batch_size=8192), ckpt_path="last.ckpt")

Lightning saves the loader's position in each checkpoint. A run resumes at the same row, also in the middle of an epoch
and with another number of ranks. As a program, this file trains on synthetic files, stops, resumes, and compares the
weights with those of an uninterrupted run. It then measures the loading alone and the training, in turns with a torch
DataLoader over the same files. The last line is JSON.

    make test-adapters  # makes the environment, once
    OMP_NUM_THREADS=1 .venv-peers-lightning/bin/python examples/lightning_data.py --rounds 5
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from measuring import CATEGORIES, NUMBERS, VALUES, make_clicks, measure_in_turns
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from sluice import Loader

SETTINGS: dict[str, Any] = {
    "roles": {"label": "click", "dense": ["I*"], "sparse": ["C*"]},
    "as_": "dict",
}
EPOCHS_OF_A_TURN = 4
"""The epochs of a measurement of the loading alone. A single epoch would be too short."""


class ClicksData(lightning.LightningDataModule):
    """Loads batches as dicts of tensors for each rank of the trainer. `settings` go to `sluice.Loader`."""

    def __init__(self, source: str, batch_size: int, **settings: Any):
        super().__init__()
        self._settings = {"source": source, "batch_size": batch_size, **SETTINGS, **settings}

    def setup(self, stage: str) -> None:
        self.loader = Loader(
            rank=self.trainer.global_rank, ranks=self.trainer.world_size, **self._settings
        )

    def train_dataloader(self) -> Loader:
        # Lightning calls its state_dict and load_state_dict.
        return self.loader

    def teardown(self, stage: str) -> None:
        self.loader.close()


class Model(lightning.LightningModule):
    """Two linear layers over the numbers and the embeddings of the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleDict(
            {name: torch.nn.Embedding(VALUES, 8, sparse=True) for name in CATEGORIES}
        )
        self.top = torch.nn.Sequential(
            torch.nn.Linear(len(NUMBERS) + 8 * len(CATEGORIES), 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 1),
        )

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        looked_up = [table(batch[name]) for name, table in self.tables.items()]
        logits = self.top(
            torch.cat([torch.stack([batch[name] for name in NUMBERS], 1), *looked_up], 1)
        ).squeeze(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["click"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByHand(IterableDataset[dict[str, torch.Tensor]]):
    """A dataset as one writes it without Sluice: each worker reads row groups, shuffles their rows and cuts batches."""

    def __init__(self, folder: Path, batch_size: int):
        self.batch_size = batch_size
        self.groups = [
            (path, n)
            for path in sorted(folder.glob("*.parquet"))
            for n in range(pq.read_metadata(path).num_row_groups)
        ]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        info, random = get_worker_info(), np.random.default_rng()
        mine = self.groups[info.id :: info.num_workers] if info else self.groups
        for path, number in (mine[n] for n in random.permutation(len(mine))):
            table = pq.ParquetFile(path).read_row_group(number)
            order = random.permutation(table.num_rows)
            columns = {
                name: torch.from_numpy(table[name].to_numpy()[order]) for name in table.column_names
            }
            for at in range(0, table.num_rows - self.batch_size + 1, self.batch_size):
                yield {name: column[at : at + self.batch_size] for name, column in columns.items()}


def fitted(data: Any, ckpt_path: str | None = None, **settings: Any) -> lightning.Trainer:
    """Returns the trainer after `fit`. The model starts with the same weights at each call."""
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, "max_epochs": 1, **settings},
    )
    trainer.fit(Model(), data, ckpt_path=ckpt_path)
    return trainer


def resumes_exactly(files: str, folder: Path, batch_size: int) -> bool:
    """Returns whether a run of three epochs that is stopped in the second one and resumed ends with the weights of an
    uninterrupted run."""
    with Loader(files, batch_size=batch_size, **SETTINGS) as loader:
        steps = len(loader) + len(loader) // 2
    keep = ModelCheckpoint(folder, filename="middle", every_n_train_steps=steps)
    fitted(
        ClicksData(files, batch_size),
        max_epochs=3,
        max_steps=steps,
        callbacks=[keep],
        enable_checkpointing=True,
    )
    ends = [
        fitted(
            ClicksData(files, batch_size), max_epochs=3, ckpt_path=path
        ).lightning_module.parameters()
        for path in (None, str(folder / "middle.ckpt"))
    ]
    return all(torch.equal(tensor, other) for tensor, other in zip(*ends, strict=True))


def loaded(batches: Iterable[dict[str, torch.Tensor]]) -> int:
    return sum(len(batch["click"]) for _ in range(EPOCHS_OF_A_TURN) for batch in batches)


def loaded_by_ours(files: str, batch_size: int) -> int:
    with Loader(
        files, batch_size=batch_size, read_ahead_epochs=EPOCHS_OF_A_TURN, **SETTINGS
    ) as loader:
        return loaded(loader)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, number in (("--rows", 500_000), ("--batch-size", 8192), ("--rounds", 3)):
        parser.add_argument(name, type=int, default=number)
    parser.add_argument(
        "--workers", type=int, nargs="*", default=[0, 2], help="of the torch DataLoader"
    )
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as made:
        folder, files, size = Path(made), f"{made}/*.parquet", given.batch_size
        table = pa.table(make_clicks(given.rows))
        for number in range(4):
            pq.write_table(
                table.slice(number * given.rows // 4, given.rows // 4),
                folder / f"{number}.parquet",
                row_group_size=32_768,
            )
        resumed = resumes_exactly(files, folder, size)
        by_hand = {
            f"torch DataLoader, {n} workers": DataLoader(
                ByHand(folder, size), batch_size=None, num_workers=n
            )
            for n in given.workers
        }
        loading = measure_in_turns(
            {
                "sluice": lambda: loaded_by_ours(files, size),
                **{name: lambda theirs=theirs: loaded(theirs) for name, theirs in by_hand.items()},
            },
            given.rounds,
        )
        training = measure_in_turns(
            {
                "sluice": lambda: fitted(ClicksData(files, size)).global_step * size,
                **{
                    name: lambda theirs=theirs: fitted(theirs).global_step * size
                    for name, theirs in by_hand.items()
                },
            },
            given.rounds,
        )
        print(
            json.dumps(
                {
                    "rows": given.rows,
                    "resumed_exactly": resumed,
                    "loading": loading,
                    "training": training,
                }
            )
        )


if __name__ == "__main__":
    main()
