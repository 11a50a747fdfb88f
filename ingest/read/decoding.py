"""Estimates from a footer how much memory decoding a row group takes: `Decoding`. Does no I/O.

Arrow's reader holds more than its result. Until all columns of one call are done, it also keeps their stored form,
their dictionaries, and the levels that say where values are missing and lists begin. Measured with Arrow 26.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sluice.ingest.plain.footer_chunks import StoredChunk, chunks_of_group

_PHYSICAL = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
"""The bytes of a value as a Parquet reader decodes it. Values of other types vary in length."""
_ID = 4  # bytes of an id in a bag
_OFFSET = 4  # bytes of the offset where a bag starts
_PAGE = 2**20  # bytes for page headers and the dictionary, even with almost no values
_LEVEL = 2  # bytes of one level of a value
_AT_ONCE = 16 * 2**20  # columns are decoded together only if they take at most this many bytes


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """One column in a row group, as a footer describes it."""

    values: int
    width: int
    """The bytes of a decoded value. 0: values vary in length."""
    physical: int
    """The bytes of a value in Parquet's physical type, which the reader decodes first."""
    levels: int
    """The number of levels: one if values may be missing, and one if the column holds lists."""
    stored: int
    """The bytes in the file."""
    plain: int
    """The bytes in the file without compression, including those of the dictionary."""
    dictionary: int
    """The bytes of the dictionary in the file."""
    expected: int = 0
    """The expected bytes of values of varying length. The file may store repeated values only once."""
    begins: int = 0
    """The bytes of the offsets where each row's list begins."""

    @property
    def decoded(self) -> int:
        """The bytes of the column in memory, decoded or as it is stored."""
        decoded = self.values * self.width or max(self.plain, self.expected)
        decoded += self.begins + self.values // 8
        return decoded if self.begins else max(decoded, self.plain * 65 // 64)

    @property
    def extra_bytes(self) -> int:
        """The bytes that the reader needs in addition to the result, until all columns of one call are done."""
        room = 1 << max(0, self.values - 1).bit_length()  # arrays grow to powers of two
        # The dictionary's page and its decoded values.
        dictionary = 2 * self.dictionary * self.plain // max(1, self.stored)
        converted = room * self.physical if self.physical != self.width else 0
        return self.stored + room * _LEVEL * self.levels + dictionary + converted

    @property
    def at_work(self) -> int:
        """The additional bytes while the column is being decoded: the array's unused capacity, and a page."""
        room = 1 << max(0, self.values - 1).bit_length()
        return (room - self.values) * self.width + self.plain


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
    times the bytes of this file's rows. `text_bytes` returns the bytes of texts that the file may store only once."""
    chunks = chunks_of(metadata, group, schema, bags, file_bytes=file_bytes, text_bytes=text_bytes)
    portions: list[list[str]] = []
    taken = 0
    for name, parts in chunks.items():
        size = sum(part.extra_bytes for part in parts)
        if not portions or taken + size > _AT_ONCE:
            portions.append([])
            taken = 0
        portions[-1].append(name)
        taken += size
    extra_bytes = max(
        (
            sum(part.extra_bytes for name in some for part in chunks[name])
            + max((part.at_work for name in some for part in chunks[name]), default=0)
            for some in portions
        ),
        default=0,
    )
    decoded = sum(part.decoded for parts in chunks.values() for part in parts)
    stored = sum(part.stored for parts in chunks.values() for part in parts)
    rows = max(1, metadata.row_group(group).num_rows)
    return Decoding(
        scale * decoded / rows,
        round(scale * extra_bytes),
        tuple(map(tuple, portions)),
        round(scale * stored),
    )


def chunks_of(
    metadata: Any,
    group: int,
    schema: Any,
    bags: Mapping[str, float],
    *,
    file_bytes: int,
    text_bytes: Callable[[str, StoredChunk], int],
) -> dict[str, list[ColumnChunk]]:
    """Returns the chunks of each column of `schema`: one, or several for a nested column. Raises ValueError if the
    footer contradicts the file's size or its number of rows."""
    wanted: dict[str, list[ColumnChunk]] = {name: [] for name in schema.names}
    rows = metadata.row_group(group).num_rows
    for leaf, chunk in enumerate(chunks_of_group(metadata, group)):
        kind = metadata.schema.column(leaf)
        name = kind.path if kind.path in wanted else kind.path.split(".")[0]
        if name not in wanted:
            continue
        width, physical = _width(schema.field(name).type), _PHYSICAL.get(kind.physical_type, 0)
        if (
            min(chunk.values, chunk.stored, chunk.plain) < 0
            or chunk.stored > file_bytes
            or (not kind.max_repetition_level and chunk.values != rows)
        ):
            raise ValueError(
                f"column {name!r} has {chunk.values} values in {chunk.stored} bytes, for {rows} rows in a "
                f"file of {file_bytes} bytes"
            )
        wanted[name].append(
            ColumnChunk(
                values=max(chunk.values, rows),
                width=width,
                physical=physical,
                levels=(kind.max_definition_level > 0) + (kind.max_repetition_level > 0),
                stored=chunk.stored,
                dictionary=chunk.dictionary,
                plain=min(chunk.plain, 2 * chunk.values * (physical + _LEVEL) + _PAGE)
                if physical
                else chunk.plain,
                expected=text_bytes(kind.path, chunk)
                if kind.physical_type == "BYTE_ARRAY"
                and (chunk.dictionary or chunk.has_differences)
                else round(_ID * bags.get(name, 0.0) * rows),
                begins=0 if width and not kind.max_repetition_level else _OFFSET * rows,
            )
        )
    return wanted


def _width(kind: Any) -> int:
    """Returns the bytes of a value, or of a list's element, in Arrow's memory. 0: values vary in length."""
    if hasattr(kind, "value_type"):
        return _width(kind.value_type)
    try:
        return max(1, int(kind.bit_width) // 8)
    except ValueError:
        return 0
