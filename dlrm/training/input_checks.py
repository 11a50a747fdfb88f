"""Looks for bad ids and labels in the statistics of a table's files before the first step, without reading data pages.
It also checks every batch, and finds the place in the files of a bad value that was seen in the middle of training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import torch

from sluice.etl.common.errors import UsageError
from sluice.etl.common.slow_path import plain_path
from sluice.etl.table.table import FeatureTable, TableError

if TYPE_CHECKING:
    from sluice.ingest.batch import Batch


def check_files(table: FeatureTable, rank: int = 0, ranks: int = 1) -> None:
    """Checks a rank's part of a table's files."""
    label = next(f.name for f in table.fields if f.role == "label")
    # A bag's ids lie within bytes, of which statistics say nothing; others the loader is yet to make.
    sizes = {f.name: f.cardinality for f in table.stored
             if f.role == "sparse" and f.cardinality is not None and not f.online}
    try:
        check_footers([f.path for f in table.files][rank::ranks], sizes, label)
    except FileNotFoundError as error:
        raise TableError(f"{table.uri}: a file of version {table.version} is gone ({error}); was this version removed "
                         "by vacuum? Name one that is there by --version") from None


def find(table: FeatureTable, split: str, column: str | None, value: float) -> str | None:
    """`FILE, row group N`: the first place where a column (None: the label) has a value; None if no file holds it, for
    instance because the loader made it from another value, or it lies within a bag."""
    name = column or next(f.name for f in table.fields if f.role == "label")
    if name not in table.schema.names:
        return None
    for path in (f.path for f in table.files_of(split)):
        with _opened(path) as file:
            parquet = pq.ParquetFile(file)
            for group in range(parquet.metadata.num_row_groups):
                values = parquet.read_row_group(group, columns=[name])[name]
                if not pa.types.is_integer(values.type) and not pa.types.is_floating(values.type):
                    return None
                numbers = values.to_numpy()
                if bool(np.isnan(numbers).any() if np.isnan(value) else (numbers == value).any()):
                    return f"{path}, row group {group}"
    return None


def _opened(path: str) -> pa.NativeFile:
    path = plain_path(path)
    filesystem, inside = pafs.FileSystem.from_uri(path) if "://" in path else (pafs.LocalFileSystem(), path)
    return filesystem.open_input_file(inside)


def check_footers(paths: Iterable[str], sizes: Mapping[str, int], label: str) -> None:
    """Raises BadData naming file, row group, column and value. Row groups without statistics are left to the guard,
    which sees every batch."""
    for path in paths:
        with _opened(path) as file:
            footer = pq.ParquetFile(file).metadata
            for group in range(footer.num_row_groups):
                _check_group(footer.row_group(group), f"{path}, row group {group}", sizes, label)


def _check_group(group: pq.RowGroupMetaData, where: str, sizes: Mapping[str, int], label: str) -> None:
    for i in range(group.num_columns):
        column = group.column(i)
        name = column.path_in_schema
        if (name not in sizes and name != label) or not column.is_stats_set or not column.statistics.has_min_max:
            continue
        for value in (column.statistics.min, column.statistics.max):
            if name == label and value not in (0, 1):
                raise BadData(f"{where}: label {name!r} holds {value}, which is neither 0 nor 1")
            if name in sizes and not 0 <= value < sizes[name]:
                raise BadData(f"{where}: column {name!r} holds id {value}, outside its table of {sizes[name]} rows")


class BadData(UsageError):
    """Data that the model cannot take: its message names the column, the value, what it may be, and where it was."""


class BatchChecker:
    """Checks each batch before the model gets it. That costs one pass over the ids, far less than a step."""

    def __init__(self, cardinalities: Mapping[str, int], dense: Sequence[str], source: str, *,
                 missing: str = "refuse", find: Callable[[str | None, float], str | None] = lambda *_: None) -> None:
        """`missing` says whether a dense feature that is not a finite number ends the run, or is masked later (`mask`).
        `find` says in which file and row group a column (None: the label) has a value; it is called only for a bad
        one."""
        self._names = list(cardinalities)
        self._sizes = torch.tensor(list(cardinalities.values()), dtype=torch.int64)
        self._dense = list(dense)
        self._source = source
        self._refuse, self._find = missing == "refuse", find

    def check(self, batch: Batch) -> None:
        """Raises BadData for the first thing that is wrong with the batch."""
        if len(self._names):
            self._check_ids(batch)
        if not bool(((batch.label == 0) | (batch.label == 1)).all()):
            wrong = batch.label[(batch.label != 0) & (batch.label != 1)][0].item()
            raise BadData(f"label {wrong:g} is neither 0 nor 1{self._where(batch, None, wrong)}")
        # A sum is NaN or infinite if any value is: one fast pass, the search only when something is wrong.
        if not self._refuse or bool(torch.isfinite(batch.dense.sum())):
            return
        if not bool((good := torch.isfinite(batch.dense)).all()):
            row, column = (~good).nonzero()[0].tolist()
            name, wrong = self._dense[column], batch.dense[row, column].item()
            raise BadData(f"column {name!r}: {wrong} is not a finite number{self._where(batch, name, wrong)}; fill it "
                          "in the feature spec (op \"fill\"), or ask for --missing mask")

    def _check_ids(self, batch: Batch) -> None:
        rows = len(batch.lengths) // len(self._names)
        counts = batch.lengths.view(len(self._names), rows).sum(1, dtype=torch.int64).tolist()
        if all(n == rows for n in counts):  # equally long columns, one after the other
            low, high = (e.to(torch.int64) for e in torch.aminmax(batch.values.view(len(self._names), rows), dim=1))
        else:
            parts = [p if len(p) else p.new_zeros(1) for p in torch.split(batch.values, counts)]
            low, high = (torch.stack([f(p) for p in parts]).to(torch.int64) for f in (torch.min, torch.max))
        wrong = ((low < 0) | (high >= self._sizes)).nonzero()
        if len(wrong):
            i = int(wrong[0])
            value = int(low[i]) if low[i] < 0 else int(high[i])
            raise BadData(f"column {self._names[i]!r}: id {value} is outside its table of {int(self._sizes[i])} rows"
                          f"{self._where(batch, self._names[i], value)}; see `sluice check`")

    def _where(self, batch: Batch, column: str | None, value: float) -> str:
        place = self._find(column, value)
        return f" (epoch {batch.epoch}, step {batch.step} of {self._source}{f'; {place}' if place else ''})"
