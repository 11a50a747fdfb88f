"""Finds bad ids and labels: in the statistics of a table's files before the first step, and in every batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import torch

from sluice.common.errors import UsageError
from sluice.common.stores import Place
from sluice.dlrm.foreign_table import ForeignTable
from sluice.etl.table.table import FeatureTable, TableError
from sluice.ingest.plain.footer_chunks import check_file

if TYPE_CHECKING:
    from sluice.dlrm.model.ranker import TableLayout
    from sluice.ingest.batch import Batch
    from sluice.ingest.loader import BatchLoader


def check_files(table: FeatureTable, rank: int = 0, ranks: int = 1) -> None:
    """Checks a rank's part of a table's files. The loader checks those of another program."""
    if isinstance(table, ForeignTable):
        return
    label = next(f.name for f in table.fields if f.role == "label")
    # Statistics do not cover the ids inside bags. The loader makes the ids of online columns later.
    sizes = {
        f.name: f.cardinality
        for f in table.stored
        if f.role == "sparse" and f.cardinality is not None and not f.online
    }
    try:
        check_footers([f.path for f in table.files][rank::ranks], sizes, label)
    except FileNotFoundError as error:
        raise TableError(
            f"{table.uri}: a file of version {table.version} is gone ({error}); was this version removed "
            "by vacuum? Name one that is there by --version"
        ) from None


def check_footers(paths: Iterable[str], sizes: Mapping[str, int], label: str) -> None:
    """Raises BadData with file, row group, column and value. `BatchChecker` covers row groups without statistics."""
    for path in paths:
        with Place.of(path).open() as file:
            footer = pq.ParquetFile(file).metadata
            check_file(path, footer, BadData)
            for group in range(footer.num_row_groups):
                _check_group(footer.row_group(group), f"{path}, row group {group}", sizes, label)


def _check_group(
    group: pq.RowGroupMetaData, where: str, sizes: Mapping[str, int], label: str
) -> None:
    for i in range(group.num_columns):
        column = group.column(i)
        name = column.path_in_schema
        if (
            (name not in sizes and name != label)
            or not column.is_stats_set
            or not column.statistics.has_min_max
        ):
            continue
        for value in (column.statistics.min, column.statistics.max):
            if name == label and value not in (0, 1):
                raise BadData(f"{where}: label {name!r} holds {value}, which is neither 0 nor 1")
            if name in sizes and not 0 <= value < sizes[name]:
                raise BadData(
                    f"{where}: column {name!r} holds id {value}, outside its table of {sizes[name]} rows"
                )


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
        missing: str = "refuse",
        place_of: Callable[[int, int, int], str] = lambda *_: "",
    ) -> None:
        """`missing`: whether a dense feature that is not finite ends the run (`refuse`), or is masked later (`mask`).
        `place_of`: returns the origin of a row, given epoch, step and row."""
        self._names = list(cardinalities)
        self._sizes = torch.tensor(list(cardinalities.values()), dtype=torch.int64)
        self._dense = list(dense)
        self._numbers = [*dense, "weight"]
        self._source = source
        self._refuse = missing == "refuse"
        self._place_of = place_of
        self._largest = torch.zeros(len(self._numbers))
        self._extremes: deque[tuple[int, int, int, int, float]] = deque(maxlen=8)
        """Epoch, step, row, column and value of the newest numbers beyond EXTREME, one a batch."""

    @classmethod
    def of(cls, layout: TableLayout, loader: BatchLoader, split: str, missing: str) -> BatchChecker:
        """Checks a split's batches against the tables of a model."""
        return cls(
            {t.name: t.rows for t in layout.columns},
            loader.dense_names,
            f"split {split!r}",
            missing=missing,
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
            if self._refuse:
                row, column = (~torch.isfinite(dense)).nonzero()[0].tolist()
                raise BadData(
                    f"column {self._dense[column]!r}: {dense[row, column].item()} is not a finite number"
                    f'{self._where(batch, row)}; fill it in the feature spec (op "fill"), or ask for '
                    "--missing mask"
                )
            dense = dense.nan_to_num(0, 0, 0)
            low, high = torch.aminmax(dense, dim=0)
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
