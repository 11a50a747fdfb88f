"""The key of each row by the rule of its table, and the split that it lies in: `row_keys` and `split_of`.

Both follow from the row's own values: not from the cluster, nor from other rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.ops.base import as_number
from sluice.etl.ops.hashing import hash_rows, mix
from sluice.etl.spec.row_identity import KeyColumn
from sluice.etl.spec.spec import Spec

Keys = npt.NDArray[np.uint64]
TIES = ("_tie_of_key", "_tie_of_row", "_tie_of_label")
"""The columns of `ties`."""
_SPLIT = np.uint64(0x5EED5EED00000001)


def split_of(columns: Mapping[str, pa.Array], keys: Keys, spec: Spec) -> npt.NDArray[np.int32]:
    """The number of each row's split; -1 where `split_column` names none, or `split_time` has no time."""
    found = _of_labelled(columns, keys, spec)
    if not spec.table.unlabelled:
        return found
    unknown = pc.is_null(spec.labels(columns)).to_numpy(zero_copy_only=False)
    return np.where(unknown, np.int32(len(spec.table.split) - 1), found)


def _of_labelled(columns: Mapping[str, pa.Array], keys: Keys, spec: Spec) -> npt.NDArray[np.int32]:
    table = spec.table
    if table.split_column:
        place = pc.index_in(
            columns[table.split_column].cast(pa.string()), pa.array(list(table.split))
        )
        return np.asarray(pc.fill_null(place, -1).to_numpy(zero_copy_only=False), np.int32)
    if table.split_time:
        at = as_number(columns[table.split_time]).to_numpy(
            zero_copy_only=False
        )  # NaN where it is missing
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


def row_keys(columns: Mapping[str, pa.Array], spec: Spec) -> Keys:
    """One key for each row, from the columns that the table's rule names: splits, files, folds and samples depend on
    it."""
    return hash_of(columns, spec.rule.columns, spec.rule.seed)


def fold_keys(columns: Mapping[str, pa.Array], keys: Keys, spec: Spec) -> Keys:
    """What decides each row's fold: its key, but without a column that has become the label since the table's first
    version. Rows that agree in all else lie in one fold, so no fold says anything of a label."""
    columns_of_fold = spec.rule.without(spec.label)
    if columns_of_fold == spec.rule.columns:
        return keys
    return (
        hash_of(columns, columns_of_fold, spec.rule.seed)
        if columns_of_fold
        else np.zeros_like(keys)
    )


def hash_of(columns: Mapping[str, pa.Array], by: Iterable[KeyColumn], seed: int) -> Keys:
    """One hash for each row, from some columns, each as the type that it had in the table's first version."""
    return hash_rows([_joined(as_first(columns[column.name], column)) for column in by], seed)


def whole_rows(columns: Mapping[str, pa.Array]) -> Keys:
    """One hash for each row, from all its columns, whatever their order: it decides between rows that have the same
    key."""
    return hash_rows([_joined(columns[name]) for name in sorted(columns)], 0)


def ties(columns: Mapping[str, pa.Array], spec: Spec) -> list[Keys]:
    """What orders rows of one moment, one number after the other, so that no label comes first: hashes of their keys
    and of their columns, each without the label. Only between rows that differ in nothing else the label counts, and
    there its hash does."""
    whole = {name: values for name, values in columns.items() if name not in spec.input.marks}
    others = {name: values for name, values in whole.items() if name != spec.label}
    return [
        fold_keys(columns, row_keys(columns, spec), spec),
        whole_rows(others),
        whole_rows(whole),
    ]


def as_first(values: pa.Array, column: KeyColumn) -> pa.Array:
    """Converts values to the type that the column had in the table's first version. A value that this type cannot hold
    was not in the first version, and counts as missing."""
    if column.type == column.first_type:
        return values
    kind = pa.int64() if column.first_type == "int" else pa.float64()
    if column.type == "int":
        return values.cast(kind, safe=False)  # rounded, as a text of that many digits is
    if column.type == "text":
        values = pc.utf8_trim_whitespace(values)
    try:
        return values.cast(kind)
    except pa.ArrowInvalid:
        return pa.array([_cast(value, kind) for value in values], kind)


def _cast(value: pa.Scalar, kind: pa.DataType) -> Any:
    try:
        return value.cast(kind).as_py()
    except pa.ArrowInvalid:
        return None


def _joined(column: pa.Array) -> pa.Array:
    """Joins a list into one text, for its hash."""
    return (
        pc.binary_join(column.cast(pa.list_(pa.string())), "\x1f")
        if pa.types.is_list(column.type)
        else column
    )
