"""Hashes stored whole numbers to ids: `hashed_ids`. It gives the same ids as the operator `hash` on their decimal
digits, without making texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.ops.base import FIRST, MAX_ID, NULL, spread
from sluice.etl.ops.hashing import A, G, mix
from sluice.etl.ops.ids import Hash
from sluice.etl.spec.nested_columns import is_list, is_text
from sluice.ingest.stages.scatter_kernel import compiled

MOST_IDS = MAX_ID - FIRST


def can_hash(kind: pa.DataType) -> bool:
    """Whether values of this type can be hashed: whole numbers, texts, and lists of these."""
    kind = kind.value_type if is_list(kind) else kind
    checks = is_text, pa.types.is_integer, pa.types.is_binary, pa.types.is_large_binary
    return any(check(kind) for check in checks)


def hashed_ids(values: pa.Array, operator: Hash) -> pa.Array:
    """Hashes whole numbers, texts, or lists of these, by an operator without a salt."""
    if pa.types.is_fixed_size_list(values.type):
        values = values.cast(pa.list_(values.type.value_type))
    if is_list(values.type):
        offsets = values.offsets
        inside = values.values.slice(offsets[0].as_py(), offsets[-1].as_py() - offsets[0].as_py())
        begins = pc.subtract(offsets, offsets[0]).cast(pa.int32())
        mask = values.is_null() if values.null_count else None
        return pa.ListArray.from_arrays(begins, hashed_ids(inside, operator), mask=mask)
    if pa.types.is_dictionary(values.type):
        known = hashed_ids(values.dictionary, operator)
        return known.take(values.indices).fill_null(NULL)
    if not pa.types.is_integer(values.type):
        return operator.apply(values, None)
    signed = not pa.types.is_unsigned_integer(values.type)
    integers = (
        values.cast(pa.int64() if signed else pa.uint64())
        .fill_null(0)
        .to_numpy(zero_copy_only=False)
    )
    ids = spread(hash_digits(integers.view(np.uint64), signed), operator.size)
    if values.null_count:
        ids[values.is_null().to_numpy(zero_copy_only=False)] = NULL
    return pa.array(ids)


_mix: Any = compiled(mix)


@compiled
def hash_digits(bits: Any, signed: bool) -> Any:
    """Hashes each whole number's decimal digits. The result equals `sluice.etl.ops.hashing.hash_texts` of its text."""
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
