"""What travels between a loader and the trainer: `Fetched` batches, `Taken` steps, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from sluice.ingest.stages.batch import Batch


@dataclass(frozen=True, slots=True)
class Fetched:
    """A batch that every rank has its part of."""

    batch: Batch
    wait_s: float
    """In the loader's raw `next()`."""
    position: dict[str, Any]
    """The loader's, after this batch and no other."""


class TrainingBatches(Protocol):
    """What training needs of a loader."""

    def __iter__(self) -> Any: ...

    def __len__(self) -> int: ...

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is; its "epoch" is the number of epochs that are finished."""

    def close(self) -> None:
        """From any thread; whoever waits for a batch gets a LoaderError."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A step that was made."""

    rows: int
    loss: torch.Tensor
    wait_s: float
    """In the loader's raw `next()`."""
    position: dict[str, Any]
    """The loader's, after this step's batch and no other."""
