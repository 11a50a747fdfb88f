"""What passes between a loader and the trainer: `Fetched` batches, `FinishedStep`s, and the protocol of a loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from sluice.ingest.batch import Batch


@dataclass(frozen=True, slots=True)
class Fetched:
    """A batch of which every rank has its part."""

    batch: Batch
    wait_s: float
    """Seconds spent in the loader's raw `next()`."""
    position: dict[str, Any]
    """The loader's position after this batch and no other."""
    rows: int
    """The number of rows that all ranks' parts have together, without those that only fill the batch."""


class TrainingBatches(Protocol):
    """What training needs of a loader."""

    def __iter__(self) -> Any: ...

    def __len__(self) -> int: ...

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch; its "epoch" is the number of epochs that are finished."""

    def close(self) -> None:
        """Closes the loader, from any thread; a caller that waits for a batch gets a LoaderError."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A training step that is done."""

    loss: torch.Tensor
    """This rank's loss, of which the mean over all ranks is the loss of the batch."""
    rank_rows: int
    """The number of this rank's rows, without those that only fill the batch."""
    rows: int
    """The number of rows of all ranks."""
    wait_s: float
    """Seconds spent in the loader's raw `next()`."""
    position: dict[str, Any]
    """The loader's position after this step's batch and no other."""
    batch: tuple[int, int] = (0, 0)
    """The batch's epoch, and its number in that."""
    skipped: bool = False
    """Whether the batch was left out on all ranks, as its loss was no number."""

    @classmethod
    def of(cls, fetched: Fetched, loss: torch.Tensor | None, wait_s: float) -> FinishedStep:
        """The step of a batch; without a loss, one that was left out: it counts no rows."""
        number = fetched.batch.epoch, fetched.batch.step
        if loss is None:
            return cls(torch.zeros(()), 0, 0, wait_s, fetched.position, number, skipped=True)
        return cls(loss, fetched.batch.rows, fetched.rows, wait_s, fetched.position, number)
