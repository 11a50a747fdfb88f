"""Estimates how much memory decoding row groups takes, by the footer of the largest: `Decoding` and `StoredMemory`.

Arrow's reader holds more than its result. Until all columns of one call are done, it also keeps their stored form,
their dictionaries, and the levels that say where values are missing and lists begin. Measured with Arrow 26.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sluice.ingest.errors import SourceError
from sluice.ingest.plain.footer_chunks import (
    StoredChunk,
    chunks_of_group,
    delta_texts,
    group_of_longest_texts,
    most_row_bytes,
    parsing_bytes,
)
from sluice.ingest.plain.probe import elements
from sluice.ingest.read.kept_files import KeptFiles
from sluice.ingest.read.page_table import PageTable

_PHYSICAL = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
"""The bytes of a value as a Parquet reader decodes it. Values of other types vary in length."""
_ID = 4  # bytes of an id in a bag
_OFFSET = 4  # bytes of the offset where a bag starts
_PAGE = 2**20  # bytes for page headers and the dictionary, even with almost no values
_LEVEL = 2  # bytes of one level of a value
_AT_ONCE = 16 * 2**20  # columns are decoded together only if they take at most this many bytes
_SMALL_PART = 64
"""A file or row group with fewer rows than this part of the largest does not show how many bytes a row has."""
_USUAL_SCALE = 1.5
_MOST_FOOTERS = 16
"""If a file has more than so many times the bytes a row, the footers of at most so many files are looked into."""
SMALL_BYTES = 16 * 2**20
"""Texts of a column may always take this much."""
_FEW_ROWS = 256
"""Rows whose texts are decoded at once to count their bytes."""
_FIRST_PAGES_BYTES = 2**20
"""Bytes that are read at once of a column of which only the first pages are needed."""


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


def decoding_of_pieces(whole: Decoding, table: PageTable, most: int) -> tuple[Decoding, int]:
    """Estimates the memory for decoding pieces of at most `most` rows of a row group, from that of the whole one.
    Returns also the most rows of a piece and the pages that it needs."""
    taken, once = (table.taken(cuts) for cuts in (table.cuts(most), [0, table.rows]))
    rows = int(taken[..., 0].max())
    unpacked = taken[..., 2].sum(axis=0).max() / max(1, once[..., 2].sum())
    share = float((taken.max(axis=1) / np.maximum(1, once[:, 0])).max())
    dictionaries = sum(int(pages[0, 2]) for pages in table.columns.values())
    more = 2 * (share * whole.extra_bytes + dictionaries)  # levels grow to powers of two
    return replace(
        whole,
        row_bytes=whole.row_bytes * max(1.0, float(unpacked) * table.rows / rows),
        extra_bytes=min(whole.extra_bytes, round(more)),
    ), rows


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


@dataclass(frozen=True)
class StoredMemory:
    """The memory for decoding row groups of files."""

    kept: KeptFiles
    schema: pa.Schema
    """The columns in the types of the first file."""
    has_long_texts: bool
    """Whether another row group than the largest may have longer texts."""

    def decoding(self, bags: Mapping[str, float], columns: Sequence[str]) -> tuple[Decoding, int]:
        """Estimates the memory for decoding these columns from the largest row group that is read, and returns its
        number of rows. The estimate is larger if other files store more bytes a row."""
        stored = [
            file.stored_rows or kept
            for file, kept in zip(self.kept.files, self.kept.row_groups, strict=True)
        ]
        # A row group is decoded whole, however few of its rows are kept. Without any, it is not read.
        rows, number, group = max(
            (
                (rows if self.kept.row_groups[n][g] else 0, n, g)
                for n, counts in enumerate(stored)
                for g, rows in enumerate(counts)
            ),
            key=itemgetter(0),
            default=(0, -1, 0),
        )
        if number < 0:
            return Decoding(0.0, 0, (tuple(columns),)), 0
        footer = self.kept.footer(number)
        least = 1 + rows // _SMALL_PART
        sizes = [
            file.bytes / max(least, sum(counts))
            for file, counts in zip(self.kept.files, stored, strict=True)
        ]
        group = min(group, footer.num_row_groups - 1)
        try:
            scale = self._scale(sizes, number, least)
            usual = self._decoding_of(number, group, bags, scale, columns)
            # A file is opened before its row group is decoded.
            usual = replace(usual, extra_bytes=usual.extra_bytes + parsing_bytes(footer))
            if not self.has_long_texts:
                return usual, rows
            odd = group_of_longest_texts(footer)
            count = stored[number][odd] if self.kept.row_groups[number][odd] else 0
            more = self._decoding_of(number, odd, bags, scale, columns).at_work(count)
            extra_bytes = max(usual.extra_bytes, more - usual.decoded(count))
            return replace(usual, extra_bytes=extra_bytes), rows
        except Exception as error:
            raise SourceError(
                f"{self.kept.files[number].path}: its footer cannot be read ({type(error).__name__}: "
                f"{error}); the file is damaged. Write it again"
            ) from error

    def _scale(self, sizes: Sequence[float], number: int, least: int) -> float:
        """Returns how many times as many bytes a row takes in another file. `sizes` has the bytes a row of each file.

        Most of a file with small row groups is its footer. So files that seem to have far more are looked into."""
        if max(sizes) <= _USUAL_SCALE * sizes[number]:
            return max(sizes) / sizes[number] if sizes[number] else 1.0
        own = most = most_row_bytes(self.kept.footer(number), least)
        largest = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
        for n in largest[:_MOST_FOOTERS]:
            if sizes[n] > most:
                most = max(most, most_row_bytes(self.kept.footer(n), least))
        unseen = [sizes[n] for n in largest[_MOST_FOOTERS:]]
        return max([most, *unseen]) / own if own else 1.0

    def _decoding_of(
        self,
        number: int,
        group: int,
        bags: Mapping[str, float],
        scale: float,
        columns: Sequence[str],
    ) -> Decoding:
        """Estimates the memory for decoding a row group by its footer, which has the file's own names of columns."""

        def text_bytes(path: str, chunk: StoredChunk) -> int:
            try:
                return self._text_bytes(number, group, path, chunk)
            except Exception:  # reading the row group raises the error
                return 0

        located = self.kept.located[number]
        columns = [name for name in columns if name in self.schema.names]
        names = [name for name in columns if name not in located.constants]
        stored = located.stored(names)
        decoding = decoding_of(
            self.kept.footer(number),
            group,
            pa.schema(
                [self.schema.field(n).with_name(own) for n, own in zip(names, stored, strict=True)]
            ),
            {own: bags[name] for name, own in zip(names, stored, strict=True) if name in bags},
            scale=scale,
            file_bytes=self.kept.files[number].bytes or 2**62,
            text_bytes=text_bytes,
        )
        portions = tuple(tuple(located.named(some)) for some in decoding.portions)
        added = tuple(name for name in columns if name in located.constants)
        return replace(decoding, portions=(*portions, added) if added else portions)

    def _text_bytes(self, number: int, group: int, path: str, chunk: StoredChunk) -> int:
        """Returns the bytes of a column of texts in memory. `path` names it in the footer.

        A dictionary page stores a text once. Each value has its own copy, unless the column is read as a dictionary."""
        footer = self.kept.footer(number)
        is_dictionary = path in self.kept.located[number].stored(self.kept.dictionaries)
        if is_dictionary and not delta_texts(footer, [path]):
            return 0
        is_plain = bool(delta_texts(footer, [path], [group]))
        file = pq.ParquetFile(
            self.kept.open(number),
            read_dictionary=[] if is_plain else [path],
            # Without a buffer, Arrow gets all stored bytes of a column before its first page.
            buffer_size=_FIRST_PAGES_BYTES if chunk.texts else 0,
            pre_buffer=not chunk.texts,
        )
        with closing(file):
            if (
                is_plain
            ):  # Arrow's writer does not count a text that is the same as the one before it
                batches = file.iter_batches(_FEW_ROWS, [group], [path], use_threads=False)
                texts = (elements(batch.column(0)) for batch in batches)
                return 2 * sum(pc.sum(pc.binary_length(some)).as_py() or 0 for some in texts)
            [first] = next(file.iter_batches(1, [group], [path], use_threads=False)).columns
            if not pa.types.is_dictionary((texts := elements(first)).type):
                return 0
            longest = pc.max(pc.binary_length(texts.dictionary)).as_py() or 0
            if chunk.values * longest <= max(chunk.plain, SMALL_BYTES):
                return chunk.values * longest
            if chunk.texts:  # reading them all would take as long as decoding the row group
                return 2 * chunk.texts
            whole = file.read_row_group(group, [path], use_threads=False).column(0)
            return sum(  # twice, because arrays are copied while they grow
                2 * (pc.sum(pc.binary_length(texts.dictionary).take(texts.indices)).as_py() or 0)
                for texts in map(elements, whole.chunks)
            )
