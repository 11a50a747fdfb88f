"""Evaluates a model over a whole split: its quality, and evidence that may explain a poor result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from sluice.dlrm.evaluation.metrics import Array, Binned, Quality, auc, quality
from sluice.dlrm.ranks import Ranks
from sluice.dlrm.staging import staging_for
from sluice.dlrm.training.assemble import TrainingParts
from sluice.dlrm.training.input_checks import BatchChecker
from sluice.dlrm.training.model_input import ModelInput
from sluice.etl.ops.base import MAX_ID
from sluice.ingest.batch import Batch
from sluice.ingest.loader import BatchLoader

EXACT_ROWS = 20_000_000
"""The most rows of a split that are kept and sorted. The logits of larger splits are counted in bins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The results on one split, the same on every rank."""

    quality: Quality
    positives: int
    spread: float
    """Standard deviation of the logits."""
    largest_dense: tuple[str, float] | None
    """The dense column with the largest absolute value, and that value; None without dense columns."""
    columns: int
    """The number of sparse columns."""
    constant: tuple[str, ...]
    """Sparse columns with one id in all rows."""

    @property
    def undefined(self) -> str | None:
        """The message if a prediction is not a number, so that the quality is unknown; otherwise None."""
        if self.quality.logloss is not None:
            return None
        reason = "a prediction is not a number, so the model cannot be judged"
        if self.largest_dense is None:
            return reason
        column, value = self.largest_dense
        return f"{reason}; the largest input is {value:g} in {column!r}"


@torch.no_grad()
def evaluate(
    parts: TrainingParts,
    feed: BatchLoader,
    split: str,
    world: Ranks,
    *,
    exact_rows: int = EXACT_ROWS,
    through: Callable[[Any], Iterable[Batch]] = iter,
    receive: Callable[[Batch, torch.Tensor], None] = lambda *_: None,
) -> Findings:
    """Evaluates the batches of a split, `through(feed)`, on all ranks. Rows of weight 0 are ignored. `through` may end
    the evaluation early. `receive` gets each batch with its logits."""
    names, checker = feed.sparse_names, BatchChecker.of(parts.layout, feed, split)
    kept: list[Array] = [np.zeros((3, 0))]
    binned: Binned | None = None
    ranges = _Ranges(len(feed.dense_names), len(names))
    staging = staging_for(world.device)
    for batch in through(feed):
        checker.check(batch)
        sample = ModelInput.of(parts.layout, batch, staging).to(world.device)
        logits = parts.model(sample.dense, sample.sparse).cpu()
        receive(batch, logits)
        real = batch.weight > 0
        counts = batch.lengths.view(len(names), -1).sum(1, dtype=torch.int64).tolist()
        ids = [
            column_ids[real] if len(column_ids) == len(real) else column_ids
            for column_ids in torch.split(batch.values, counts)
        ]
        # Copies: the loader may reuse a batch's memory.
        rows = torch.stack([logits[real], batch.label[real], batch.weight[real]]).double()
        if len(feed) * len(batch.label) * world.ranks <= exact_rows:
            kept.append(rows.numpy())
        else:
            binned = binned or Binned()
            binned.add(*rows.numpy())
        if real.any():
            ranges.add(rows[0], rows[1], batch.dense[real], ids)
    if binned is None:
        kept = world.gather_objects(np.concatenate(kept, axis=1))
        measured = quality(*np.concatenate(kept, axis=1))
    else:
        measured = Binned(np.sum(world.gather_objects(binned.numbers), axis=0)).quality
    ranges.merge(world)
    return Findings(
        quality=measured,
        positives=ranges.positives,
        spread=ranges.spread,
        largest_dense=max(
            zip(feed.dense_names, ranges.largest.tolist(), strict=True),
            key=itemgetter(1),
            default=None,
        ),
        columns=len(names),
        constant=tuple(
            name
            for name, low, high in zip(names, ranges.low, ranges.high, strict=True)
            if low == high
        ),
    )


class _Ranges:
    """The ranges of a split's inputs, and the sums over its logits and labels."""

    def __init__(self, dense: int, sparse: int) -> None:
        self.largest = torch.zeros(dense)
        self.low = torch.full((sparse,), MAX_ID)
        self.high = torch.full((sparse,), -1)
        self.sums = torch.zeros(4, dtype=torch.float64)
        """The number of rows, and the sums of their labels, of their logits, and of the squares of these."""

    @property
    def positives(self) -> int:
        return int(self.sums[1])

    @property
    def spread(self) -> float:
        rows, _, total, squares = self.sums.tolist()
        return float(max(0.0, squares / rows - (total / rows) ** 2) ** 0.5)

    def add(self, logits: Any, labels: Any, dense: Any, ids: Sequence[Any]) -> None:
        sums = [len(logits), labels.sum(), logits.sum(), (logits**2).sum()]
        self.sums += torch.tensor(sums, dtype=torch.float64)
        self.largest = torch.maximum(self.largest, dense.nan_to_num(0, 0, 0).abs().amax(0))
        for i, column_ids in enumerate(ids):
            if len(column_ids):
                self.low[i] = torch.minimum(self.low[i], column_ids.min())
                self.high[i] = torch.maximum(self.high[i], column_ids.max())

    def merge(self, world: Ranks) -> None:
        """Combines the ranges of all ranks."""
        ranks = world.gather_objects((self.largest, self.low, self.high, self.sums))
        stacked = [torch.stack(parts) for parts in zip(*ranks, strict=True)]
        self.largest, self.low = stacked[0].amax(0), stacked[1].amin(0)
        self.high, self.sums = stacked[2].amax(0), stacked[3].sum(0)


_SINGLE_ROWS = 50_000  # of a split are looked at, over all ranks
_LEAST = 10  # positive and negative rows that the AUC of a column needs


class SingleColumns:
    """Keeps a rank's first rows: its dense columns, and the first id of each row in each sparse one."""

    def __init__(self, dense: Sequence[str], sparse: Sequence[str], world: Ranks) -> None:
        self._dense = tuple(dense)
        self._sparse = tuple(sparse)
        self._world = world
        self._room = _SINGLE_ROWS // world.ranks
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
