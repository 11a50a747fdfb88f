"""How well each column alone tells the label: `SingleColumns`, which keeps some evaluated rows for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from sluice.dlrm.evaluation.metrics import Array, auc
from sluice.dlrm.ranks import Ranks

if TYPE_CHECKING:
    from sluice.ingest.batch import Batch

ROWS = 50_000  # of a split are looked at, over all ranks
_LEAST = 10  # positive and negative rows that a figure needs


class SingleColumns:
    """Keeps a rank's first rows: its dense columns, and the first id of each row in each sparse one."""

    def __init__(self, dense: Sequence[str], sparse: Sequence[str], world: Ranks) -> None:
        self._dense = tuple(dense)
        self._sparse = tuple(sparse)
        self._world = world
        self._room = ROWS // world.ranks
        self._parts: list[Array] = []

    def add(self, batch: Batch) -> None:
        """Keeps the rows of a batch that are real, as long as there is room."""
        real = (batch.weight > 0).nonzero().flatten()[: self._room]
        self._room -= len(real)
        if not len(real):
            return
        columns = [batch.label[real].double(), *batch.dense[real].double().unbind(1)]
        at = torch.cumsum(batch.lengths, 0) - batch.lengths  # where each bag begins
        lengths = batch.lengths.view(len(self._sparse), -1)
        padded = torch.cat([batch.values, batch.values.new_zeros(1)])
        for starts, counts in zip(at.view(lengths.shape), lengths, strict=True):
            columns.append(torch.where(counts > 0, padded[starts], 0)[real].double())
        self._parts.append(torch.stack(columns).numpy())

    def result(self) -> dict[str, float]:
        """Column → the AUC of what it says alone, the highest first; nothing if a label is too rare. It has the same
        answer on every rank.

        A number is a score itself, in either direction. What ids say is learned on every other row and judged on the
        rest."""
        own = np.concatenate(self._parts, axis=1) if self._parts else None
        table = np.concatenate(
            [part for part in self._world.gather_objects(own) if part is not None], axis=1
        )
        label, values = table[0], table[1:]
        judged = label[1::2]
        if min(judged.sum(), len(judged) - judged.sum()) < _LEAST:
            return {}
        areas = {}
        for number, name in enumerate((*self._dense, *self._sparse)):
            is_dense = number < len(self._dense)
            if is_dense:
                scores = np.nan_to_num(values[number])
            else:
                # For each row, the rate of the label among the rows with an even number that have its id.
                _, place = np.unique(values[number], return_inverse=True)
                counts = np.bincount(place[::2], minlength=place.max() + 1)
                positives = np.bincount(place[::2], label[::2], minlength=place.max() + 1)
                scores = ((positives + label[::2].mean()) / (counts + 1))[place]
            area = auc(scores[1::2], judged, np.ones(len(judged)))
            assert area is not None  # both labels are there
            areas[name] = max(area, 1 - area) if is_dense else area
        return dict(sorted(areas.items(), key=lambda item: -item[1]))
