"""Looks for bad ids and labels in the statistics of a table's files, before the first step: no data page is read; and
for where a value stands that was seen in the middle of training, in the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from dlrm.guard import BadData
from etl.table import FeatureTable, TableError


def check_files(table: FeatureTable, rank: int = 0, ranks: int = 1) -> None:
    """A rank's part of a table's files."""
    label = next(f.name for f in table.fields if f.role == "label")
    # A bag's ids lie within bytes, of which statistics say nothing; others the loader is yet to make.
    sizes = {f.name: f.cardinality for f in table.fields
             if f.role == "sparse" and f.cardinality is not None and not f.online}
    try:
        check_footers([f.path for f in table.files][rank::ranks], sizes, label)
    except FileNotFoundError as error:
        raise TableError(f"{table.uri}: a file of version {table.version} is gone ({error}); was this version removed "
                         "by vacuum? Name one that is there by --version") from None


def find(table: FeatureTable, split: str, column: str | None, value: float) -> str | None:
    """`FILE, row group N`: the first place where a column (None: the label) has a value; None if it is stored nowhere
    so, for instance as the loader made it of another, or within a bag."""
    name = column or next(f.name for f in table.fields if f.role == "label")
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
