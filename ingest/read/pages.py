"""Reads columns of numbers as a Parquet file stores them: `StoredRows`, the rows of a row group of which some columns
are still pages.

Most of the time of a row goes into decoding. Arrow decodes a column into memory, and the move to batches reads it from
there again. A column that stays stored is decoded in the core's cache, at the moment of the move
(`sluice.ingest.stages.scatter_kernel`).

A column of a row group stays stored if no value is missing and each value has 4 or 8 bytes. Its pages must be plain, or
indices into a dictionary. They may be compressed by Snappy, Zstandard or LZ4, and are unpacked here. Arrow decodes
all other columns, and those whose pages this module does not understand.

Every number that a file gives is checked here before anything is read through it. `page_heads` leaves out a column with
a page that lies outside its chunk, or whose sizes contradict each other. That no value is missing is what the footer
says, and what each page says: its definition levels. The indices of a dictionary are checked when they are looked up.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from zlib_ng import zlib_ng

from sluice.etl.ops.compiled import compile_function
from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.plain.footer_chunks import (
    CODEC,
    ENCODINGS,
    NULLS,
    START,
    STORED,
    VALUE_COUNT,
    chunk_numbers,
    group_rows,
    thrift_numbers,
)
from sluice.ingest.stages.scatter_kernel import (
    DICTIONARY,
    INDICES,
    PAGE,
    READ_BEYOND,
    VALUES,
    DamagedPage,
    bytes_at,
    call,
    int32_at,
    unpack_column,
    varint,
)

_WIDTHS = {
    ("INT32", pa.int32()): 4,
    ("INT32", pa.int8()): 4,
    ("FLOAT", pa.float32()): 4,
    ("INT64", pa.int64()): 8,
    ("DOUBLE", pa.float64()): 8,
}
"""The types of columns that may stay stored, Parquet's and Arrow's, and the bytes of a stored value."""
_SNAPPY, _ZSTD, _LZ4_RAW = 1, 6, 7  # codecs in parquet.thrift; 0 is none
_ENCODINGS = 0b1_0001_1101  # by bit: plain, indices (2 and 8), levels (3 and 4)
_MOST_NUMBERS = 128  # numbers in the head of a page; a head with more is not understood
_LEAST_STEP = 12  # bits of the least difference between the lengths of two buffers
_PAGE_ROWS = 1024  # a chunk with more pages than one for so many rows is left to Arrow


def _c_function(name: str, *libraries: str) -> int:
    """Returns the address of a function of the first of these libraries that is there. 0: this machine has none."""
    for library in libraries:
        with suppress(OSError, AttributeError):
            function = getattr(ctypes.CDLL(library), name)
            return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


_functions = np.zeros(8, np.uint64)
"""The addresses of C functions: at 0 the one for checksums, then those that unpack a codec. 0: there is none."""
_functions[0] = _c_function("zng_crc32", zlib_ng.__file__)
_functions[_SNAPPY] = 1  # `unpack_snappy`, which has no address
_functions[_ZSTD] = _c_function("ZSTD_decompress", "libzstd.so.1", "libzstd.dylib")
_functions[_LZ4_RAW] = _c_function("LZ4_decompress_safe", "liblz4.so.1", "liblz4.dylib")


@compile_function
def page_heads(address: Any, chunks: Any, rows: Any, heads: Any) -> Any:
    """Reads the heads of all pages of columns. `chunks` has for each column where its chunk begins and ends after
    `address`, the bytes of a value, the highest definition level, and the codec. Writes a row of `heads` for each page:

    where its bytes begin, their number, its rows, its form, the column, the number of bytes when they are unpacked (0:
    they are not compressed), the bytes of its levels (-1: they are among the compressed ones), and its checksum (-1:
    none).

    Returns how many pages there are. A column of which anything is not understood has none."""
    numbers, head = np.empty((_MOST_NUMBERS, 2), np.int64), np.empty(128, np.int64)
    count = 0
    for c in range(len(chunks)):
        at, end, width, optional, codec = chunks[c]
        left, n = rows, count
        has_dictionary = False
        while at < end and n - count < len(heads) // len(chunks):
            size, at = thrift_numbers(address, at, end, numbers)
            head[:] = -1
            for k in range(size):
                path, value = numbers[k]
                if path < 64:
                    head[path] = value & 0xFFFFFFFF if path == 4 else value
                elif path >> 6 == (5 if head[1] == 0 else 5 + head[1]):
                    head[64 | (path & 63)] = value
            kind, unpacked, stored, checksum = head[1], head[2], head[3], head[4]
            values, encoding, levels = head[65], head[66], -np.int64(optional)
            if kind == 3:
                encoding, levels = head[68], head[69]
                if head[70] > 0 or levels < optional:  # levels of lists, or none
                    break
            elif kind == 0 and optional and head[67] != 3:
                break  # levels in another encoding
            packed = codec > 0 and not (kind == 3 and head[71] == 0)
            if size < 0 or not 0 < stored <= end - at or not 0 <= values <= rows:
                break
            if levels >= min(stored, unpacked) or not 0 < unpacked <= 9 * values + 128:
                break
            if not packed and stored != unpacked:
                break
            if kind == 2 and n == count and encoding in (0, 2) and values * width == unpacked:
                form, has_dictionary = DICTIONARY, values > 0
                values = levels = np.int64(0)
            elif kind in (0, 3) and (encoding == 0 or (has_dictionary and encoding in (2, 8))):
                form = INDICES if encoding else VALUES
            else:
                break
            page = at, stored, values, form, c, unpacked * packed, levels, checksum
            for k in range(len(page)):
                heads[n, k] = page[k]
            left -= values
            at += stored
            n += 1
        if at == end and left == 0:
            count = n
    return count


@compile_function
def is_complete(address: Any, size: Any, rows: Any) -> Any:
    """Whether no value is missing, by the definition levels of a page. They are runs that repeat a level, or have a bit
    for each row."""
    raw = bytes_at(address)
    at: Any = np.int64(0)
    while rows > 0:
        head, at = varint(raw, at, size)
        if head < 2 or at >= size:
            return False
        if head & 1:
            end = at + min(head >> 1, size - at)
            for n in range(at, end):
                bits = (1 << min(max(rows, 0), 8)) - 1
                if raw[n] & bits != bits:
                    return False
                rows -= 8
            at = end
        elif raw[at] != 1:
            return False
        else:
            at += 1
            rows -= head >> 1
    return True


@compile_function
def unpack_snappy(source: Any, size: Any, into: Any, room: Any) -> Any:
    """Unpacks Snappy to address `into`. False: it is damaged, or has not `room` bytes. Up to `READ_BEYOND` bytes more
    are read and written."""
    raw, target = bytes_at(source), bytes_at(into)
    whole, at = varint(raw, np.int64(0), size)
    done: Any = np.int64(0)
    while whole == room and at < size:
        tag = np.int64(raw[at])
        at += 1
        kind, length = tag & 3, (tag >> 2) + 1
        more: Any = 1 << (kind - 1) if kind else max(length - 60, 0)
        if more > size - at:
            return False
        bits = (1 << (8 * more)) - 1
        number = int32_at(source + np.uint64(at))[0] & bits
        at += more
        if kind == 0:  # bytes as they are
            length = number + 1 if more else length
            begin, left = source + np.uint64(at), size - at
            at += length
        else:  # bytes that came before
            if kind == 1:
                length, number = (tag >> 2 & 7) + 4, tag >> 5 << 8 | number
            begin, left = into + np.uint64(done - number), length if 0 < number <= done else 0
        if length > min(left, room - done):
            return False
        if kind and number < 4:
            for n in range(done, done + length):
                target[n] = target[n - number]
        else:
            for n in range((length + 3) // 4):
                int32_at(into + np.uint64(done))[n] = int32_at(begin)[n]
        done += length
    return done == room


@compile_function
def unpack_page(codec: Any, function: Any, source: Any, size: Any, into: Any, room: Any) -> Any:  # noqa: PLR0917
    """Unpacks `size` bytes to address `into`. False: they are damaged, or do not become `room` bytes."""
    if codec == _SNAPPY:
        return unpack_snappy(source, size, into, room)
    if codec == _LZ4_RAW:
        return np.int32(call(function, source, into, np.uint64(size), np.uint64(room))) == room
    return call(function, into, np.uint64(room), source, np.uint64(size)) == room


@compile_function
def prepare_pages(address: Any, chunks: Any, heads: Any, functions: Any, room: Any) -> Any:
    """Verifies checksums, and unpacks pages to address `room`, each with `READ_BEYOND` bytes more. `heads` come from
    `page_heads`. Changes the first four numbers of each to a `PAGE`, without levels. A form of -1: a value is missing,
    or sizes contradict each other.

    Returns 0, or 1 + n if page n differs from its checksum. Returns -1 - n if it cannot be unpacked."""
    for n in range(len(heads)):
        at, size, rows, form, c, unpacked, before, checksum = heads[n]
        _, _, width, optional, codec = chunks[c]
        source = address + np.uint64(at)
        if checksum >= 0:
            found = call(functions[0], np.uint64(0), source, np.uint64(size), np.uint64(0))
            if found & 0xFFFFFFFF != checksum:
                return 1 + n
        levels, outside = source, max(before, 0)
        source += np.uint64(outside)
        size -= outside
        if unpacked:
            unpacked -= outside
            if not unpack_page(codec, functions[codec], source, size, room, unpacked):
                return -1 - n
            source, size = room, unpacked
            room += np.uint64(unpacked + READ_BEYOND)
        if before < 0:
            levels = source + np.uint64(4)
            outside = np.int64(int32_at(source)[0])
            source = levels + np.uint64(outside)
            size -= 4 + outside
        if (
            min(outside, size - 1) < 0
            or (form == VALUES and size != rows * width)
            or (optional and not is_complete(levels, outside, rows))
        ):
            form = -1
        heads[n, 0], heads[n, 1], heads[n, 3] = source, size, form
    return 0


class StoredColumns:
    """Which columns of an open file may stay stored, and where their chunks are."""

    def __init__(self, metadata: pq.FileMetaData, schema: pa.Schema, size: int):
        """`size` is the number of bytes of the file."""
        self._rows = group_rows(metadata)
        leaves = [metadata.schema.column(number) for number in range(metadata.num_columns)]
        self._leaves: dict[str, tuple[int, pa.Field]] = {}
        """By name: which leaf it is, and the column as Arrow would decode it."""
        widths, levels = np.zeros((2, len(leaves)), np.int64)
        for number, leaf in enumerate(leaves):
            field = schema.get_field_index(leaf.path)
            width = 0 if field < 0 else _WIDTHS.get((leaf.physical_type, schema.types[field]), 0)
            levels[number] = leaf.max_definition_level
            if (
                width
                and leaf.name == leaf.path  # not within another column
                and levels[number] <= 1
                and not leaf.max_repetition_level
            ):
                self._leaves[leaf.path] = number, schema.field(field)
                widths[number] = width
        if not self._leaves:
            return
        chunk = chunk_numbers(metadata)
        at, length, codec = chunk[START], chunk[STORED], chunk[CODEC]
        everywhere = (np.broadcast_to(one, at.shape) for one in (widths, levels))
        self._chunks = np.stack([at, at + length, *everywhere, codec], -1)
        """By row group and leaf: what `page_heads` takes."""
        self._may_stay = (
            np.isin(codec, np.flatnonzero(_functions))
            & (chunk[ENCODINGS] & ~_ENCODINGS == 0)
            & (chunk[VALUE_COUNT] == np.array(self._rows).reshape(-1, 1))
            & ((levels == 0) | (chunk[NULLS] == 0))
            & (_functions[0] > 0)
            & (at >= 4)
            & (length > 0)
            & (length <= size - at)
        )

    def fetch(
        self,
        descriptor: int,
        group: int,
        portions: Sequence[Sequence[str]],
        buffers: Buffers,
    ) -> StoredRows | None:
        """Reads those columns of a row group that may stay stored, one portion after the other. None: there are none.
        Raises DamagedPage if a page differs from its checksum, or cannot be unpacked."""
        rows = StoredRows(self._rows[group])
        for columns in portions:
            known = filter(None, map(self._leaves.get, columns))
            wanted = [leaf for leaf in known if self._may_stay[group, leaf[0]]]
            if wanted:
                numbers, fields = zip(*wanted, strict=True)
                chunks = self._chunks[group, list(numbers)]
                rows.add(fields, chunks, _read_chunks(descriptor, chunks, buffers), buffers)
        return rows if rows.stored else None


def stored_places(metadata: pq.FileMetaData) -> npt.NDArray[np.int64]:
    """Returns where a footer says that column chunks are: by row group and leaf, the first byte and the one after the
    last. Nothing is checked."""
    chunk = chunk_numbers(metadata)
    return np.stack([chunk[START], chunk[START] + chunk[STORED]], -1)


def _read_chunks(
    descriptor: int, chunks: npt.NDArray[np.int64], buffers: Buffers
) -> npt.NDArray[np.uint8]:
    """Reads chunks of columns, usually in one call. Changes where `chunks` begin and end to places in the result, of
    which `READ_BEYOND` bytes more may be read."""
    runs: list[list[int]] = []
    size = 0
    for n in np.argsort(chunks[:, 0]).tolist():
        begin, end = chunks[n, :2].tolist()
        if runs and begin == runs[-1][1]:
            runs[-1][1] = end
        else:
            runs.append([begin, end])
        chunks[n, :2] += size - begin
        size += end - begin
    data = _take(buffers, size + READ_BEYOND)
    done = 0
    for begin, end in runs:
        at = begin
        while at < end:
            count = os.preadv(descriptor, [data[done : done + end - at].data], at)
            if not count:
                raise EOFError(
                    f"the file ends at byte {at}, before the end of a column; it was cut off"
                )
            at += count
            done += count
    return data


def _take(buffers: Buffers, size: int) -> npt.NDArray[np.uint8]:
    """Returns an array of at least so many bytes. Arrays of few lengths can be used again."""
    step = 1 << max(_LEAST_STEP, size.bit_length() - 7)
    return buffers.take((-(-size // step) * step,), np.uint8)


class StoredRows:
    """A row group of which some columns are stored pages. Arrow decodes the `others`."""

    def __init__(self, rows: int):
        self.num_rows = rows
        self.nbytes = 0
        self.stored: tuple[str, ...] = ()
        self._pages: dict[pa.Field, npt.NDArray[np.int64]] = {}
        self._memory: list[npt.NDArray[np.uint8]] = []
        """The arrays in which the pages are."""
        self.replacement: Callable[[DamagedPage], pa.Table]
        """Returns rows to take instead of these, because a page is damaged, or raises."""

    def add(
        self,
        fields: Sequence[pa.Field],
        chunks: npt.NDArray[np.int64],
        data: npt.NDArray[np.uint8],
        buffers: Buffers,
    ) -> None:
        """Adds columns whose chunks are in `data`, except those of which anything is not understood. Raises DamagedPage
        if a page differs from its checksum, or cannot be unpacked."""
        heads = np.empty((len(chunks) * (8 + self.num_rows // _PAGE_ROWS), 8), np.int64)
        address = np.uint64(data.ctypes.data)
        heads = heads[: page_heads(address, chunks, self.num_rows, heads)]
        numbers, unpacked = heads[:, 4], heads[:, 5]
        room = _take(buffers, int(unpacked.sum()) + READ_BEYOND * len(heads))
        wrong = prepare_pages(address, chunks, heads, _functions, np.uint64(room.ctypes.data))
        if wrong:
            at = abs(wrong) - 1
            how = "differs from its checksum (CRC-32)" if wrong > 0 else "cannot be unpacked"
            raise DamagedPage(
                f"column {fields[numbers[at]].name!r}: page {(numbers[:at] == numbers[at]).sum()} {how}. The file is "
                "damaged; write it again"
            )
        for pages in np.split(heads, np.flatnonzero(np.diff(numbers)) + 1):
            if len(pages) and pages[:, 3].min() >= 0:
                self._pages[fields[pages[0, 4]]] = pages[:, :4]
        self.stored = tuple(field.name for field in self._pages)
        used = [room] if unpacked.all() else [data, room]
        self._memory += used
        self.nbytes += sum(array.nbytes for array in used)

    def complete(self, columns: Sequence[str], others: pa.Table) -> None:
        """Sets the columns that Arrow has decoded, and the order of all columns. ValueError if they have other rows."""
        if others.num_columns and others.num_rows != self.num_rows:
            raise ValueError(f"{others.num_rows} rows can be decoded")
        self.others = others
        fields = {field.name: field for field in (*self._pages, *others.schema)}
        self.schema = pa.schema([fields[name] for name in columns])
        self.nbytes += others.get_total_buffer_size()
        pages = np.zeros((len(self._pages), max(map(len, self._pages.values())), 4), np.int64)
        for column, found in zip(pages, self._pages.values(), strict=True):
            column[: len(found)] = found
        self.pages = pages.view(PAGE)[..., 0]
        """The pages of each stored column. Pages beyond its last one have no rows."""

    def column(self, name: str, start: int, stop: int) -> pa.ChunkedArray:
        """Returns some rows of a column as Arrow's reader decodes it. Raises DamagedPage."""
        if name not in self.stored:
            return self.others.column(name).slice(start, stop - start)
        kind = self.schema.field(name).type
        dtype = kind.to_pandas_dtype()
        words = np.empty(stop - start, np.int32 if kind == pa.int8() else dtype)
        if not unpack_column(self.pages[self.stored.index(name)], start, stop, words):
            raise DamagedPage(name)
        # A column of int8 has 4 bytes a value, of which Arrow takes the lowest.
        return pa.chunked_array([pa.array(words.astype(dtype, copy=False))])


def load_compiled() -> None:
    """Loads the compiled functions of this module."""
    nowhere, chunks, heads = np.uint64(0), np.zeros((0, 5), np.int64), np.zeros((0, 8), np.int64)
    page_heads(nowhere, chunks, 0, heads)
    prepare_pages(nowhere, chunks, heads, _functions, nowhere)
