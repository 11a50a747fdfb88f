"""Evaluates a model over a whole split: how good it is, also by slices, and what would explain a poor result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from sluice.dlrm.evaluation.diagnosis import Evidence
from sluice.dlrm.evaluation.metrics import Binned, Quality, quality
from sluice.dlrm.evaluation.single_columns import SingleColumns
from sluice.dlrm.ranks import Ranks
from sluice.dlrm.training.input_checks import BatchChecker
from sluice.etl.ops.base import MAX_ID

if TYPE_CHECKING:
    from sluice.dlrm.training.assemble import TrainingParts
    from sluice.ingest.batch import Batch

SLICES = 8  # the most frequent ids of a column get a figure of their own
EXACT_ROWS = 20_000_000  # up to so many rows of a split are kept and sorted; beyond, logits are counted in bins


class EvaluationBatches(Protocol):
    """What an evaluation needs of a loader."""

    def __iter__(self) -> Any: ...

    def __len__(self) -> int: ...

    @property
    def dense_names(self) -> Sequence[str]: ...

    @property
    def sparse_names(self) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The results on one split, the same on every rank."""

    quality: Quality
    slices: Mapping[str, Mapping[int, Quality]]
    """Column → id → its rows alone, for the column's most frequent ids, the most frequent first."""
    positives: int
    spread: float
    """Standard deviation of the logits."""
    largest_dense: tuple[str, float] | None
    """The dense column with the largest absolute value, and that value; None without dense columns."""
    constant: tuple[str, ...]
    """Sparse columns with one id in all rows."""

    @property
    def undefined(self) -> str | None:
        """Says that a prediction is no number, so that nothing is known; None if all are."""
        if self.quality.logloss is not None:
            return None
        found = "a prediction is no number, so nothing can be judged"
        if self.largest_dense is None:
            return found
        column, value = self.largest_dense
        return f"{found}; the largest input is {value:g} in {column!r}"

    def evidence(self, step: int, columns: int, lr: float) -> Evidence:
        return Evidence(
            step=step,
            rows=self.quality.rows,
            positives=self.positives,
            auc=self.quality.auc,
            ne=self.quality.ne,
            calibration=self.quality.calibration,
            spread=self.spread,
            largest_dense=self.largest_dense,
            constant=self.constant,
            columns=columns,
            lr=lr,
        )


@torch.no_grad()
def evaluate(
    parts: TrainingParts,
    feed: EvaluationBatches,
    checker: BatchChecker,
    world: Ranks,
    *,
    slices: Sequence[str] = (),
    exact_rows: int = EXACT_ROWS,
    singles: SingleColumns | None = None,
    through: Callable[[Any], Iterable[Batch]] = iter,
) -> Findings:
    """Evaluates on everything the feed brings, on all ranks; rows of weight 0 count nowhere. The batches come
    by `through(feed)`, which may end the evaluation. `singles` is given each of them."""
    names = list(feed.sparse_names)
    sliced = [names.index(name) for name in slices]
    counter: _Exact | _Rough | None = None
    largest = torch.zeros(len(feed.dense_names))
    low, high = torch.full((len(names),), MAX_ID), torch.full((len(names),), -1)
    spread = torch.zeros(3, dtype=torch.float64)  # of the logits: count, sum, sum of squares
    for batch in through(feed):
        checker.check(batch)
        if singles is not None:
            singles.add(batch)
        logits = parts.model(*parts.layout.features(batch, world.device)).cpu()
        real = batch.weight > 0
        counts = batch.lengths.view(len(names), -1).sum(1, dtype=torch.int64).tolist()
        ids = [
            column_ids[real] if len(column_ids) == len(real) else column_ids
            for column_ids in torch.split(batch.values, counts)
        ]
        # Copies: the loader may use a batch's memory again. float64 holds any id.
        rows = torch.stack(
            [
                t.double()
                for t in (
                    logits[real],
                    batch.label[real],
                    batch.weight[real],
                    *(ids[i] for i in sliced),
                )
            ]
        )
        if counter is None:  # on all ranks at once: they meet to choose what to count
            few = len(feed) * len(batch.label) * world.ranks <= exact_rows
            counter = _Exact() if few else _Rough(rows.numpy(), world)
        if not bool(real.any()):
            continue
        counter.add(rows.numpy())
        spread += torch.stack(
            [
                torch.tensor(float(rows.shape[1]), dtype=torch.float64),
                rows[0].sum(),
                (rows[0] ** 2).sum(),
            ]
        )
        largest = torch.maximum(largest, batch.dense[real].nan_to_num(0, 0, 0).abs().amax(0))
        for i, column_ids in enumerate(ids):
            if len(column_ids):
                low[i], high[i] = (
                    torch.minimum(low[i], column_ids.min()),
                    torch.maximum(high[i], column_ids.max()),
                )
    if counter is None:
        raise ValueError("an evaluation over no rows")
    quality_of_all, slice_parts, positives = counter.result(world)
    largests, lows, highs, spreads = zip(
        *world.gather_objects((largest, low, high, spread)), strict=True
    )
    largest = torch.stack(largests).amax(0)
    low = torch.stack(lows).amin(0)
    high = torch.stack(highs).amax(0)
    count, total, squares = torch.stack(spreads).sum(0).tolist()
    largest_dense = None
    if len(largest):
        top = int(largest.argmax())
        largest_dense = feed.dense_names[top], float(largest[top])
    return Findings(
        quality=quality_of_all,
        slices=dict(zip(slices, slice_parts, strict=True)),
        positives=positives,
        spread=max(0.0, squares / count - (total / count) ** 2) ** 0.5,
        largest_dense=largest_dense,
        constant=tuple(
            n for n, a, b in zip(names, low.tolist(), high.tolist(), strict=True) if a == b
        ),
    )


class _Exact:
    """Keeps all rows: logit, label, weight, and the ids of each column that is sliced."""

    def __init__(self) -> None:
        self._rows: list[Any] = []

    def add(self, rows: Any) -> None:
        self._rows.append(rows)

    def result(self, world: Ranks) -> tuple[Quality, list[dict[int, Quality]], int]:
        own_rows = np.concatenate(self._rows, axis=1) if self._rows else None
        table = np.concatenate([r for r in world.gather_objects(own_rows) if r is not None], axis=1)
        parts = [{i: quality(*table[:3, ids == i]) for i in _frequent(ids)} for ids in table[3:]]
        return quality(*table[:3]), parts, int(table[1].sum())


class _Rough:
    """Counts in bins. Its slices are the ids that are frequent in the first batch, as no row is kept to go back to."""

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

    def result(self, world: Ranks) -> tuple[Quality, list[dict[int, Quality]], int]:
        # All ranks slice by the same ids in the same order.
        own_counts = [
            self._whole.to_array(),
            *(part.to_array() for parts in self._parts for part in parts.values()),
        ]
        ranks = world.gather_objects((own_counts, self._positives))
        qualities = [
            sum(map(Binned.from_array, arrays), Binned()).quality
            for arrays in zip(*(arrays for arrays, _ in ranks), strict=True)
        ]
        slice_qualities = iter(qualities[1:])
        return (
            qualities[0],
            [{i: next(slice_qualities) for i in parts} for parts in self._parts],
            sum(positives for _, positives in ranks),
        )


def _frequent(ids: Any) -> list[int]:
    """The most frequent ids, the most frequent first."""
    unique_ids, counts = np.unique(ids, return_counts=True)
    return [int(i) for i in unique_ids[np.argsort(-counts, kind="stable")][:SLICES]]
