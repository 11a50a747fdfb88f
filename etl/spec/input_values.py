"""`converted` converts a Parquet column to the type of a spec, in the ETL and in the loader alike.

A fraction does not fit `int`. Types without a conversion here are refused.
"""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.ops.hashing import Flags

ARROW_TYPES = {
    "int": pa.int64(),
    "float": pa.float64(),
    "text": pa.string(),
    "texts": pa.list_(pa.string()),
    "floats": pa.list_(pa.float64()),
}
THOUSANDS = (".", ",", " ", "'", "\u00a0", "\u202f")
"""The marks that may separate thousands in texts of numbers."""
_SPARK = {
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "uint8": "smallint",
    "uint16": "int",
    "uint32": "bigint",
    "uint64": "decimal(20,0)",
    "halffloat": "float",
    "bool": "boolean",
    "large_string": "string",
    "string_view": "string",
    "date32[day]": "date",
}
_NUMBERS = ("boolean", "tinyint", "smallint", "int", "bigint")
_READ = {
    "int": _NUMBERS,
    "float": (*_NUMBERS, "float", "double", "decimal(20,0)"),
    "text": (*_NUMBERS, "decimal(20,0)", "string", "date"),
    "texts": tuple(f"array<{kind}>" for kind in ("string", *_NUMBERS[1:])),
    "floats": tuple(f"array<{kind}>" for kind in (*_NUMBERS[1:], "float", "double")),
}
_SECONDS_OF_A_DAY = 86_400
_EXACT_DIGITS = 15
"""Whole numbers of up to so many digits become floats without rounding."""


def grouped_digits(thousands: str) -> str:
    """Returns a pattern of the digits of a number with marks of thousands."""
    return rf"[1-9][0-9]{{0,2}}(?:{re.escape(thousands)}[0-9]{{3}})+"


def spark_name(kind: pa.DataType) -> str:
    """Returns Spark's name for a type in a Parquet file."""
    if pa.types.is_dictionary(kind):
        return spark_name(kind.value_type)
    if is_list(kind):
        return f"array<{spark_name(kind.value_type)}>"
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    return _SPARK.get(str(kind), str(kind).replace("decimal128", "decimal").replace(", ", ","))


def is_text(kind: pa.DataType) -> bool:
    """Whether values of this type are texts."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_list(kind: pa.DataType) -> bool:
    t = pa.types
    return bool(t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind))


def converted(values: pa.Array, kind: str) -> tuple[pa.Array, Flags | None]:
    """Returns the values in the type of a spec's column, and which values do not fit it, or None if all types of values
    do. Raises ArrowInvalid for types that are not read here. Times become seconds since 1970. Times without a zone are
    in UTC."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    have = values.type
    want = ARROW_TYPES[kind]
    name = spark_name(values.type)
    if pa.types.is_decimal(have) and kind in ("int", "float"):
        if kind == "float":
            return _floats(values), None
        # Without floats, which would miss the last digits of a long id.
        whole = values.cast(pa.int64(), safe=False)
        exact = pa.decimal256(76, max(0, have.scale))
        lost = pc.fill_null(pc.not_equal(whole.cast(exact), values.cast(exact)), False)
        kept = pc.if_else(lost, pa.scalar(None, pa.int64()), whole)
        return kept, np.asarray(lost)
    if kind == "int" and (pa.types.is_floating(have) or have == pa.uint64()):
        return _whole(values)
    if kind in ("int", "float") and (pa.types.is_timestamp(have) or name == "date"):
        seconds = _seconds(values)
        return (pc.floor(seconds).cast(want) if kind == "int" else seconds), None
    if pa.types.is_decimal(have) and kind == "text" and have.scale == 0:
        return values.cast(want), None
    if have == want or pa.types.is_null(have) or name in _READ[kind]:
        # A float rounds large whole numbers.
        return values.cast(want, safe=not kind.startswith("float")), None
    raise pa.ArrowInvalid(f"{name} is not read as {kind}")


def _floats(values: pa.Array) -> pa.Array:
    """Returns the nearest float to each decimal. Arrow's own cast misses the last digit of some."""
    kind, end = values.type, values.offset + len(values)
    if not (
        len(values)
        and pa.types.is_decimal128(kind)
        and kind.precision <= _EXACT_DIGITS
        and kind.scale >= 0
    ):
        return values.cast(pa.string()).cast(pa.float64())
    # These are the lower halves of 128 bits.
    whole = np.frombuffer(values.buffers()[1], np.int64)[2 * values.offset : 2 * end : 2]
    return pa.array(whole / 10.0**kind.scale, mask=np.asarray(values.is_null()))


def _seconds(values: pa.Array) -> pa.Array:
    if not pa.types.is_timestamp(values.type):
        return pc.multiply(values.cast(pa.int32()).cast(pa.float64()), float(_SECONDS_OF_A_DAY))
    unit = values.type.unit
    try:
        micros = values.cast(pa.timestamp("us", values.type.tz), safe=unit != "ns").cast(pa.int64())
    except pa.ArrowInvalid:  # thousands of years after any log, microseconds do not fit 64 bits
        return pc.divide(
            values.cast(pa.int64()).cast(pa.float64(), safe=False), {"s": 1.0, "ms": 1e3}[unit]
        )
    # From the year 2255 on, this is the nearest float.
    return pc.divide(micros.cast(pa.float64(), safe=False), 1e6)


def _whole(values: pa.Array) -> tuple[pa.Array, Flags]:
    """Returns numbers as int64, and which of them do not fit: fractions, and numbers beyond 64 bits."""
    nulls = np.asarray(pc.is_null(values))
    numbers = np.asarray(pc.fill_null(values, pa.scalar(0, values.type)))
    fits = (
        numbers < np.uint64(2**63)
        if values.type == pa.uint64()
        else (numbers >= -(2.0**63)) & (numbers < 2.0**63) & (np.trunc(numbers) == numbers)
    )
    return pa.array(np.where(fits, numbers, 0).astype(np.int64), mask=nulls | ~fits), ~fits & ~nulls
