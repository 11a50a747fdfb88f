"""Selects the rows of plain Parquet that belong to a split: `RowSelection`. It follows the rule in a spec's [table], as
the ETL does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.etl.ops.hashing import Flags
from sluice.etl.spec.nested_columns import flattened, join_chunks
from sluice.etl.spec.row_split import row_keys, split_of
from sluice.etl.spec.spec import Spec
from sluice.etl.table.table_columns import FileColumns, TableParquet
from sluice.ingest.columns import ColumnError
from sluice.ingest.knobs import nearest
from sluice.ingest.plain.footer_chunks import check_file
from sluice.ingest.plain.recipe import typed
from sluice.ingest.plain.roles import ParquetError


@dataclass(frozen=True)
class RowSelection:
    """The rows of one split."""

    spec: Spec
    split: str

    @property
    def which(self) -> str:
        """Describes the selected rows, for messages that name a row by its number."""
        return f" (of its rows in the split {self.split!r})"

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """The columns that decide a row's split."""
        table = self.spec.table
        label = (self.spec.label,) if table.unlabelled else ()
        keys = (
            tuple(column.name for column in self.spec.rule.columns)
            if self._by_key
            else table.split_by
        )
        named = table.split_column or table.split_time
        return tuple(dict.fromkeys((*((named,) if named else keys), *label)))

    @property
    def _by_key(self) -> bool:
        return splits_by_key(self.spec) and not self.spec.table.split_by

    @property
    def _by_time_alone(self) -> bool:
        return bool(self.spec.table.split_time) and not self.spec.table.unlabelled

    def mask(self, stored: pa.Table) -> Flags:
        """Whether each row of a table belongs to the split."""
        return np.asarray(self._splits(stored) == self._number)

    def up_to(self, stored: pa.Table) -> Flags:
        """Whether each row of a table belongs to the split or to one before it in the spec."""
        splits = self._splits(stored)
        return np.asarray((splits >= 0) & (splits <= self._number))

    @property
    def _number(self) -> int:
        return list(self.spec.table.split).index(self.split)

    def _splits(self, stored: pa.Table) -> npt.NDArray[np.int32]:
        types = self.spec.input.columns
        there = {
            name: join_chunks(stored.column(name))
            if name in stored.column_names
            else pa.nulls(stored.num_rows)
            for name in self.sources
        }
        columns = {name: typed(name, values, types[name]) for name, values in there.items()}
        keys = (
            row_keys(columns, self.spec) if self._by_key else np.zeros(stored.num_rows, np.uint64)
        )
        return split_of(columns, keys, self.spec)

    def counts(self, files: Mapping[str, FileColumns]) -> dict[str, list[tuple[int, ...]]]:
        """Returns for each split the number of rows in each row group of each file. Rows in no split are under an empty
        name. Reads only the deciding columns. If a footer's smallest and largest time lie in one split, it reads
        nothing."""
        with ThreadPoolExecutor(os.cpu_count(), "sluice-splits") as pool:
            by_file = list(pool.map(self._counts, files, files.values()))
        return {
            split: [tuple(group[number] for group in file) for file in by_file]
            for number, split in enumerate((*self.spec.table.split, ""))
        }

    def _counts(self, path: str, located: FileColumns) -> list[list[int]]:
        """Returns for each row group of a file the number of its rows in each split, and then in none."""
        splits_and_none, counts = len(self.spec.table.split) + 1, list[list[int]]()
        with TableParquet(path, located) as file:
            if self._by_time_alone:
                check_file(path, file.metadata, ParquetError)
            for number in range(file.metadata.num_row_groups):
                try:
                    bounds = _bounds(file, number, self.sources[0]) if self._by_time_alone else None
                    first, last = (0, 1) if bounds is None else self._splits(bounds)
                    if first == last:
                        rows = file.metadata.row_group(number).num_rows
                        counts.append([rows if n == first else 0 for n in range(splits_and_none)])
                        continue
                    splits = self._splits(flattened(file.read_row_group(number, self.sources)))
                except ColumnError as error:
                    raise ColumnError(f"{path}, row group {number}: {error}") from None
                # A row in no split has a negative number.
                numbers = np.where(splits < 0, splits_and_none - 1, splits)
                counts.append(np.bincount(numbers, minlength=splits_and_none).tolist())
        return counts


def splits_by_key(spec: Spec) -> bool:
    """Whether a hash decides the split of a row."""
    table = spec.table
    several = len(table.split) > (2 if table.unlabelled else 1)
    return several and not (table.split_column or table.split_time)


def _bounds(file: TableParquet, number: int, name: str) -> pa.Table | None:
    """Returns the smallest and the largest value of a column in a row group, by its footer. None if the footer has
    none, or if values are missing."""
    at = file.schema_arrow.get_field_index(name)
    # Footers do not show NaN.
    if at < 0 or pa.types.is_floating(kind := file.schema_arrow.field(at).type):
        return None
    if name in file.constants or name not in file.leaves:
        return None
    known = file.metadata.row_group(number).column(file.leaves.index(name)).statistics
    if known is None or not (known.has_min_max and known.has_null_count) or known.null_count:
        return None
    return pa.table({name: pa.array([known.min, known.max], kind)})


def selection_of(spec: Spec, split: str) -> RowSelection | None:
    """Returns the selection of a split's rows. None if all rows are in one split."""
    table = spec.table
    if split not in table.split:
        raise ColumnError(f"{spec.name}: table.split has no {split!r}{nearest(split, table.split)}")
    if len(table.split) == 1 and not table.split_column:
        return None
    if splits_by_key(spec) and not (table.split_by or table.key):
        raise ColumnError(
            f"{spec.name}: a row's split hashes all its columns, which a loader would have to read "
            "twice; name the columns that decide as table.key or table.split_by, or a time as "
            "table.split_time, or write split = {train = 1}"
        )
    return RowSelection(spec, split)
