"""A training step, from its batch to its loss: `TrainingStep`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sluice.ingest.batch import Batch


@dataclass(slots=True)
class TrainingStep:
    """One rank's part of a batch, and what was made of it."""

    batch: Batch
    wait_s: float
    """Seconds spent in the loader's raw `next()`."""
    position: dict[str, Any]
    """The loader's position after this batch."""
    rows: int
    """The number of rows over all ranks, without padding."""
    others_s: float = 0.0
    """Seconds that this rank waited for the others, once it had its part."""
    loss: torch.Tensor | None = None
    """This rank's loss. The mean over all ranks is the loss of the batch. None: the step was not made, or all ranks
    skipped the batch, because its loss was not finite. Its rows do not count."""
