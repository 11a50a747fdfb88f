"""Finds bad ids, labels and numbers in every batch, before the model gets it: `BatchChecker`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sluice.common.errors import UsageError

if TYPE_CHECKING:
    from sluice.dlrm.model.ranker import TableLayout
    from sluice.ingest.batch import Batch
    from sluice.ingest.loader import BatchLoader


class BadData(UsageError):
    """Data that the model cannot use. The message names column, value, allowed values and place."""


EXTREME = 1e6
"""A larger number is rarely meant as a model's input: float32 overflows after a few products."""


class BatchChecker:
    """Checks each batch before the model gets it, and keeps the largest numbers. It costs one pass over the ids and one
    over the numbers, far less than a step."""

    def __init__(
        self,
        cardinalities: Mapping[str, int],
        dense: Sequence[str],
        source: str,
        *,
        place_of: Callable[[int, int, int], str] = lambda *_: "",
    ) -> None:
        """`place_of`: returns the origin of a row, given epoch, step and row."""
        self._names = list(cardinalities)
        self._sizes = torch.tensor(list(cardinalities.values()), dtype=torch.int64)
        self._dense = list(dense)
        self._numbers = [*dense, "weight"]
        self._source = source
        self._place_of = place_of
        self._largest = torch.zeros(len(self._numbers))
        self._extremes: deque[tuple[int, int, int, int, float]] = deque(maxlen=8)
        """Epoch, step, row, column and value of the newest numbers beyond EXTREME, one a batch."""

    @classmethod
    def of(cls, layout: TableLayout, loader: BatchLoader, split: str) -> BatchChecker:
        """Checks a split's batches against the tables of a model."""
        return cls(
            {t.name: t.rows for t in layout.columns},
            loader.dense_names,
            f"split {split!r}",
            place_of=loader.place_of,
        )

    def check(self, batch: Batch) -> None:
        """Raises BadData for the first thing that is wrong with the batch."""
        if len(self._names):
            self._check_ids(batch)
        if not bool((wrong := (batch.label != 0) & (batch.label != 1)).logical_not().all()):
            row = int(wrong.nonzero()[0])
            raise BadData(
                f"label {batch.label[row].item():g} is neither 0 nor 1{self._where(batch, row)}"
            )
        self._check_numbers(batch)

    def largest(self) -> dict[str, float]:
        """Returns the largest absolute value so far, of each dense column and of the rows' weights."""
        return dict(zip(self._numbers, self._largest.tolist(), strict=True))

    def extremes(self) -> list[dict[str, Any]]:
        """Returns the newest numbers beyond EXTREME: the largest of each batch, and its origin."""
        return [
            {
                "batch": [epoch, step],
                "column": self._numbers[column],
                "value": value,
                "where": self._place_of(epoch, step, row) or f"row {row} of a batch",
            }
            for epoch, step, row, column, value in self._extremes
        ]

    def _check_numbers(self, batch: Batch) -> None:
        dense = batch.dense
        low, high = torch.aminmax(dense, dim=0)
        if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
            row, column = (~torch.isfinite(dense)).nonzero()[0].tolist()
            raise BadData(
                f"column {self._dense[column]!r}: {dense[row, column].item()} is not a finite number"
                f'{self._where(batch, row)}; fill it in the feature spec (op "fill")'
            )
        largest = torch.cat([torch.maximum(-low, high), batch.weight.max().view(1)])
        self._largest = torch.maximum(self._largest, largest)
        if float(largest.max()) > EXTREME:
            column = int(largest.argmax())
            numbers = batch.weight if column == len(self._dense) else dense[:, column]
            row = int(numbers.abs().argmax())
            self._extremes.append((batch.epoch, batch.step, row, column, numbers[row].item()))

    def _check_ids(self, batch: Batch) -> None:
        rows = len(batch.lengths) // len(self._names)
        counts = batch.lengths.view(len(self._names), rows).sum(1, dtype=torch.int64).tolist()
        if all(n == rows for n in counts):  # equally long columns, one after the other
            low, high = (
                e.to(torch.int64)
                for e in torch.aminmax(batch.values.view(len(self._names), rows), dim=1)
            )
        else:
            parts = [p if len(p) else p.new_zeros(1) for p in torch.split(batch.values, counts)]
            low, high = (
                torch.stack([f(p) for p in parts]).to(torch.int64) for f in (torch.min, torch.max)
            )
        wrong = ((low < 0) | (high >= self._sizes)).nonzero()
        if len(wrong):
            i = int(wrong[0])
            value = int(low[i]) if low[i] < 0 else int(high[i])
            at = int((torch.split(batch.values, counts)[i] == value).nonzero()[0])
            row = int(torch.repeat_interleave(batch.lengths.view(len(self._names), rows)[i])[at])
            raise BadData(
                f"column {self._names[i]!r}: id {value} is outside its table of {int(self._sizes[i])} rows"
                f"{self._where(batch, row)}; see `sluice check`"
            )

    def _where(self, batch: Batch, row: int) -> str:
        place = self._place_of(batch.epoch, batch.step, row)
        return f" (epoch {batch.epoch}, step {batch.step} of {self._source}{f'; {place}' if place else ''})"
