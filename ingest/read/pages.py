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
import itertools
import operator
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from zlib_ng.zlib_ng import crc32

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
    unpack_column,
)

_TYPES = {
    ("INT32", pa.int32()): np.int32,
    ("INT32", pa.int8()): np.int32,
    ("FLOAT", pa.float32()): np.float32,
    ("INT64", pa.int64()): np.int64,
    ("DOUBLE", pa.float64()): np.float64,
}
"""The types of columns that may stay stored: Parquet's and Arrow's, and the type of a stored value."""
_SNAPPY, _ZSTD, _LZ4_RAW = 1, 6, 7  # codecs in parquet.thrift; 0 is none
_ENCODINGS = 0b1_0001_1101  # by bit: plain, indices (2 and 8), levels (3 and 4)
_MOST_NUMBERS = 128  # numbers in the head of a page; a head with more is not understood
_LEAST_STEP = 12  # bits of the least difference between the lengths of two buffers
_PAGE_ROWS = 1024  # a chunk with more pages than one for so many rows is left to Arrow


def _c_function(library: str, name: str, result: Any, *arguments: Any) -> Any:
    """Returns a function of a library of the system, or None if this machine lacks it."""
    for suffix in (".so.1", ".dylib"):
        try:
            function = getattr(ctypes.CDLL(f"lib{library}{suffix}"), name)
        except OSError:
            continue
        function.restype, function.argtypes = result, arguments
        return function
    return None


_snappy = pa.Codec("snappy")
# Arrow's codecs do not say how many bytes they have unpacked. Those of Snappy begin with their number.
_address, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_lz4 = _c_function("lz4", "LZ4_decompress_safe", _int, _address, _address, _int, _int)
_zstd = _c_function("zstd", "ZSTD_decompress", _size, _address, _size, _address, _size)


@compile_function
def page_heads(address: Any, chunks: Any, rows: Any, heads: Any) -> Any:
    """Reads the heads of all pages of columns. `chunks` has for each column where its chunk begins and ends after
    `address`, the bytes of a value, the highest definition level, and the codec. Writes a row of `heads` for each page:

    the column, where its bytes begin, their number, their number without compression, its rows, its form, the bytes of
    its levels (-1: they are among the compressed ones), whether it is compressed, and its checksum (-1: none).

    Returns how many pages there are. A column of which anything is not understood has none."""
    numbers, head = np.empty((_MOST_NUMBERS, 2), np.int64), np.empty(128, np.int64)
    count = 0
    for c in range(len(chunks)):
        at, end, width, optional, codec = chunks[c]
        left, n = rows, count
        has_dictionary = False
        while at < end and n - count < len(heads) // len(chunks):
            size, at = thrift_numbers(address, at, end, numbers)
            for k in range(len(head)):
                head[k] = -1
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
            page = c, at, stored, unpacked, values, form, levels, np.int64(packed), checksum
            for k in range(len(page)):
                heads[n, k] = page[k]
            left -= values
            at += stored
            n += 1
        if at == end and left == 0:
            count = n
    return count


class StoredColumns:
    """Which columns of an open file may stay stored, and where their chunks are."""

    def __init__(self, metadata: pq.FileMetaData, schema: pa.Schema, size: int):
        """`size` is the number of bytes of the file."""
        self._rows = group_rows(metadata)
        leaves = [metadata.schema.column(number) for number in range(metadata.num_columns)]
        times = Counter(leaf.path for leaf in leaves)
        self._leaves: dict[str, tuple[int, pa.Field]] = {}
        """By name: which leaf it is, and the column as Arrow would decode it."""
        widths, levels = np.zeros((2, len(leaves)), np.int64)
        for number, leaf in enumerate(leaves):
            field = schema.get_field_index(leaf.path)
            kind = None if field < 0 else _TYPES.get((leaf.physical_type, schema.types[field]))
            levels[number] = leaf.max_definition_level
            if (
                kind is not None
                and times[leaf.path] == 1
                and levels[number] <= 1
                and not leaf.max_repetition_level
            ):
                self._leaves[leaf.path] = number, schema.field(field)
                widths[number] = np.dtype(kind).itemsize
        if not self._leaves:
            return
        chunk = chunk_numbers(metadata)
        at, length, codec = chunk[START], chunk[STORED], chunk[CODEC]
        ends = at + length
        everywhere = (np.broadcast_to(one, at.shape) for one in (widths, levels))
        self._chunks = np.stack([at, ends, *everywhere, codec], -1)
        """By row group and leaf: what `page_heads` takes."""
        codecs = [0, _SNAPPY, *[_ZSTD] * bool(_zstd), *[_LZ4_RAW] * bool(_lz4)]
        self._may_stay = (
            np.isin(codec, codecs)
            & (chunk[ENCODINGS] & ~_ENCODINGS == 0)
            & (chunk[VALUE_COUNT] == np.array(self._rows).reshape(-1, 1))
            & ((levels == 0) | (chunk[NULLS] == 0))
            & (length > 0)
            & (at >= 4)
            & (length <= size)
            & (at <= size - length)
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
                rows.add(fields, chunks, _read_chunks(descriptor, chunks, buffers))
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
    size += READ_BEYOND
    step = 1 << max(_LEAST_STEP, size.bit_length() - 7)  # arrays of few lengths can be used again
    data = buffers.take((-(-size // step) * step,), np.uint8)
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


@lru_cache(64)
def _no_value_is_missing(levels: bytes, rows: int) -> bool:
    """Whether the definition levels of a page say so. They are runs that repeat a level, or have a bit for each row."""
    at = 0
    while rows > 0:
        head, at = _number(levels, at)
        is_packed = head & 1
        part = levels[at : at + (head >> 1 if is_packed else 1)]
        there = np.unpackbits(np.frombuffer(part, np.uint8), bitorder="little")[:rows].all()
        if head < 2 or not part or not (there if is_packed else part == b"\x01"):
            return False
        at += len(part)
        rows -= 8 * len(part) if is_packed else head >> 1
    return True


def _number(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Returns a number whose bytes have seven bits each, and where it ends. -1: it has no end."""
    value = 0
    for shift, byte in enumerate(data[at : at + 5]):
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value, at + shift + 1
    return -1, at


def _unpack(codec: int, packed: memoryview, address: int, size: int) -> pa.Buffer:
    """Returns the unpacked bytes of a page that lies at `address`, and `READ_BEYOND` more. Raises ValueError or OSError
    if they are not `size` bytes."""
    if codec == _SNAPPY:
        if _number(packed, 0)[0] != size:
            raise ValueError("cannot be unpacked")
        return _snappy.decompress(packed, size + READ_BEYOND)
    room = pa.allocate_buffer(size + READ_BEYOND)
    if codec == _LZ4_RAW:
        done = _lz4(address, room.address, len(packed), size)
    else:
        done = _zstd(room.address, size, address, len(packed))
    if done != size:
        raise ValueError("cannot be unpacked")
    return room


def _page(
    data: memoryview, address: int, head: Sequence[int], chunk: Sequence[int], memory: list[Any]
) -> tuple[int, int, int, int] | None:
    """Returns a page in the form of `PAGE`, without compression and levels. `data` lies at `address`, and `head` comes
    from `page_heads`. What is unpacked is added to `memory`. None: a value is missing, or sizes contradict each
    other. Raises ValueError or OSError for a damaged page."""
    _, at, stored, size, rows, form, before, packed, checksum = head
    _, _, width, optional, codec = chunk
    if checksum >= 0 and crc32(data[at : at + stored]) != checksum:
        raise ValueError("differs from its checksum (CRC-32)")
    begin = at + max(before, 0)
    levels, values = data[at:begin], data[begin : at + stored]
    address += begin
    if packed:
        room = _unpack(codec, values, address, size - len(levels))
        memory.append(room)
        address, values = room.address, memoryview(room).cast("B")[:-READ_BEYOND]
    if before < 0:
        end = 4 + int.from_bytes(values[:4], "little")
        levels, values = values[4:end], values[end:]
        address += end
    if optional and form != DICTIONARY and not _no_value_is_missing(bytes(levels), rows):
        return None
    if not values or (form == VALUES and len(values) != rows * width):
        return None
    return address, len(values), rows, form


class StoredRows:
    """A row group of which some columns are stored pages. Arrow decodes the `others`."""

    def __init__(self, rows: int):
        self.num_rows = rows
        self.nbytes = 0
        self.stored: tuple[str, ...] = ()
        self._pages: dict[pa.Field, list[tuple[int, int, int, int]]] = {}
        self._memory: list[Any] = []
        """The arrays and buffers in which the pages are."""
        self.replacement: Callable[[DamagedPage], pa.Table]
        """Returns rows to take instead of these, because a page is damaged, or raises."""

    def add(
        self,
        fields: Sequence[pa.Field],
        chunks: npt.NDArray[np.int64],
        data: npt.NDArray[np.uint8],
    ) -> None:
        """Adds columns whose chunks are in `data`, except those of which anything is not understood. Raises DamagedPage
        if a page differs from its checksum, or cannot be unpacked."""
        heads = np.empty((len(chunks) * (8 + self.num_rows // _PAGE_ROWS), 9), np.int64)
        address = data.ctypes.data
        count = page_heads(np.uint64(address), chunks, self.num_rows, heads)
        has_unpacked = False
        for number, group in itertools.groupby(heads[:count].tolist(), operator.itemgetter(0)):
            field, chunk = fields[number], chunks[number].tolist()
            memory: list[Any] = []
            pages: list[tuple[int, int, int, int]] = []
            for head in group:
                try:
                    page = _page(data.data, address, head, chunk, memory)
                except (ValueError, OSError) as error:
                    raise DamagedPage(
                        f"column {field.name!r}: page {len(pages)} {error}. The file is damaged; write it again"
                    ) from None
                if page is None:
                    break
                pages.append(page)
            else:
                has_unpacked |= len(memory) < len(pages)
                self.stored += (field.name,)
                self._pages[field] = pages
                self._memory += memory
                self.nbytes += sum(room.size for room in memory)
        if has_unpacked:
            self._memory.append(data)
            self.nbytes += data.nbytes

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
    page_heads(np.uint64(0), np.zeros((0, 5), np.int64), 0, np.zeros((0, 9), np.int64))
