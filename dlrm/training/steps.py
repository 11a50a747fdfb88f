"""The data that a loader and the trainer exchange: `Fetched` batches, `FinishedStep`s, and the protocol of a loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from sluice.ingest.batch import Batch


@dataclass(frozen=True, slots=True)
class Fetched:
    """One rank's part of a batch."""

    batch: Batch
    wait_s: float
    """Seconds spent in the loader's raw `next()`."""
    position: dict[str, Any]
    """The loader's position after this batch."""
    rows: int
    """The number of rows over all ranks, without padding."""
    others_s: float = 0.0
    """Seconds that this rank waited for the others, once it had its part."""


class TrainingBatches(Protocol):
    """The methods of a loader that training needs."""

    def __iter__(self) -> Any: ...

    def __len__(self) -> int: ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next batch. Its "epoch" is the number of finished epochs."""

    def close(self) -> None:
        """Closes the loader, from any thread. A thread that waits for a batch gets a LoaderError."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The result of one training step."""

    fetched: Fetched
    """The step's batch."""
    loss: torch.Tensor | None
    """This rank's loss. The mean over all ranks is the loss of the batch. None: all ranks skipped the batch, because
    its loss was not finite. Its rows do not count."""
    wait_s: float
    """Seconds spent in the loader's raw `next()`."""
