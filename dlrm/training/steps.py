"""What passes between a loader and the trainer: `Fetched` batches, `Taken` steps, and the protocol of a loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from sluice.ingest.stages.batch import Batch


@dataclass(frozen=True, slots=True)
class Fetched:
    """A batch of which every rank has its part."""

    batch: Batch
    wait_s: float
    """Seconds spent in the loader's raw `next()`."""
    position: dict[str, Any]
    """The loader's position after this batch and no other."""


class TrainingBatches(Protocol):
    """What training needs of a loader."""

    def __iter__(self) -> Any: ...

    def __len__(self) -> int: ...

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch; its "epoch" is the number of epochs that are finished."""

    def close(self) -> None:
        """Closes the loader, from any thread; a caller that waits for a batch gets a LoaderError."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A step that was made."""

    rows: int
    loss: torch.Tensor
    wait_s: float
    """Seconds spent in the loader's raw `next()`."""
    position: dict[str, Any]
    """The loader's position after this step's batch and no other."""
