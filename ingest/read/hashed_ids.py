"""Ids made by hashing what plain Parquet holds, where a row group is decoded: `HashedIds`.

That is the cheapest place: of a text that is stored once only one hash is taken, and what waits for the shuffle holds
four bytes a value and no texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit

from sluice.etl.ops.base import FIRST, MAX_ID, NULL
from sluice.etl.ops.hashing import A, G, mix
from sluice.etl.ops.ids import Hash

MOST_IDS = MAX_ID - FIRST
_FEW_BYTES = 4  # stored bytes of a value, up to which its texts come back often enough to be read as a dictionary
_KINDS = re.compile(r"(large_)?(string|binary)|u?int(8|16|32|64)")
_LISTS = re.compile(r"(large_)?list<(\w+: )?(.*?)( not null)?>")


def can_hash(kind: str) -> bool:
    """Whether values of that Arrow type have hashes: whole numbers, texts, and lists of either."""
    several = _LISTS.fullmatch(kind)
    return _KINDS.fullmatch(several[3] if several else kind) is not None


def cardinality(size: int) -> int:
    """The number of rows that an embedding of ids over `size` values needs: 0 pads, 1 is missing, then the ids."""
    return Hash(size=size).cardinality(None)


class HashedIds:
    """Replaces columns of a table by ids, as the operator `hash` of a feature table makes them of the same values: a
    whole number is hashed as its decimal digits."""

    def __init__(self, sizes: Mapping[str, int]):
        self._hash = {name: Hash(size=size) for name, size in sizes.items()}
        hash_digits(np.zeros(1, np.uint64), True)  # compiled now, and its memory taken

    def schema(self, stored: pa.Schema) -> pa.Schema:
        """The schema of `table` for a table of that schema."""
        return pa.schema([pa.field(f.name, self._type(f.type)) if f.name in self._hash else f for f in stored])

    def repeated(self, stored: pa.Schema, footer: Any) -> list[str]:
        """The columns that are best read as dictionaries, by the footer of a file: texts that come back often are then
        hashed once."""
        if not footer.num_row_groups:
            return []
        group = footer.row_group(0)
        chunks = {chunk.path_in_schema: chunk for chunk in map(group.column, range(group.num_columns))}
        return [f.name for f in stored if f.name in self._hash and f.name in chunks
                and (pa.types.is_string(f.type) or pa.types.is_binary(f.type))
                and chunks[f.name].total_uncompressed_size <= _FEW_BYTES * chunks[f.name].num_values]

    def table(self, stored: pa.Table) -> pa.Table:
        for name, operator in self._hash.items():
            at = stored.schema.get_field_index(name)
            column = stored.column(at)
            made = pa.chunked_array([_ids(chunk, operator) for chunk in column.chunks], self._type(column.type))
            stored = stored.set_column(at, name, made)
        return stored

    @staticmethod
    def _type(kind: pa.DataType) -> pa.DataType:
        return pa.list_(pa.int32()) if pa.types.is_list(kind) or pa.types.is_large_list(kind) else pa.int32()


def _ids(values: pa.Array, operator: Hash) -> pa.Array:
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        offsets = values.offsets
        inside = values.values.slice(offsets[0].as_py(), offsets[-1].as_py() - offsets[0].as_py())
        begins = pc.subtract(offsets, offsets[0]).cast(pa.int32())
        mask = values.is_null() if values.null_count else None
        return pa.ListArray.from_arrays(begins, _ids(inside, operator), mask=mask)
    if pa.types.is_dictionary(values.type):
        known = _ids(values.dictionary, operator)
        return known.take(values.indices).fill_null(NULL)
    if not pa.types.is_integer(values.type):
        return operator.apply(values, None)
    signed = not pa.types.is_unsigned_integer(values.type)
    whole = values.cast(pa.int64() if signed else pa.uint64()).fill_null(0).to_numpy(zero_copy_only=False)
    ids = (hash_digits(whole.view(np.uint64), signed) % np.uint64(operator.size)).astype(np.int32) + np.int32(FIRST)
    if values.null_count:
        ids[values.is_null().to_numpy(zero_copy_only=False)] = NULL
    return pa.array(ids)


_mix: Any = njit(nogil=True, cache=True)(mix)


@njit(nogil=True, cache=True)
def hash_digits(bits: Any, signed: bool) -> Any:
    """The hash of each whole number's decimal digits, as `sluice.etl.ops.hashing.hash_texts` has it of the text, which
    need not be made for it."""
    digits, found = np.empty(24, np.uint8), np.empty(len(bits), np.uint64)
    for n in range(len(bits)):
        rest = bits[n]
        negative = signed and rest >> np.uint64(63)
        if negative:
            rest = ~rest + np.uint64(1)
        at = 24
        while True:
            at -= 1
            digits[at] = 48 + rest % np.uint64(10)
            rest //= np.uint64(10)
            if not rest:
                break
        if negative:
            at -= 1
            digits[at] = 45
        h = np.uint64(24 - at) * G
        while at < 24:
            word = np.uint64(0)
            for b in range(min(8, 24 - at)):
                word |= np.uint64(digits[at + b]) << np.uint64(8 * b)
            h = (h ^ word) * A
            h ^= h >> np.uint64(32)
            at += 8
        found[n] = _mix(h)
    return found
