"""Looks up the rows of a feature table by key: the values that were known at a time, or the newest values.

    from feature_store import FeatureStore    # copy this file next to your program

    users = FeatureStore.open("users")        # a table whose spec has columns of the roles `key` and `time`
    users.as_of(clicks["user"], clicks["at"])  # for training: a row for each click, with the values known then
    users["u7"]                                # for serving: {"clicks": 12, …}, the newest values

The store reads one version into memory, sorted by key and time. It needs no Spark.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sluice.etl.ops.base import as_number, as_text
from sluice.etl.ops.lists import relisted
from sluice.etl.table.store import TableStore
from sluice.etl.table.table import FeatureTable, TableError

_POSITION = "__position"


@dataclass(frozen=True)
class FeatureStore:
    """The rows of a version, sorted by key and time. Rows without a key or a time are left out."""

    table: FeatureTable
    values: pa.Table
    """All columns except the key, as the table stores them. Bags are lists of ids."""
    keys: pa.Array
    """The different keys."""
    _newest: dict[str, int]
    _moments: npt.NDArray[np.float64]
    """All different times, rising."""
    _order: npt.NDArray[np.int64]
    """A number for each row that rises with key and time: index of the key × number of moments + index of the
    moment."""

    @classmethod
    def open(
        cls,
        uri: str | os.PathLike[str],
        version: int | None = None,
        *,
        key: str | None = None,
        time: str | None = None,
    ) -> FeatureStore:
        """Reads a version, or the newest. If the table has several columns of the role `key` or `time`, name the one to
        use. Raises TableError if it has none."""
        table = FeatureTable.open(uri, version)
        key, time = _column(table, "key", key), _column(table, "time", time)
        rows = _rows(table)
        rows = rows.filter(pc.and_(pc.is_valid(rows[key]), pc.is_finite(rows[time])))
        rows = rows.append_column(_POSITION, pa.array(np.arange(rows.num_rows)))
        rows = rows.sort_by(
            [(key, "ascending"), (time, "ascending"), (_POSITION, "ascending")]
        ).combine_chunks()
        by_key = as_text(rows[key].combine_chunks()).dictionary_encode()
        places = by_key.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        moments, ranks = np.unique(rows[time].to_numpy().astype(np.float64), return_inverse=True)
        last = np.searchsorted(places, np.arange(len(by_key.dictionary)), side="right") - 1
        newest = dict(zip(by_key.dictionary.to_pylist(), last.tolist(), strict=True))
        return cls(
            table,
            rows.drop_columns([key, _POSITION]),
            by_key.dictionary,
            newest,
            moments,
            places * len(moments) + ranks,
        )

    def __len__(self) -> int:
        """The number of keys."""
        return len(self.keys)

    def __contains__(self, key: object) -> bool:
        return key in self._newest

    def __getitem__(self, key: str) -> dict[str, Any]:
        """Returns the newest values of a key. Raises a KeyError for an unknown key."""
        row = self._newest[key]
        return {name: column[row].as_py() for name, column in self._columns.items()}

    def newest(self, keys: pa.Array | pa.ChunkedArray | Iterable[Any]) -> pa.Table:
        """Returns a row with the newest values for each key. It has nulls for an unknown key."""
        asked = as_text(_array(keys))
        return self._rows_at(
            np.array([self._newest.get(key, -1) for key in asked.to_pylist()], np.int64)
        )

    def as_of(
        self,
        keys: pa.Array | pa.ChunkedArray | Iterable[Any],
        times: pa.Array | pa.ChunkedArray | Iterable[Any],
        *,
        before: bool = False,
    ) -> pa.Table:
        """Returns a row for each key and time: the key's latest row that is not later. With `before`, it must be
        earlier. Nulls if there is none.

        Use `before` for rows that are in the store themselves: they then get what was known before them."""
        asked, given = as_text(_array(keys)), _array(times)
        try:
            at = as_number(given).to_numpy(zero_copy_only=False)
        except pa.ArrowException:
            raise ValueError(
                f"times: are {given.type}; give numbers as the table's times are, for instance seconds "
                "since 1970"
            ) from None
        if len(asked) != len(at):
            raise ValueError(f"{len(asked)} keys, but {len(at)} times: each key needs one")
        places = (
            pc.fill_null(pc.index_in(asked, self.keys), -1)
            .to_numpy(zero_copy_only=False)
            .astype(np.int64)
        )
        ranks = np.searchsorted(self._moments, at, side="left" if before else "right") - 1
        first = places * len(self._moments)
        rows = np.searchsorted(self._order, first + ranks, side="right") - 1
        known = (places >= 0) & (ranks >= 0) & ~np.isnan(at) & (rows >= 0)
        known[known] = self._order[rows[known]] >= first[known]
        return self._rows_at(np.where(known, rows, -1))

    def _rows_at(self, rows: npt.NDArray[np.int64]) -> pa.Table:
        """Returns the rows with these numbers. -1 gives nulls."""
        return self.values.take(pa.array(np.where(rows < 0, 0, rows), mask=rows < 0))

    @cached_property
    def _columns(self) -> dict[str, pa.Array]:
        """The columns with one chunk each, which makes the lookup of a single row fast."""
        return {name: self.values[name].combine_chunks() for name in self.values.column_names}


def _column(table: FeatureTable, role: str, named: str | None) -> str:
    """Returns the column of a role. Raises TableError if there is none, or if there are several and `named` is None."""
    columns = [f.name for f in table.stored if f.role == role]
    there_are = ", ".join(columns) or "none"
    if named is not None and named not in columns:
        raise TableError(
            f"{table.uri}: {named!r} is no column of role {role} (there are: {there_are})"
        )
    if named is None and len(columns) != 1:
        advice = f"say which by {role}=…" if columns else f'add one to the spec (role = "{role}")'
        raise TableError(
            f"{table.uri}: a feature store needs one column of role {role}, and the table has "
            f"{there_are}: {advice}"
        )
    return named if named is not None else columns[0]


def _rows(table: FeatureTable) -> pa.Table:
    """Returns all rows of a version, with bags as lists."""
    parts = []
    for file in table.files:
        place = TableStore(file.path)
        with place.fs.open_input_file(place.root) as source:
            parts.append(
                pq.ParquetFile(source, page_checksum_verification=True).read(
                    [f.name for f in table.stored]
                )
            )
    rows = pa.concat_tables(parts).combine_chunks() if parts else table.schema.empty_table()
    for f in table.stored:
        if f.layout == "bytes":
            rows = rows.set_column(rows.column_names.index(f.name), f.name, _bags(rows[f.name]))
    return rows


def _bags(column: pa.ChunkedArray) -> pa.Array:
    """Returns bags that are stored as bytes as lists of ids."""
    lengths = pc.fill_null(pc.binary_length(column), 0).to_numpy().astype(np.int64) // 4
    content = b"".join(value for value in column.to_pylist() if value)
    return relisted(pa.array(np.frombuffer(content, "<i4")), lengths)


def _array(values: pa.Array | pa.ChunkedArray | Iterable[Any]) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        return values.combine_chunks()
    return values if isinstance(values, pa.Array) else pa.array(values)
