"""Reads columns of numbers as a Parquet file stores them: `StoredRows`, the rows of a row group of which some columns
are still pages.

Most of the time of a row goes into decoding. Arrow decodes a column into memory, and the move to batches reads it from
there again. A column that stays stored is unpacked in the core's cache, at the moment of the move
(`sluice.ingest.stages.scatter_kernel`).

A column of a row group stays stored if no value may be missing and each value has 4 or 8 bytes. Its pages must be
plain, or indices into a dictionary, uncompressed or in LZ4. Arrow decodes all other columns. It also decodes a
column whose pages this module does not understand, and raises the error if such a page is damaged.

Every number that a file gives is checked here before anything is read through it. `page_table` leaves out a column with
a page that lies outside its chunk, or whose sizes contradict each other. The indices of a dictionary, and the content
of LZ4, are checked when they are unpacked.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from zlib_ng.zlib_ng import crc32

from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.plain.footer_chunks import footer_bytes
from sluice.ingest.stages.scatter_kernel import (
    DICTIONARY,
    INDICES,
    LZ4,
    PAGE,
    READ_BEYOND,
    VALUES,
    compiled,
    unpack_column,
)
from sluice.ingest.stages.shuffle import DamagedPage

_TYPES = {
    ("INT32", pa.int32()): np.int32,
    ("INT32", pa.int8()): np.int32,
    ("FLOAT", pa.float32()): np.float32,
    ("INT64", pa.int64()): np.int64,
    ("DOUBLE", pa.float64()): np.float64,
}
"""The types of columns that may stay stored: Parquet's and Arrow's, and the type of a stored value."""
_UNCOMPRESSED, _LZ4_RAW = 0, 7  # codecs in parquet.thrift
_ENCODINGS = (
    1 << 0 | 1 << 2 | 1 << 3 | 1 << 8
)  # plain, both names of a dictionary's indices, levels
_ROW_GROUPS, _CHUNKS, _META_DATA, _FILE_PATH = 4, 1, 3, 1  # fields of a footer
_ENCODING_LIST, _CODEC, _COUNT, _SIZE, _DATA, _DICTIONARY_AT = 2, 4, 5, 7, 9, 11
_CHUNK = _ROW_GROUPS << 6 | _CHUNKS
_MOST_NUMBERS = 128  # numbers in the head of a page; a head with more is not understood
_LEAST_STEP = 12  # bits of the least difference between the lengths of two buffers
_PAGE_ROWS = 1024  # a chunk with more pages than one for so many rows is left to Arrow


@compiled
def thrift_numbers(raw: Any, at: Any, end: Any, numbers: Any) -> Any:
    """Parses one struct of Thrift's compact protocol at `raw[at:end]`. Writes a pair for each number in it: the path of
    its field, with 6 bits a level, and its value. A text counts as its length, a struct as 0.

    Returns how many pairs there are, and where the struct ends. A count below 0: the bytes are no such struct, or
    `numbers` has too little room."""
    # By depth: how many elements of a list are left, or -1 for a struct; their type; the path; the last field.
    stack = np.zeros((32, 4), np.int64)
    stack[0, 0] = -1
    count = depth = 0
    while depth >= 0:
        if stack[depth, 0] == 0:
            depth -= 1
            continue
        if at >= end or depth > 8:
            return -1, at
        if stack[depth, 0] > 0:
            stack[depth, 0] -= 1
            kind, path = stack[depth, 1], stack[depth, 2]
            at += kind <= 2  # a bool in a list has a byte
        else:
            head = np.int64(raw[at])
            at += 1
            kind = head & 15
            if kind == 0:
                depth -= 1
                continue
            field = stack[depth, 3] + (head >> 4)
            if head >> 4 == 0:
                value, at = _varint(raw, at, end)
                field = (value >> 1) ^ -(value & 1)
            stack[depth, 3] = field
            if not 0 <= field < 64:
                return -1, at
            path = stack[depth, 2] << 6 | field
        if 1 <= kind <= 2:
            continue
        value = np.int64(0)
        if 9 <= kind <= 10:
            size, element, at = _list_head(raw, at, end)
            depth += 1
            stack[depth, 0], stack[depth, 1], stack[depth, 2] = size, element, path
            continue
        if kind == 12:
            depth += 1
            stack[depth, 0], stack[depth, 2], stack[depth, 3] = -1, path, 0
        else:
            value, at = _value(raw, at, end, kind)
        if at > end or count == len(numbers):
            return -1, at
        numbers[count, 0] = path
        numbers[count, 1] = value
        count += 1
    return count, at


@compiled
def _value(raw: Any, at: Any, end: Any, kind: Any) -> Any:
    """Returns a number, or the length of a text, and where it ends: beyond `end` for what is neither."""
    if kind == 3:
        return np.int64(0), at + 1
    if kind == 7:
        return np.int64(0), at + 8
    if not (4 <= kind <= 6 or kind == 8):
        return np.int64(0), end + 1
    value, at = _varint(raw, at, end)
    if kind == 8:
        return (value, at + value) if 0 <= value <= end - at else (value, end + 1)
    return (value >> 1) ^ -(value & 1), at


@compiled
def _list_head(raw: Any, at: Any, end: Any) -> Any:
    """Returns how many elements a list has, their type, and where the first begins: beyond `end` for no list."""
    if at >= end:
        return 0, 0, end + 1
    head = np.int64(raw[at])
    size, at = head >> 4, at + 1
    if size == 15:
        size, at = _varint(raw, at, end)
    return (size, head & 15, at) if 0 <= size <= end - at else (0, 0, end + 1)


@compiled
def _varint(raw: Any, at: Any, end: Any) -> Any:
    """Returns a number and where it ends. -1: it has no end."""
    value = np.int64(0)
    shift = 0
    while at < end and shift < 63:
        byte = np.int64(raw[at])
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return np.int64(-1), end + 1


@compiled
def page_table(raw: Any, chunks: Any, rows: Any, pages: Any, checksums: Any, counts: Any) -> None:  # noqa: PLR0917
    """Reads the heads of all pages. `chunks` has for each column: where its chunk begins and ends in `raw`, the bytes
    of a value, and whether pages are in LZ4. Fills `pages`, with addresses from the start of `raw`, `checksums` (-1:
    none), and the number of pages of each column: -1 if the chunk has anything that is not understood."""
    numbers = np.empty((_MOST_NUMBERS, 2), np.int64)
    for c in range(len(chunks)):
        at, end, width, packed = chunks[c]
        counts[c] = -1
        left = rows
        distinct = np.int64(0)
        n = 0
        while at < end and n < pages.shape[1]:
            head, at = thrift_numbers(raw, at, end, numbers)
            page = pages[c, n]
            kind = unpacked = size = values = encoding = checksum = np.int64(-1)
            for k in range(head):
                path, value = numbers[k]
                if path == 1:
                    kind = value
                elif path == 2:
                    unpacked = value
                elif path == 3:
                    size = value
                elif path == 4:
                    checksum = value & 0xFFFFFFFF
                elif path == (5 << 6 | 1) or path == (7 << 6 | 1):
                    values = value
                elif path == (5 << 6 | 2) or path == (7 << 6 | 2):
                    encoding = value
            plain = values * width == unpacked
            if head < 0 or not 0 < size <= end - at or not 0 <= values <= rows:
                break
            if not packed and size != unpacked:
                break
            if kind == 2 and n == 0 and plain and encoding in (0, 2):
                page.form, page.rows = DICTIONARY, 0
                distinct = values
            elif kind == 0 and encoding == 0 and plain:
                page.form, page.rows = VALUES, values
            elif (
                kind == 0
                and encoding in (2, 8)
                and distinct > 0
                and 0 < unpacked <= 8 * values + 64
            ):
                page.form, page.rows = INDICES, values
            else:
                break
            page.address, page.size, page.unpacked, page.packed = at, size, unpacked, packed
            checksums[c, n] = checksum
            left -= page.rows
            at += size
            n += 1
        if at == end and left == 0:
            counts[c] = n


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """The stored bytes of some column chunks of a row group."""

    fields: tuple[pa.Field, ...]
    """The columns, as Arrow would decode them."""
    rows: int
    data: npt.NDArray[np.uint8]
    """All bytes, and `READ_BEYOND` more."""
    chunks: npt.NDArray[np.int64]
    """For each column, what `page_table` takes."""


class StoredColumns:
    """Which columns of an open file may stay stored, and where their chunks are."""

    def __init__(self, metadata: pq.FileMetaData, schema: pa.Schema, size: int):
        """`size` is the number of bytes of the file."""
        self._rows = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
        leaves = [metadata.schema.column(number) for number in range(metadata.num_columns)]
        times = Counter(leaf.path for leaf in leaves)
        self._leaves: dict[str, int] = {}
        self._fields: dict[str, pa.Field] = {}
        widths = np.zeros(len(leaves), np.int64)
        for number, leaf in enumerate(leaves):
            field = schema.get_field_index(leaf.path)
            kind = None if field < 0 else _TYPES.get((leaf.physical_type, schema.types[field]))
            if kind is not None and times[leaf.path] == 1 and not leaf.max_definition_level:
                self._leaves[leaf.path] = number
                self._fields[leaf.path] = schema.field(field)
                widths[number] = np.dtype(kind).itemsize
        if not self._leaves:
            return
        chunk = _chunk_numbers(metadata)
        at, before, length = chunk[_DATA], chunk[_DICTIONARY_AT], chunk[_SIZE]
        at = np.where((before > 0) & (before < at), before, at)
        is_lz4 = chunk[_CODEC] == _LZ4_RAW
        self._chunks = np.stack([at, at + length, np.broadcast_to(widths, at.shape), is_lz4], -1)
        """By row group and leaf: where the chunk begins and ends, the bytes of a value, and whether it is in LZ4."""
        self._may_stay = (
            ((chunk[_CODEC] == _UNCOMPRESSED) | (is_lz4 & (LZ4 > 0)))
            & (chunk[_ENCODING_LIST] & ~_ENCODINGS == 0)
            & (chunk[_COUNT] == np.array(self._rows).reshape(-1, 1))
            & (length > 0)
            & (at >= len(b"PAR1"))
            & (length <= size)
            & (at <= size - length)
        )

    def fetch(
        self, descriptor: int, group: int, columns: Sequence[str], buffers: Buffers
    ) -> ChunkBytes | None:
        """Reads the chunks of those columns that may stay stored, usually in one call. None: there are none."""
        names = [
            name
            for name in columns
            if name in self._leaves and self._may_stay[group, self._leaves[name]]
        ]
        if not names:
            return None
        chunks = self._chunks[group, [self._leaves[name] for name in names]]
        # The chunks in the order of the file, joined to ranges [begin, end, the place of byte 0 in `data`].
        ranges: list[list[int]] = []
        taken = 0
        for begin, end in sorted(chunks[:, :2].tolist()):
            if ranges and begin <= ranges[-1][1]:
                taken += max(0, end - ranges[-1][1])
                ranges[-1][1] = max(end, ranges[-1][1])
            else:
                ranges.append([begin, end, taken - begin])
                taken += end - begin
        size = taken + READ_BEYOND
        step = 1 << max(
            _LEAST_STEP, size.bit_length() - 7
        )  # arrays of few lengths can be used again
        data = buffers.take((-(-size // step) * step,), np.uint8)
        for begin, end, shift in ranges:
            _read_fully(descriptor, data[begin + shift : end + shift], begin)
        begins = [begin for begin, _, _ in ranges]
        number = np.searchsorted(begins, chunks[:, 0], "right") - 1
        chunks[:, :2] += np.array([shift for _, _, shift in ranges])[number, None]
        fields = tuple(self._fields[name] for name in names)
        return ChunkBytes(fields, self._rows[group], data, chunks)


def _chunk_numbers(metadata: pq.FileMetaData) -> npt.NDArray[np.int64]:
    """Returns the numbers in a footer that describe column chunks, by field, row group and leaf. All are 0 if the
    footer is not understood."""
    raw = np.frombuffer(footer_bytes(metadata), np.uint8)
    numbers = np.empty((len(raw), 2), np.int64)
    length = int(raw[-8:-4].view(np.uint32)[0])
    count, _ = thrift_numbers(raw, len(raw) - 8 - length, len(raw) - 8, numbers)
    paths, values = numbers[: max(count, 0)].T
    starts = np.flatnonzero(paths == _CHUNK)
    shape = metadata.num_row_groups, metadata.num_columns
    found = np.zeros((64, shape[0] * shape[1]), np.int64)
    if len(starts) != found.shape[1]:
        return found.reshape(64, *shape)
    chunk = np.searchsorted(starts, np.arange(len(paths)), "right") - 1
    inside = paths >> 6 == (_CHUNK << 6 | _META_DATA)
    found[paths[inside] & 63, chunk[inside]] = values[inside]
    encodings = paths == ((_CHUNK << 6 | _META_DATA) << 6 | _ENCODING_LIST)
    found[_ENCODING_LIST] = 0
    bits = np.left_shift(1, np.clip(values[encodings], 0, 62))
    np.bitwise_or.at(found[_ENCODING_LIST], chunk[encodings], bits)
    found[_SIZE, chunk[paths == (_CHUNK << 6 | _FILE_PATH)]] = 0  # its values are in another file
    return found.reshape(64, *shape)


def _read_fully(descriptor: int, into: npt.NDArray[np.uint8], at: int) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:].data], at + done)
        if not count:
            raise EOFError(
                f"the file ends at byte {at + done}, before the end of a column; it was cut off"
            )
        done += count


class StoredRows:
    """A row group of which some columns are stored pages. Arrow has decoded the `others`."""

    __slots__ = (
        "_data",
        "nbytes",
        "num_rows",
        "others",
        "pages",
        "replacement",
        "schema",
        "stored",
    )

    def __init__(
        self,
        fetched: ChunkBytes,
        columns: Sequence[str],
        read_others: Callable[[Collection[str]], pa.Table],
    ):
        """`read_others` lets Arrow decode all `columns` except those that it is given. Raises DamagedPage if a page
        differs from its checksum."""
        self.num_rows = fetched.rows
        self._data = fetched.data
        shape = len(fetched.fields), 8 + fetched.rows // _PAGE_ROWS
        pages = np.zeros(shape, PAGE)
        checksums, counts = np.empty(shape, np.int64), np.empty(shape[0], np.int64)
        page_table(fetched.data, fetched.chunks, fetched.rows, pages, checksums, counts)
        kept = np.flatnonzero(counts > 0)
        fields = {fetched.fields[n].name: fetched.fields[n] for n in kept}
        self.stored = tuple(fields)
        self.pages = np.ascontiguousarray(pages[kept, : max(0, *counts)])
        """The pages of each stored column. Pages beyond its last one have no rows."""
        self._verify(checksums[kept])
        self.pages["address"] += np.uint64(self._data.ctypes.data)
        all_stored = len(self.stored) == len(columns)
        self.others = pa.table({}) if all_stored else read_others(self.stored)
        fields |= {field.name: field for field in self.others.schema}
        self.schema = pa.schema([fields[name] for name in columns])
        self.nbytes = self._data.nbytes + int(self.others.get_total_buffer_size())
        self.replacement: Callable[[DamagedPage], pa.Table]
        """Returns rows to take instead of these, because a page cannot be unpacked, or raises."""

    def _verify(self, checksums: npt.NDArray[np.int64]) -> None:
        data = self._data.data
        begins, sizes = self.pages["address"], self.pages["size"]
        columns, numbers = np.nonzero((sizes > 0) & (checksums[:, : sizes.shape[1]] >= 0))
        at = columns, numbers
        ends = begins[at] + sizes[at].astype(np.uint64)
        places = zip(begins[at].tolist(), ends.tolist(), checksums[at].tolist(), strict=True)
        for page, (begin, end, checksum) in enumerate(places):
            if crc32(data[begin:end]) != checksum:
                raise DamagedPage(
                    f"column {self.stored[columns[page]]!r}: page {numbers[page]} differs from its checksum "
                    "(CRC-32). The file is damaged; write it again"
                )

    def column(self, name: str, start: int, stop: int) -> pa.ChunkedArray:
        """Returns some rows of a column as Arrow's reader decodes it. Raises DamagedPage."""
        if name not in self.stored:
            return self.others.column(name).slice(start, stop - start)
        kind = self.schema.field(name).type
        words = np.empty(stop - start, np.int32 if kind == pa.int8() else kind.to_pandas_dtype())
        if not unpack_column(self.pages[self.stored.index(name)], start, stop, words):
            raise DamagedPage(name)
        # A column of int8 has 4 bytes a value, of which Arrow takes the lowest.
        return pa.chunked_array([pa.array(words.astype(kind.to_pandas_dtype(), copy=False))])


def load_compiled() -> None:
    """Loads the compiled functions of this module by calling each once with its types."""
    nothing = np.zeros((1, 2), np.int64)
    raw = nothing.view(np.uint8).reshape(-1)
    thrift_numbers(raw, 0, 1, nothing)
    page_table(raw, np.zeros((0, 4), np.int64), 0, np.zeros((0, 1), PAGE), nothing, nothing[0])
