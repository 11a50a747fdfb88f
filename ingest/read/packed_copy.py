"""Packed copies of row groups, which are read much faster than Parquet.

`PackedCopy` is the user's setting, and `PackedRowGroups` reads and writes the copies of one loader. `packed` encodes
a table as one entry, and `PackedTable` decodes an entry.

Parquet stays the source of truth. The ETL, or the first reader of a row group, makes its copy. Each entry's name holds
the file's size, its time of change and its footer, so a copy is used only for the file that it was made from. If a
copy is damaged, missing or of another version, the loader prints one line and reads Parquet instead.

An entry is the table's Arrow stream with its whole numbers packed. Each buffer uses as many bits as its range needs,
or indices into its distinct values if that is smaller. Offsets of lists and texts are stored as lengths. Packed
numbers lie in lanes, so that the processor unpacks many at a time.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from zlib_ng.zlib_ng import crc32

from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.read.cache import FileCache
from sluice.ingest.read.open_file import LocalFile, OpenFile, stored_footer
from sluice.ingest.stages.bags import PackedBags, unit_of
from sluice.ingest.stages.scatter_kernel import (
    INDICES,
    LENGTHS,
    PACKED,
    RAW,
    compiled,
    load_packed,
    pack,
    unpack_parts,
)

FOLDER = ".sluice-packed"
_KEPT = 32 * 2**20  # bytes of memory kept for the next row groups
VERSION = int.from_bytes(b"SluiceP3", "little")
_HEAD, _SUM = 7, 6
"""An entry begins with seven numbers: version, number of parts, bytes of the stream, rows, bytes of all parts, the
checksum of the parts, and the checksum of the head."""
_ALIGNED, _WORD = 64, 4
_DESCRIBED = 11
_WIDTH = 1
_BASE = 3
_AT = 4
_COUNT = 5
_FROM = 6
_CHECKSUM = 9
_COLUMN = 10
"""So many describe a part of the stream: its kind, a number's bytes, the bits of a packed one, the base to add; where
it lies in the stream, and how many numbers it has; where it is packed, where the values are if these are indices, and
how many; its checksum; and its column from 1 on, below 0 if it is not all of that, or not of these types (0: none):"""
_STRAIGHT = (pa.float32(), pa.int32(), pa.int8())
_FEWEST = 64  # buffers with fewer numbers are not packed
_PAYS = 0.9  # indices are used if they need less than this share of the bytes
_WHOLE: dict[int, tuple[Any, Any]] = {
    1: (np.int8, np.uint8),
    2: (np.int16, np.uint16),
    4: (np.int32, np.uint32),
    8: (np.int64, np.uint64),
}
Wanted = tuple[str, tuple[int, ...]]
"""The entry's name, and the state of its Parquet file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCopy:
    """Where packed copies are stored, and how much disk space they may take."""

    limit_bytes: int = 10 * 2**30
    """At this limit no more copies are written. The other row groups are read from Parquet."""
    folder: str = ""
    """Empty: a hidden folder next to the files. All ranks and jobs of a host share it."""

    def __post_init__(self) -> None:
        if self.limit_bytes < 1:
            raise ValueError(
                f"PackedCopy: limit_bytes {self.limit_bytes} holds nothing; it must be 1 or more"
            )


class PackedRowGroups:
    """The packed copies of the row groups of some files. Safe to use from many threads."""

    def __init__(
        self,
        how: PackedCopy,
        paths: Sequence[str | None],
        columns: Sequence[str],
        dictionaries: Sequence[str],
    ):
        """`paths` has the path of each local file, and None for a file in a store, which gets no copy. Copies hold
        these `columns`. Those in `dictionaries` are decoded as dictionaries."""
        self._paths = tuple(paths)
        self._said = set[str]()
        self._lock = threading.Lock()
        self._names: dict[
            tuple[int, tuple[int, ...]], str
        ] = {}  # the entry name for each file in a given state
        self._columns = hashlib.sha256(
            json.dumps([VERSION, list(columns), list(dictionaries)]).encode()
        ).hexdigest()
        self._cache: FileCache | None = None
        self._buffers = Buffers()
        local = [path for path in paths if path is not None]
        self._makes = bool(local)
        if len(local) < len(paths):
            self._say("files in a store have no packed copy", "use --cache for them")
        try:
            if local:
                above = os.path.commonpath(
                    [os.path.dirname(os.path.abspath(path)) for path in local]
                )
                states = [_state(os.stat(path))[:2] for path in local]
                self._cache = FileCache(
                    how.folder or os.path.join(above, FOLDER),
                    how.limit_bytes,
                    repr((self._columns, states)),
                )
            load_compiled()
        except OSError as error:
            self._say("the folder of packed copies cannot be used", f"{error}")

    def wanted(self, number: int, group: int) -> Wanted | None:
        """Returns the entry of a row group, or None if it cannot have one. Call it before the row group is read from
        Parquet."""
        path = self._paths[number]
        if self._cache is None or path is None:
            return None
        try:
            state = _state(os.stat(path))
            if (number, state) not in self._names:
                name = named(path, state[0], state[1], self._columns)
                if _state(os.stat(path)) != state:
                    return None
                self._names[number, state] = name
        except OSError:
            return None  # reading the file raises the error
        return f"{self._names[number, state]} {group}", state

    def read(self, wanted: Wanted, straight: bool = False) -> pa.Table | PackedTable | None:
        """Reads a row group from its copy. Returns None if there is no valid copy. With `straight`, columns stay packed
        if all of them can be placed directly from the copy."""
        assert self._cache is not None
        if self._buffers.idle_bytes() > _KEPT:
            self._buffers.trim()
        try:
            stored = self._cache.fetch(
                wanted[0], lambda size: self._buffers.take_line(size, np.uint8)
            )
            found = None if stored is None else PackedTable(stored, wanted[0])
            return found if found is None or (straight and found.straight) else found.table()
        except (DamagedCopy, pa.ArrowException, OSError) as error:
            self._say("a packed copy is not valid and is made again", f"{error}")
            self._cache.drop(wanted[0])
        return None

    def keep(self, wanted: Wanted, file: OpenFile, table: pa.Table) -> None:
        """Writes the copy of a row group that was read from `file`, if there is space for it. Does nothing if another
        file has replaced the one that `wanted` describes."""
        if not self._makes or self._cache is None or not isinstance(file, LocalFile):
            return
        if _state(file.status()) != wanted[1] or not file.is_as_described():
            self._say("a file was replaced while it was read, so no packed copy is made of it", "")
            return
        try:
            content = packed(table, wanted[0])
            why = "" if content is None else self._cache.put(wanted[0], content, checked=True)
        except Exception as error:  # the reader has its rows and does not need the copy
            why = f"{type(error).__name__}: {error}"
        if why:
            self._makes = False
            self._say("no more packed copies are made", why)

    def make(self, read: Callable[[int, int], Any], row_groups: Sequence[Sequence[int]]) -> None:
        """Makes all missing copies by reading each row group."""

        def one(place: tuple[int, int]) -> None:
            if self._makes:
                with suppress(Exception):  # loading these rows raises the error
                    read(*place)

        with ThreadPoolExecutor(os.cpu_count() or 1, "sluice-packing") as threads:
            list(
                threads.map(
                    one,
                    [
                        (file, n)
                        for file, counts in enumerate(row_groups)
                        for n in range(len(counts))
                    ],
                )
            )

    def stats(self) -> dict[str, int]:
        """Counts copies that were read, missing, damaged and not kept, and their bytes on disk."""
        if self._cache is None:
            return {}
        counts = {
            name.replace("cache_", "packed_"): count for name, count in self._cache.stats().items()
        }
        return {**counts, "packed_bytes": self._cache.own_bytes}

    def close(self) -> None:
        """Stops using the copies. They stay on disk."""
        self._makes = False
        if self._cache is not None:
            self._cache.close()

    def _say(self, what: str, why: str) -> None:
        """Prints this line on standard error, once."""
        with self._lock:
            if what in self._said:
                return
            self._said.add(what)
        print(
            f"sluice: {what}{why and f' ({why})'}; the same rows are read from Parquet",
            file=sys.stderr,
            flush=True,
        )


def named(path: str, size: int, changed_ns: int, columns: str) -> str:
    """The name of a file in this state with these columns. An entry's name adds the row group's number."""
    return f"{size} {changed_ns} {hashlib.sha256(stored_footer(path, size)).hexdigest()} {columns}"


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev


class DamagedCopy(ValueError):
    """An entry differs from what was written."""


def packed(table: pa.Table, key: str) -> bytes | None:
    """Encodes a table as one entry. Returns None for a table without rows, or with more than one batch."""
    batches = table.combine_chunks().to_batches()
    if len(batches) != 1:
        return None
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        writer.write_batch(batches[0])
    stream = sink.getvalue()
    batch = pa.ipc.open_stream(stream).read_next_batch()
    content = np.frombuffer(stream, np.uint8)
    found = sorted(
        (begin, n + 1, *_part(content[begin : begin + size].view(kind), as_lengths))
        for n, column in enumerate(batch.columns)
        for buffer, kind, as_lengths in _buffers(column)
        if (size := buffer.size // kind.itemsize * kind.itemsize) >= _FEWEST * kind.itemsize
        for begin in [buffer.address - stream.address]
    )
    entry = bytearray()
    parts = list[int]()
    done = 0

    def add(  # noqa: PLR0917
        how: list[int],
        at: int,
        count: int,
        distinct: int,
        pieces: list[npt.NDArray[np.uint8]],
        number: int,
    ) -> None:
        places, first = [0, 0], len(entry)
        for n, piece in enumerate(pieces):
            places[n] = len(entry)
            entry.extend(piece.data)
            entry.extend(bytes(-len(entry) % _ALIGNED))
        parts.extend([*how, at, count, *places, distinct, crc32(memoryview(entry)[first:]), number])

    for begin, n, how, count, distinct, pieces in [*found, (len(content), 0, [], 0, 0, [])]:
        if begin > done:  # metadata and padding between the columns
            add([RAW, 1, 0, 0], done, begin - done, 0, [content[done:begin]], 0)
        if how:
            add(how, begin, count, distinct, pieces, n if _complete(batch.column(n - 1)) else -n)
        done = begin + (how[_WIDTH] * count if how else 0)
    head = np.zeros(_front(len(parts) // _DESCRIBED), np.int64)
    head[:_SUM] = (
        VERSION,
        len(parts) // _DESCRIBED,
        len(content),
        batch.num_rows,
        len(entry),
        crc32(entry),
    )
    head[_HEAD : _HEAD + len(parts)] = parts
    head[_SUM] = crc32(head.data, crc32(key.encode()))
    return head.tobytes() + entry


def _complete(column: pa.Array) -> bool:
    """Whether the column's own parts hold everything that is needed to move its rows."""
    unit = unit_of(column.type)
    if column.null_count or (unit == _WORD and column.values.null_count):
        return False
    offsets = (
        np.frombuffer(column.buffers()[1], next(_buffers(column))[1])
        if unit == 1
        else np.empty(0, np.int64)
    )
    return (unit > 0 or column.type in _STRAIGHT) and not (offsets % _WORD).any()


def _front(parts: int) -> int:
    """The number of int64 values before the first part."""
    return _HEAD + _DESCRIBED * parts + -(_HEAD + _DESCRIBED * parts) % (_ALIGNED // 8)


def _buffers(array: pa.Array) -> Iterator[tuple[pa.Buffer, Any, bool]]:
    """Yields each buffer that holds numbers, its dtype, and whether the numbers are offsets. All other buffers are
    stored unchanged."""
    kind, types = array.type, pa.types
    if types.is_dictionary(kind):
        yield from _buffers(array.indices)
        yield from _buffers(array.dictionary)
    elif types.is_list(kind) or types.is_large_list(kind):
        yield (
            array.buffers()[1],
            np.dtype(np.int64 if types.is_large_list(kind) else np.int32),
            True,
        )
        yield from _buffers(array.values)
    elif (wide := kind in (pa.large_binary(), pa.large_string())) or kind in (
        pa.binary(),
        pa.string(),
    ):
        _, offsets, content = array.buffers()
        yield offsets, np.dtype(np.int64 if wide else np.int32), True
        if content is not None:  # most likely bags of ids; other bytes are stored unchanged
            yield content, np.dtype(np.int32), False
    elif types.is_primitive(kind) and not types.is_boolean(kind) and kind.byte_width in _WHOLE:
        yield (
            array.buffers()[1],
            np.dtype(_WHOLE[kind.byte_width][types.is_unsigned_integer(kind)]),
            False,
        )


def _part(
    values: npt.NDArray[Any], as_lengths: bool
) -> tuple[list[int], int, int, list[npt.NDArray[np.uint8]]]:
    """Chooses how numbers are packed: (kind, bytes, bits, base), their count, the distinct values, and the bytes."""
    whole = values
    width = values.itemsize
    unsigned = _WHOLE[values.itemsize][1]
    if as_lengths:
        values = np.diff(values)
    low, high = int(values.min()), int(values.max())
    bits = (high - low).bit_length()
    usual = _WORD * bits * -(-len(values) // 32) if bits <= 32 else values.nbytes
    if not as_lengths and width >= 2 and bits > 1:
        encoded = pa.array(values.view(unsigned)).dictionary_encode()
        distinct = len(encoded.dictionary)
        few = max(1, (distinct - 1).bit_length())
        if _WORD * few * -(-len(values) // 32) + distinct * width < usual * _PAYS:
            indices = encoded.indices.to_numpy().view(np.uint32)
            return (
                [INDICES, width, few, 0],
                len(whole),
                distinct,
                [pack(indices, few), encoded.dictionary.to_numpy().view(np.uint8)],
            )
    if usual >= values.nbytes or (as_lengths and whole[0]):
        return [RAW, 1, 0, 0], whole.nbytes, 0, [whole.view(np.uint8)]
    numbers = (values - values.dtype.type(low)).view(unsigned).astype(np.uint32)
    return (
        [LENGTHS if as_lengths else PACKED, width, bits, low],
        len(whole),
        0,
        [pack(numbers, bits)],
    )


def load_compiled() -> None:
    """Loads the compiled functions. This takes seconds if no earlier run left them in numba's cache."""
    kinds = pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.large_list(pa.int8())
    some = pa.table(
        {
            str(kind): pa.array(
                [[n % 99] if "list" in str(kind) else n % 99 for n in range(128)], kind
            )
            for kind in kinds
        }
    )
    PackedTable(np.frombuffer(bytearray(packed(some, "") or b""), np.uint8), "").table()
    load_packed()


class PackedTable:
    """A row group decoded from an entry. All checksums are verified first."""

    __slots__ = (
        "_alone",
        "_data",
        "_ends",
        "_first",
        "_parts",
        "_units",
        "nbytes",
        "num_rows",
        "schema",
        "straight",
    )

    def __init__(self, stored: npt.NDArray[np.uint8], key: str):
        head = (
            stored[: 8 * _HEAD].view(np.int64)
            if len(stored) >= 8 * _HEAD
            else np.zeros(1, np.int64)
        )
        if head[0] != VERSION:
            raise DamagedCopy("it is no packed copy of this version of sluice")
        count, self.nbytes, self.num_rows, size, whole, checksum = map(int, head[1:])
        front = 8 * _front(count)
        described = (
            stored[: front if 8 * _HEAD < front <= len(stored) else 8 * _HEAD].view(np.int64).copy()
        )
        described[_SUM] = 0
        if min(count, self.nbytes) < 1 or crc32(described.data, crc32(key.encode())) != checksum:
            raise DamagedCopy(
                "its head differs from its checksum (CRC-32), or belongs to another row group"
            )
        self._data, self._parts = (
            stored[front:],
            described[_HEAD:][: _DESCRIBED * count].reshape(count, _DESCRIBED),
        )
        if crc32(self._data.data) != whole:
            ends = [*self._parts[1:, _FROM].tolist(), len(self._data)]
            harmed = [
                f"column {abs(column)}" if column else "its metadata"
                for (begin, _, _, checksum, column), end in zip(
                    self._parts[:, _FROM:].tolist(), ends, strict=True
                )
                if crc32(self._data[begin:end].data) != checksum
            ]
            raise DamagedCopy(
                f"{', '.join(harmed) or 'its content'} differs from its checksum (CRC-32)"
            )
        if len(self._data) != size or not _fit(self._parts, size, self.nbytes):
            raise DamagedCopy(f"its parts overlap, leave gaps or exceed its {len(stored)} bytes")
        first = self._data[self._parts[0, _FROM] :][: self._parts[0, _COUNT]]
        self.schema, widths, self._units, columns = _schema(
            first[: 8 + int(first[4:8].view(np.int32)[0])].tobytes()
        )
        self._alone = self._parts[self._parts[:, _COLUMN] > 0]
        self._first = np.searchsorted(columns, np.arange(len(widths)) + 1)
        """For each column, the index of its first part in `_alone`. A column of bags has two parts there."""
        self._ends: dict[int, npt.NDArray[Any]] = {}  # for bags of different sizes
        self.straight = bool((widths + self._units).all()) and np.array_equal(
            self._alone[:, _COLUMN], columns
        )
        if self.straight:
            sizes = self._alone[self._first][:, (_WIDTH, _COUNT)].prod(axis=1)
            self.straight = bool((sizes == widths * self.num_rows)[widths > 0].all()) and all(
                map(self._fits, np.flatnonzero(self._units).tolist())
            )
        """Whether rows of all columns can be placed directly from their packed form."""

    def table(self) -> pa.Table:
        """Unpacks the whole table."""
        buffer = pa.allocate_buffer(self.nbytes)
        unpack_parts(self._parts, self._data, np.frombuffer(buffer, np.uint8))
        return pa.ipc.open_stream(buffer).read_all()

    def packed(self, columns: npt.NDArray[np.int64]) -> tuple[int, npt.NDArray[np.int64]]:
        """Returns the address of the packed data, and the descriptions of these columns' parts."""
        return self._data.ctypes.data, self._alone[self._first[columns]]

    def bags(self, column: int, start: int, stop: int) -> PackedBags:
        """The bags of some rows of a column."""
        at = self._first[column]
        unit = int(self._units[column])
        ends = self._ends.get(column)
        each = int(self._alone[at, _BASE]) * unit if ends is None else -1
        return PackedBags(
            self._data.ctypes.data, self._alone[at + 1], each, ends, unit, start, stop - start
        )

    def _fits(self, column: int) -> bool:
        """Whether the lengths of a column's bags add up to the number of its ids."""
        at, unit = self._first[column], int(self._units[column])
        (kind, width, bits, base, _, count, *_), (what, wide, *_, ids, _, _, _, _, _) = self._alone[
            at : at + 2
        ].tolist()
        size = ids if what == RAW else ids * wide
        if (
            kind != LENGTHS
            or count != self.num_rows + 1
            or what == LENGTHS
            or not 0 <= base * unit <= size
            or wide != (1 if what == RAW else _WORD)
        ):
            return False
        if not bits:
            return bool(base * unit * self.num_rows == size and base * unit % _WORD == 0)
        ends = self._ends[column] = np.empty(count, _WHOLE[width][0])
        part = self._alone[at : at + 1].copy()
        part[:, _AT] = 0
        unpack_parts(part, self._data, ends.view(np.uint8))
        return bool(base + 2**bits < 2**31 and ends.min() >= 0 and ends[-1] * unit == size)


@functools.lru_cache(maxsize=64)
def _schema(
    message: bytes,
) -> tuple[pa.Schema, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Returns the schema, the bytes of a value and of an offset's unit for each column, and the column of each part.
    If both sizes are 0, the column cannot be placed directly from a copy."""
    schema = pa.ipc.read_schema(pa.py_buffer(message))
    units = np.array([unit_of(kind) for kind in schema.types], np.int64)
    widths = np.array(
        [kind.bit_width // 8 if kind in _STRAIGHT else 0 for kind in schema.types], np.int64
    )
    return schema, widths, units, np.repeat(np.arange(len(units)) + 1, 1 + (units > 0))


@compiled
def _fit(parts: Any, stored: Any, stream: Any) -> bool:
    """Whether all parts lie within the `stored` bytes and fill the `stream` bytes without a gap."""
    done, limit = 0, max(stream, stored)
    for n in range(len(parts)):
        kind, width, bits, _, at, count, begin, values, distinct, _, _ = parts[n]
        if (
            min(count, width) < 1
            or max(count, begin, values, distinct) > limit
            or bits > 32
            or min(bits, begin, values, distinct, kind) < 0
            or kind > LENGTHS
            or width not in (1, 2, 4, 8)
            or (kind == RAW and width > 1)
            or (kind == INDICES and distinct < 1)
        ):
            return False
        size = count if kind == RAW else 4 * bits * ((count - (kind == LENGTHS) + 31) // 32)
        if at != done or begin + size > stored or values + distinct * width > stored:
            return False
        done += count * width
    return bool(done == stream)
