"""Evaluates a model over a whole split: its quality, also by slices, and evidence that may explain a poor result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from sluice.dlrm.evaluation.metrics import Array, Binned, Quality, auc, quality
from sluice.dlrm.ranks import Ranks
from sluice.dlrm.training.assemble import TrainingParts
from sluice.dlrm.training.input_checks import BatchChecker
from sluice.dlrm.training.model_input import ModelInput
from sluice.etl.ops.base import MAX_ID
from sluice.ingest.batch import Batch
from sluice.ingest.gpu import staging_for
from sluice.ingest.loader import BatchLoader

SLICES = 8
"""Number of ids of a sliced column that are evaluated by themselves."""
EXACT_ROWS = 20_000_000
"""The most rows of a split that are kept and sorted. The logits of larger splits are counted in bins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The results on one split, the same on every rank."""

    quality: Quality
    slices: Mapping[str, Mapping[int, Quality]]
    """Column → id → quality on the rows with this id, for the column's most frequent ids in falling order."""
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
        found = "a prediction is not a number, so the model cannot be judged"
        if self.largest_dense is None:
            return found
        column, value = self.largest_dense
        return f"{found}; the largest input is {value:g} in {column!r}"


@torch.no_grad()
def evaluate(
    parts: TrainingParts,
    feed: BatchLoader,
    checker: BatchChecker,
    world: Ranks,
    *,
    slices: Sequence[str] = (),
    exact_rows: int = EXACT_ROWS,
    singles: SingleColumns | None = None,
    through: Callable[[Any], Iterable[Batch]] = iter,
) -> Findings:
    """Evaluates all batches of `through(feed)` on all ranks. Rows of weight 0 are ignored. `through` may end the
    evaluation early. `singles` receives each batch."""
    names = list(feed.sparse_names)
    sliced = [names.index(name) for name in slices]
    counter: _Exact | _Rough | None = None
    ranges = _Ranges(len(feed.dense_names), len(names))
    staging = staging_for(world.device)
    for batch in through(feed):
        checker.check(batch)
        if singles is not None:
            singles.add(batch)
        sample = ModelInput.of(parts.layout, batch, staging).to(world.device)
        logits = parts.model(sample.dense, sample.sparse).cpu()
        real = batch.weight > 0
        counts = batch.lengths.view(len(names), -1).sum(1, dtype=torch.int64).tolist()
        ids = [
            column_ids[real] if len(column_ids) == len(real) else column_ids
            for column_ids in torch.split(batch.values, counts)
        ]
        # Copies: the loader may reuse a batch's memory. float64 holds any id.
        columns = logits[real], batch.label[real], batch.weight[real], *(ids[i] for i in sliced)
        rows = torch.stack([column.double() for column in columns])
        if counter is None:  # All ranks choose at the same batch, as they exchange data for it.
            few = len(feed) * len(batch.label) * world.ranks <= exact_rows
            counter = _Exact() if few else _Rough(rows.numpy(), world)
        if real.any():
            counter.add(rows.numpy())
            ranges.add(rows[0], batch.dense[real], ids)
    if counter is None:
        raise ValueError("an evaluation over no rows")
    counted = counter.result(world)
    ranges.merge(world)
    largest_dense = None
    if len(ranges.largest):
        top = int(ranges.largest.argmax())
        largest_dense = feed.dense_names[top], float(ranges.largest[top])
    return Findings(
        quality=counted.quality,
        slices=dict(zip(slices, counted.slices, strict=True)),
        positives=counted.positives,
        spread=ranges.spread,
        largest_dense=largest_dense,
        columns=len(names),
        constant=tuple(
            name
            for name, low, high in zip(names, ranges.low, ranges.high, strict=True)
            if low == high
        ),
    )


class _Ranges:
    """The ranges of a split's inputs, and the sums over its logits."""

    def __init__(self, dense: int, sparse: int) -> None:
        self.largest = torch.zeros(dense)
        self.low = torch.full((sparse,), MAX_ID)
        self.high = torch.full((sparse,), -1)
        self.logits = torch.zeros(3, dtype=torch.float64)
        """Count, sum, and sum of squares."""

    @property
    def spread(self) -> float:
        count, total, squares = self.logits.tolist()
        return float(max(0.0, squares / count - (total / count) ** 2) ** 0.5)

    def add(self, logits: Any, dense: Any, ids: Sequence[Any]) -> None:
        self.logits += torch.tensor(
            [len(logits), logits.sum(), (logits**2).sum()], dtype=torch.float64
        )
        self.largest = torch.maximum(self.largest, dense.nan_to_num(0, 0, 0).abs().amax(0))
        for i, column_ids in enumerate(ids):
            if len(column_ids):
                self.low[i] = torch.minimum(self.low[i], column_ids.min())
                self.high[i] = torch.maximum(self.high[i], column_ids.max())

    def merge(self, world: Ranks) -> None:
        """Combines the ranges of all ranks."""
        ranks = world.gather_objects((self.largest, self.low, self.high, self.logits))
        stacked = [torch.stack(parts) for parts in zip(*ranks, strict=True)]
        self.largest, self.low = stacked[0].amax(0), stacked[1].amin(0)
        self.high, self.logits = stacked[2].amax(0), stacked[3].sum(0)


class _Counted(NamedTuple):
    quality: Quality
    slices: list[dict[int, Quality]]
    positives: int


class _Exact:
    """Keeps all rows: logit, label, weight, and the ids of each sliced column."""

    def __init__(self) -> None:
        self._rows: list[Any] = []

    def add(self, rows: Any) -> None:
        self._rows.append(rows)

    def result(self, world: Ranks) -> _Counted:
        own_rows = np.concatenate(self._rows, axis=1) if self._rows else None
        table = np.concatenate([r for r in world.gather_objects(own_rows) if r is not None], axis=1)
        parts = [{i: quality(*table[:3, ids == i]) for i in _frequent(ids)} for ids in table[3:]]
        return _Counted(quality(*table[:3]), parts, int(table[1].sum()))


class _Rough:
    """Counts in bins. Its slices are the most frequent ids of the first batch, because no rows are kept."""

    def __init__(self, first: Any, world: Ranks) -> None:
        table = np.concatenate(world.gather_objects(first), axis=1)
        self._whole, self._positives = Binned(), 0
        self._parts = [{i: Binned() for i in _frequent(ids)} for ids in table[3:]]

    def add(self, rows: Any) -> None:
        self._whole.add(*rows[:3])
        self._positives += int(rows[1].sum())
        for parts, ids in zip(self._parts, rows[3:], strict=True):
            for number, part in parts.items():
                part.add(*rows[:3, ids == number])

    def result(self, world: Ranks) -> _Counted:
        # All ranks slice by the same ids in the same order.
        own_counts = [
            self._whole.numbers,
            *(part.numbers for parts in self._parts for part in parts.values()),
        ]
        ranks = world.gather_objects((own_counts, self._positives))
        qualities = [
            Binned(np.sum(arrays, axis=0)).quality
            for arrays in zip(*(arrays for arrays, _ in ranks), strict=True)
        ]
        slice_qualities = iter(qualities[1:])
        return _Counted(
            qualities[0],
            [{i: next(slice_qualities) for i in parts} for parts in self._parts],
            sum(positives for _, positives in ranks),
        )


def _frequent(ids: Any) -> list[int]:
    """Returns the most frequent ids in falling order."""
    unique_ids, counts = np.unique(ids, return_counts=True)
    return [int(i) for i in unique_ids[np.argsort(-counts, kind="stable")][:SLICES]]


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
