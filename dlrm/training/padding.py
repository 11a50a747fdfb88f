"""Rows that only fill the last batch of an epoch, and how little the model gets to see of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sluice.ingest.batch import Batch


def emptied(batch: Batch) -> Batch:
    """The batch with nothing in the rows that only fill it: their numbers and labels are 0, whatever a transform made
    of them, and they look up no vector, so that no optimiser takes a row of a table for seen. A batch of real rows is
    returned as it is."""
    rows = len(batch.label)
    if batch.rows == rows:
        return batch
    real = batch.weight != 0
    lengths = batch.lengths.view(-1, rows)
    looked_up = torch.repeat_interleave(real.repeat(len(lengths)), batch.lengths)
    return replace(
        batch,
        dense=torch.where(real.unsqueeze(1), batch.dense, 0.0),
        values=batch.values[looked_up],
        lengths=(lengths * real).to(lengths.dtype).flatten(),
        label=torch.where(real, batch.label, 0.0),
    )
