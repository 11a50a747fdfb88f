"""Saves the loader's position in a checkpoint of torch.distributed.checkpoint, and resumes on any number of ranks.

    torchrun --nproc-per-node=2 examples/distributed_checkpoint.py 'clicks/*.parquet' saved --steps 20
    torchrun --nproc-per-node=4 examples/distributed_checkpoint.py 'clicks/*.parquet' saved

The second command continues with the next row, and every row of the epoch is trained on once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from sluice import Loader

ID_ROWS = 1000
SETTINGS: dict[str, Any] = {
    "batch_size": 64,
    "roles": {"label": "clicked", "dense": ["price"], "sparse": ["item"]},
    "hash": {"item": ID_ROWS},
    "fill": 0,
}


class Model(torch.nn.Module):
    """A linear layer over a number and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.items = torch.nn.Embedding(ID_ROWS + 2, 8)
        self.top = torch.nn.Linear(9, 1)

    def forward(self, dense: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([dense, self.items(items)], 1)).squeeze(1)


class Training:
    """A model and its optimizer in a form that does not depend on the number of ranks."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def train(
    source: str,
    saved: Path,
    steps: int | None,
    observe: Callable[[Any], None] = lambda batch: None,
) -> None:
    """Trains until the end of an epoch, or for some steps, and saves. It resumes if `saved` holds a checkpoint."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with Loader(source, rank=dist.get_rank(), ranks=dist.get_world_size(), **SETTINGS) as loader:
        # torch calls state_dict and load_state_dict of both.
        checkpoint = {"training": Training(model, optimizer), "loader": loader}
        if saved.exists():
            dcp.load(checkpoint, checkpoint_id=saved)
        for number, batch in enumerate(loader, 1):
            observe(batch)
            optimizer.zero_grad()
            logits = model(batch.dense, batch["item"])
            torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
            optimizer.step()
            if number == steps:
                break
        dcp.save(checkpoint, checkpoint_id=saved)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source")
    parser.add_argument("saved", type=Path)
    parser.add_argument("--steps", type=int, help="stop after this number of steps")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        train(given.source, given.saved, given.steps)
        if os.environ["RANK"] == "0":
            print(f"saved {given.saved}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
