"""Operators that turn text into text (map, lower, replace, concat), and those that make lists of its parts (split,
ngram)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.common.errors import OperatorError
from sluice.etl.ops.base import BETWEEN, DIFFERENT, Limit, Operator, as_text, between, escaped
from sluice.etl.ops.lists import flat, relisted

_NO_VALUE = "\x00"


@dataclass(frozen=True, kw_only=True)
class Map(Operator):
    """Replaces each of `values` by the text at the same place in `to`, or by null if that is empty; other texts stay,
    or become null with `others = "null"`."""

    name = "map"
    takes = ("text",)
    gives = "text"
    values: Annotated[tuple[str, ...], DIFFERENT]
    to: tuple[str, ...]
    others: Literal["keep", "null"] = "keep"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.to) != len(self.values):
            raise OperatorError(f"to: has {len(self.to)} texts for {len(self.values)} values")

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        place = pc.index_in(column, pa.array(self.values, pa.string()))
        mapped = pa.array([text or None for text in self.to], pa.string()).take(place)
        if self.others == "null":
            return mapped
        return pc.if_else(pc.is_valid(place), mapped, column)


@dataclass(frozen=True, kw_only=True)
class Lower(Operator):
    """The text in small letters, of any alphabet; nulls stay."""

    name = "lower"
    takes = ("text",)
    gives = "text"

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        return pc.utf8_lower(column)


@dataclass(frozen=True, kw_only=True)
class Replace(Operator):
    """Replaces whatever the regular expression `pattern` (RE2's) finds by `to`, in which \\1 is what its first group
    found; nulls stay."""

    name = "replace"
    takes = ("text",)
    gives = "text"
    pattern: str
    to: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self.apply(pa.array([""]), None)
        except pa.ArrowInvalid as error:
            raise OperatorError(f"pattern = {self.pattern!r}, to = {self.to!r}: {error}") from None

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        return pc.replace_substring_regex(column, self.pattern, self.to)


@dataclass(frozen=True, kw_only=True)
class Concat(Operator):
    """Joins several columns' values into one text, so that operators on one column can take their combination. Never
    null: a null among them is a value of its own."""

    name = "concat"
    takes = ("row",)
    gives = "text"

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        return pc.binary_join_element_wise(*map(_part, column.flatten()), BETWEEN)


def _part(column: pa.Array) -> pa.Array:
    texts = as_text(column)
    if (
        pa.types.is_string(column.type)
        and pc.any(pc.match_substring_regex(texts, r"[\x00\x1b\x1f]")).as_py()
    ):
        texts = escaped(texts, _NO_VALUE)
    return pc.fill_null(texts, _NO_VALUE)


@dataclass(frozen=True, kw_only=True)
class Split(Operator):
    """The parts of a delimited text, as a list; null and the empty text give an empty one."""

    name = "split"
    takes = ("text",)
    gives = "texts"
    separator: Annotated[str, Limit(bool, "must not be empty")] = "|"

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        empty = pc.equal(column, "")
        cut = pc.split_pattern(
            pc.if_else(empty, pa.scalar(None, pa.string()), column), self.separator
        )
        return pc.if_else(pc.is_valid(cut), cut, pa.scalar([], pa.list_(pa.string())))


@dataclass(frozen=True, kw_only=True)
class Ngram(Operator):
    """Makes one text of each `size` consecutive elements of a list; a shorter list gives an empty one."""

    name = "ngram"
    takes = ("texts", "ids")
    gives = "texts"
    size: Annotated[int, between(2, 8)] = 2

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        values, lengths = flat(column)
        values = _part(values)
        many = max(0, len(values) - self.size + 1)
        grams = pc.binary_join_element_wise(
            *[values.slice(i, many) for i in range(self.size)], BETWEEN
        )
        # Among the windows over the elements of all rows, those that are within one row stay.
        ends = np.repeat(np.cumsum(lengths), lengths)[:many]
        inside = np.arange(many) + self.size <= ends
        return relisted(grams.filter(pa.array(inside)), np.maximum(lengths - self.size + 1, 0))
