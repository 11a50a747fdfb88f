"""Operators on lists, one of them in each row: first_x, bag (a statistic of it), overlap, recent (of a list of times);
flags and lookup, which give lists."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.common.errors import OperatorError
from sluice.etl.ops.base import POSITIVE, Operator, as_number, as_text, between, ends_of
from sluice.etl.ops.hashing import AnyArray, Whole, hash_texts


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
            result = ends_of(self.of, row, number, len(lengths))
        return pa.array(result, mask=counts == 0)


@dataclass(frozen=True, kw_only=True)
class Overlap(Operator):
    """How many different elements two lists share; with `share = true` divided by how many they have together."""

    name = "overlap"
    takes = ("row",)
    share: bool = False

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        fields = column.flatten()
        if len(fields) != 2 or not all(pa.types.is_list(f.type) for f in fields):
            raise OperatorError("overlap takes two columns of lists")
        count = len(column)
        sides = []
        for values, lengths in map(flat, fields):
            rows = np.repeat(np.arange(count, dtype=np.uint64), lengths)
            pairs = np.column_stack([rows, hash_texts(as_text(values))])
            sides.append(np.unique(pairs, axis=0))
        every, *each = (
            np.bincount(pairs[:, 0].astype(np.int64), minlength=count)
            for pairs in (np.unique(np.concatenate(sides), axis=0), *sides)
        )
        both = each[0] + each[1] - every
        return pa.array(both / np.maximum(every, 1) if self.share else both.astype(np.float64))


@dataclass(frozen=True, kw_only=True)
class Recent(Operator):
    """Counts how many times in a list are earlier than the row's time. With `of = "span"` it gives the time since the
    first of them. `within` limits how much earlier they may be. `gap` limits them to the row's session, in which
    neighbours are at most `gap` apart. Null without a time."""

    name = "recent"
    takes = ("row",)
    columns = ("number", "numbers")
    within: Annotated[float, POSITIVE] | None = None
    gap: Annotated[float, POSITIVE] | None = None
    of: Literal["count", "span"] = "count"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.within is None and self.gap is None:
            raise OperatorError("within: give how far back to look, or the gap that parts sessions")

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        now, lists = column.flatten()
        values, lengths = flat(lists)
        whole = pa.types.is_integer(now.type) and pa.types.is_integer(values.type)
        at, times = (
            np.asarray(pc.fill_null(one if whole else as_number(one), 0 if whole else np.nan))
            for one in (now, values)
        )
        # Floats would merge nanoseconds. A whole time less an earlier one fits 64 bits without a sign.
        kind = np.uint64 if whole else np.float64
        within, gap = (
            limit and (min(int(limit), 2**64 - 1) if whole else limit)
            for limit in (self.within, self.gap)
        )
        row = np.repeat(np.arange(len(at)), lengths)
        earlier = np.asarray(values.is_valid()) & (times < at[row])
        if within is not None and whole:
            earlier &= (at[row] - times).view(kind) <= within
        elif within is not None:
            earlier &= times >= at[row] - within
        # Each row's own time is appended to the earlier ones.
        row, times = (
            np.concatenate([row[earlier], np.arange(len(at))]),
            np.concatenate([times[earlier], at]),
        )
        ordered = times[np.lexsort((times, row))]
        ends = np.cumsum(np.bincount(row, minlength=len(at))) - 1
        first = np.concatenate([[0], ends[:-1] + 1]) if len(at) else ends
        if gap is not None:
            begins = np.diff(ordered, prepend=ordered[:1]).view(kind) > gap
            begins[first] = True
            first = np.maximum.accumulate(np.where(begins, np.arange(len(ordered)), 0))[ends]
        found = ends - first if self.of == "count" else (ordered[ends] - ordered[first]).view(kind)
        missing = np.asarray(now.is_null(nan_is_null=True))
        return pa.array(found.astype(np.float64), mask=missing)


@dataclass(frozen=True, kw_only=True)
class Flags(Operator):
    """The names of those of several columns of numbers that are neither 0 nor null, as a list."""

    name = "flags"
    takes = ("row",)
    gives = "texts"

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        wrong = next(
            (f.name for f in column.type if pa.types.is_string(f.type) or pa.types.is_list(f.type)),
            None,
        )
        if wrong is not None:
            raise OperatorError(
                f"flags takes columns of numbers, and {wrong!r} is {column.type.field(wrong).type}"
            )
        raised = np.stack(
            [np.asarray(pc.fill_null(pc.not_equal(field, 0), False)) for field in column.flatten()],
            axis=1,
        )
        names = pa.array([field.name for field in column.type], pa.string())
        return relisted(names.take(pa.array(np.nonzero(raised)[1])), raised.sum(axis=1))


@dataclass(frozen=True, kw_only=True)
class Vectors(Operator):
    """The `width` numbers in the row of the matrix in `file` (numpy's .npy) that an id names."""

    name = "lookup"
    takes = ("id",)
    gives = "numbers"
    file: str
    width: Annotated[int, between(1, 65_536)]

    @cached_property
    def matrix(self) -> AnyArray:
        """The matrix, mapped into memory at first use: a spec can be read where the file is not."""
        try:
            found = np.load(self.file, mmap_mode="r", allow_pickle=False)
        except OSError as error:
            raise OperatorError(
                f"lookup: {self.file} cannot be read ({error.strerror or error}); put the matrix "
                "there"
            ) from None
        except ValueError as error:
            raise OperatorError(
                f"lookup: {self.file} holds no matrix in numpy's format ({error})"
            ) from None
        if not isinstance(found, np.ndarray) or found.ndim != 2 or found.dtype.kind not in "fiu":
            raise OperatorError(
                f"lookup: {self.file} holds no matrix of numbers, one row for each id"
            )
        if found.shape[1] != self.width:
            raise OperatorError(
                f"lookup: the vectors in {self.file} have {found.shape[1]} numbers, not width = "
                f"{self.width}"
            )
        return found

    def check_reach(self, cardinality: int | None, column: str) -> None:
        """Raises OperatorError if ids may be beyond the last vector."""
        if cardinality is not None and cardinality > len(self.matrix):
            raise OperatorError(
                f"lookup for {column!r}: ids go up to {cardinality - 1}, and {self.file} has "
                f"{len(self.matrix)} vectors; write one for each id"
            )

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        ids = np.asarray(column.cast(pa.int64()))
        if len(ids) and not (ids.min() >= 0 and ids.max() < len(self.matrix)):
            wrong = ids[(ids < 0) | (ids >= len(self.matrix))][0]
            raise OperatorError(
                f"lookup: id {wrong} is beyond the {len(self.matrix)} vectors in {self.file}"
            )
        found = np.asarray(self.matrix[ids], np.float64)
        return relisted(pa.array(found.reshape(-1)), np.full(len(ids), self.width))
