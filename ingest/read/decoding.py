"""Estimates from a footer how much memory decoding a row group takes: `Decoding`. Does no I/O.

Arrow's reader holds more than its result. Until all columns of one call are done, it also keeps their stored form,
their dictionaries, and the levels that say where values are missing and lists begin. Measured with Arrow 26.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sluice.ingest.plain.footer_chunks import StoredChunk, chunks_of_group

_PHYSICAL = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
"""The bytes of a value as a Parquet reader decodes it. Values of other types vary in length."""
_ID = 4  # bytes of an id in a bag
_OFFSET = 4  # bytes of the offset where a bag starts
_PAGE = 2**20  # bytes for page headers and the dictionary, even with almost no values
_LEVEL = 2  # bytes of one level of a value
_AT_ONCE = 16 * 2**20  # columns are decoded together only if they take at most this many bytes


class ColumnSize(NamedTuple):
    """The bytes that decoding one column of a row group takes."""

    decoded: int
    """The column in memory, decoded or as it is stored."""
    extra: int
    """What the reader needs besides, until all columns of one call are done."""
    at_work: int
    """What it needs besides while it decodes this column: the array's unused capacity, and a page."""
    stored: int


@dataclass(frozen=True, slots=True)
class Decoding:
    """The memory for decoding row groups, estimated from the footer of the largest."""

    row_bytes: float
    """The bytes of a decoded row."""
    extra_bytes: int
    """The most bytes that decoding a row group takes in addition to its result."""
    portions: tuple[tuple[str, ...], ...]
    """The groups of columns that are decoded together."""
    stored_bytes: int = 0
    """The bytes of the largest row group in its file."""

    def decoded(self, rows: int) -> int:
        return round(rows * self.row_bytes)

    def at_work(self, rows: int) -> int:
        """Returns the bytes in use while a row group of `rows` rows is decoded."""
        return self.decoded(rows) + self.extra_bytes


def decoding_of(
    metadata: Any,
    group: int,
    schema: Any,
    bags: Mapping[str, float],
    *,
    scale: float = 1.0,
    file_bytes: int = 2**62,
    text_bytes: Callable[[str, StoredChunk], int] = lambda _path, _chunk: 0,
) -> Decoding:
    """Estimates the memory for decoding. `metadata` is the footer of a Parquet file of `file_bytes` bytes, and `schema`
    that of the columns to read. `bags` has the average number of ids a row. Rows of other files take up to `scale`
    times the bytes of this file's rows. `text_bytes` returns the bytes of texts that the file may store only once.
    Raises ValueError if the footer contradicts the file's size or its number of rows."""
    sizes: dict[str, list[ColumnSize]] = {name: [] for name in schema.names}
    rows = metadata.row_group(group).num_rows
    for number, chunk in enumerate(chunks_of_group(metadata, group)):
        leaf = metadata.schema.column(number)
        name = leaf.path if leaf.path in sizes else leaf.path.split(".")[0]
        if name not in sizes:
            continue
        if (
            min(chunk.values, chunk.stored, chunk.plain) < 0
            or chunk.stored > file_bytes
            or (not leaf.max_repetition_level and chunk.values != rows)
        ):
            raise ValueError(
                f"column {name!r} has {chunk.values} values in {chunk.stored} bytes, for {rows} rows in a "
                f"file of {file_bytes} bytes"
            )
        is_stored_once = chunk.dictionary or chunk.has_differences
        if leaf.physical_type == "BYTE_ARRAY" and is_stored_once:
            expected = text_bytes(leaf.path, chunk)
        else:
            expected = round(_ID * bags.get(name, 0.0) * rows)
        sizes[name].append(_column_size(chunk, leaf, schema.field(name).type, rows, expected))
    portions: list[list[str]] = []
    taken = 0
    for name, parts in sizes.items():
        size = sum(part.extra for part in parts)
        if not portions or taken + size > _AT_ONCE:
            portions.append([])
            taken = 0
        portions[-1].append(name)
        taken += size
    together = ([part for name in some for part in sizes[name]] for some in portions)
    extra_bytes = max(
        (
            sum(part.extra for part in some) + max((part.at_work for part in some), default=0)
            for some in together
        ),
        default=0,
    )
    every = [part for parts in sizes.values() for part in parts]
    return Decoding(
        scale * sum(part.decoded for part in every) / max(1, rows),
        round(scale * extra_bytes),
        tuple(map(tuple, portions)),
        round(scale * sum(part.stored for part in every)),
    )


def _column_size(chunk: StoredChunk, leaf: Any, kind: Any, rows: int, expected: int) -> ColumnSize:
    """Returns the bytes of one leaf of a column of this kind. `expected` has those of values of varying length, because
    a file may store repeated ones only once."""
    values = max(chunk.values, rows)
    width, physical = _width(kind), _PHYSICAL.get(leaf.physical_type, 0)
    repeats = leaf.max_repetition_level > 0
    plain = chunk.plain
    if physical:
        plain = min(plain, 2 * chunk.values * (physical + _LEVEL) + _PAGE)
    offsets = 0 if width and not repeats else _OFFSET * rows
    decoded = (values * width or max(plain, expected)) + offsets + values // 8
    if not offsets:
        decoded = max(decoded, plain * 65 // 64)
    room = 1 << max(0, values - 1).bit_length()  # arrays grow to powers of two
    levels = room * _LEVEL * ((leaf.max_definition_level > 0) + repeats)
    # The dictionary's page and its decoded values.
    dictionary = 2 * chunk.dictionary * plain // max(1, chunk.stored)
    converted = room * physical if physical != width else 0  # decoded first in Parquet's type
    return ColumnSize(
        decoded,
        chunk.stored + levels + dictionary + converted,
        (room - values) * width + plain,
        chunk.stored,
    )


def _width(kind: Any) -> int:
    """Returns the bytes of a value, or of a list's element, in Arrow's memory. 0: values vary in length."""
    if hasattr(kind, "value_type"):
        return _width(kind.value_type)
    try:
        return max(1, int(kind.bit_width) // 8)
    except ValueError:
        return 0
