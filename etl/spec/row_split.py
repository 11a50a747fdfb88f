"""`row_keys` and `split_of`: the key of each row by the rule of its table, and the row's split.

Both depend only on the row's own values, not on the cluster or on other rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.ops.base import Arrays, as_number, plain
from sluice.etl.ops.hashing import Hashes, Narrow, hash_rows, mix
from sluice.etl.spec.row_identity import KeyColumn
from sluice.etl.spec.spec import Spec

Keys = Hashes
TIES = ("_tie_of_key", "_tie_of_row", "_tie_of_label")
"""The columns of `ties`."""
_SPLIT = np.uint64(0x5EED5EED00000001)


def split_of(columns: Arrays, keys: Keys, spec: Spec) -> Narrow:
    """Returns the number of each row's split, or -1 if `split_column` names none, or `split_time` has no time."""
    splits = _split_labelled(columns, keys, spec)
    if not spec.table.unlabelled:
        return splits
    unknown = np.asarray(pc.is_null(spec.labels(columns)))
    return np.where(unknown, np.int32(len(spec.table.split) - 1), splits)


def _split_labelled(columns: Arrays, keys: Keys, spec: Spec) -> Narrow:
    table = spec.table
    if table.split_column:
        place = pc.index_in(
            columns[table.split_column].cast(pa.string()), pa.array(list(table.split))
        )
        return np.asarray(pc.fill_null(place, -1), np.int32)
    if table.split_time:
        # NaN stands for a missing time.
        at = np.asarray(as_number(columns[table.split_time]))
        return np.where(
            np.isnan(at),
            np.int32(-1),
            np.searchsorted(np.array(table.split_from[1:]), at, side="right").astype(np.int32),
        )
    if table.split_by:
        keys = hash_of(columns, spec.rule.split_by, spec.rule.seed)
    share = (mix(keys ^ _SPLIT) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    bounds = np.cumsum([part for part in table.split.values() if part])[:-1]
    return np.asarray(np.searchsorted(bounds, share, side="right"), np.int32)


def row_keys(columns: Arrays, spec: Spec) -> Keys:
    """Returns one key for each row, from the columns of the table's rule. Splits, files, folds and samples depend on
    it."""
    return hash_of(columns, spec.rule.columns, spec.rule.seed)


def fold_keys(columns: Arrays, keys: Keys, spec: Spec) -> Keys:
    """Returns the keys that decide the rows' folds: the row keys, without a column that has become the label since the
    table's first version. Rows that differ only in the label are in one fold, so a fold tells nothing about a label."""
    columns_of_fold = spec.rule.without(spec.label)
    if columns_of_fold == spec.rule.columns:
        return keys
    return (
        hash_of(columns, columns_of_fold, spec.rule.seed)
        if columns_of_fold
        else np.zeros_like(keys)
    )


def hash_of(columns: Arrays, by: Iterable[KeyColumn], seed: int) -> Keys:
    """Returns one hash for each row, from some columns in the types of the table's first version."""
    return hash_rows([_join_lists(as_first(columns[column.name], column)) for column in by], seed)


def whole_rows(columns: Arrays) -> Keys:
    """Returns one hash for each row, from all its columns in any order. It decides between rows with the same key."""
    return hash_rows([_join_lists(columns[name]) for name in sorted(columns)], 0)


def ties(columns: Arrays, spec: Spec) -> list[Keys]:
    """Returns the numbers that order rows of one moment: hashes of their keys and of their columns, each without the
    label. The hash with the label comes last. It decides only between rows that differ in nothing else."""
    whole = {name: values for name, values in columns.items() if name not in spec.input.marks}
    others = {name: values for name, values in whole.items() if name != spec.label}
    return [
        fold_keys(columns, row_keys(columns, spec), spec),
        whole_rows(others),
        whole_rows(whole),
    ]


def as_first(values: pa.Array, column: KeyColumn) -> pa.Array:
    """Converts values to the column's type in the table's first version. A value that this type cannot hold counts as
    missing."""
    if column.type == column.first_type:
        return values
    kind = pa.int64() if column.first_type == "int" else pa.float64()
    if column.type == "int":
        return values.cast(kind, safe=False)  # rounded, as a text of that many digits is
    if column.type == "text":
        values = pc.utf8_trim_whitespace(plain(values))
    try:
        return values.cast(kind)
    except pa.ArrowInvalid:
        return pa.array([_cast(value, kind) for value in values], kind)


def _cast(value: pa.Scalar, kind: pa.DataType) -> Any:
    try:
        return value.cast(kind).as_py()
    except pa.ArrowInvalid:
        return None


def _join_lists(column: pa.Array) -> pa.Array:
    """Joins each list into one text for its hash."""
    return (
        pc.binary_join(column.cast(pa.list_(pa.string())), "\x1f")
        if pa.types.is_list(column.type)
        else column
    )
