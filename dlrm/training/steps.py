"""The data that a loader and the trainer exchange: `Fetched` batches and `FinishedStep`s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
