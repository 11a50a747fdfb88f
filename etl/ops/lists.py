"""Operators on lists, one of them in each row: first_x, and bag (a statistic of it)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.ops.base import Operator, between
from sluice.etl.ops.hashing import Whole


def flat(column: pa.Array) -> tuple[pa.Array, Whole]:
    """Returns the elements of all lists in one array, and the length of each list. A null list counts as empty."""
    lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0)).astype(np.int64)
    return pc.list_flatten(column), lengths


def relisted(values: pa.Array, lengths: Whole) -> pa.Array:
    """Returns lists of these lengths. It is the reverse of `flat`."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def packed(column: pa.Array) -> pa.Array:
    """Packs lists of ids as little-endian words of 32 bits in a binary column: its offsets are the lengths, times
    four."""
    values, lengths = flat(column)
    content = np.asarray(values.cast(pa.uint32())).astype("<u4", copy=False)
    offsets = np.concatenate([[0], np.cumsum(lengths * 4)]).astype(np.int32)
    return pa.BinaryArray.from_buffers(
        pa.binary(), len(column), [None, pa.py_buffer(offsets), pa.py_buffer(content)]
    )


@dataclass(frozen=True, kw_only=True)
class FirstX(Operator):
    """The first `size` elements of each list, or the last ones with `last = true`."""

    name = "first_x"
    takes = ("texts", "numbers", "ids")
    gives = "texts"
    size: Annotated[int, between(1, 1_000_000)]
    last: bool = False

    def kind(self, taken: str) -> str:
        return taken

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        values, lengths = flat(column)
        place = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        if self.last:
            place = np.repeat(lengths, lengths) - 1 - place
        return relisted(values.filter(pa.array(place < self.size)), np.minimum(lengths, self.size))


@dataclass(frozen=True, kw_only=True)
class Bag(Operator):
    """A statistic of each list: `size`, or of its numbers `sum`, `mean`, `min`, `max`. An empty list's mean, min and
    max are null; elements that are null do not count."""

    name = "bag"
    takes = ("numbers", "texts", "ids")
    of: Literal["size", "sum", "mean", "min", "max"] = "size"

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        values, lengths = flat(column)
        if self.of == "size":
            return pa.array(lengths.astype(np.float64))
        row = np.repeat(np.arange(len(lengths)), lengths)
        there = np.asarray(pc.is_valid(values))
        number = np.asarray(pc.cast(values.drop_null(), pa.float64(), safe=False))
        row = row[there]
        counts = np.bincount(row, minlength=len(lengths))
        if self.of in ("sum", "mean"):
            result = np.bincount(row, number, len(lengths)).astype(np.float64)
            if self.of == "sum":
                return pa.array(result)
            result = result / np.maximum(counts, 1)
        else:
            result = np.full(len(lengths), math.inf if self.of == "min" else -math.inf)
            (np.minimum if self.of == "min" else np.maximum).at(result, row, number)
        return pa.array(result, mask=counts == 0)
