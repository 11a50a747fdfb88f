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
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from zlib_ng.zlib_ng import crc32

from sluice.ingest.errors import warn
from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.read.cache import FileCache
from sluice.ingest.read.open_file import LocalFile, OpenFile, stored_footer
from sluice.ingest.stages.bags import PackedBags, unit_of
from sluice.ingest.stages.scatter_kernel import (
    INDICES,
    LENGTHS,
    PACKED,
    PART,
    RAW,
    compiled,
    load_packed,
    pack_numbers,
    unpack_parts,
)

FOLDER = ".sluice-packed"
_BUFFER_BYTES = 32 * 2**20  # memory that is kept for the next row groups
VERSION = int.from_bytes(b"SluiceP4", "little")
_HEAD = np.dtype(
    [
        (name, np.int64)
        for name in (
            "version",
            "parts",
            "stream_bytes",
            "rows",
            "part_bytes",
            "part_sum",
            "head_sum",
        )
    ]
)
"""An entry begins with this. `part_sum` is the checksum of all parts, `head_sum` that of the head and of the part
descriptions that follow it."""
_ALIGNMENT = 64
_WORD = 4
_SCATTER_TYPES = (pa.float32(), pa.int32(), pa.int8())
_MIN_NUMBERS = 64  # buffers with fewer numbers are stored unchanged
_INDEX_SHARE = 0.9  # indices are used if they take less than this share of the bytes of differences
_INTEGER_TYPES: dict[int, tuple[Any, Any]] = {
    1: (np.int8, np.uint8),
    2: (np.int16, np.uint16),
    4: (np.int32, np.uint32),
    8: (np.int64, np.uint64),
}


class EntryKey(NamedTuple):
    """The name of an entry, and the state of its Parquet file."""

    name: str
    state: tuple[int, ...]


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
        """`paths` has the path of each local file, and None for a file that gets no copy. Copies hold
        these `columns`. Those in `dictionaries` are decoded as dictionaries."""
        self._paths = tuple(paths)
        self._warned = set[str]()
        self._lock = threading.Lock()
        self._names: dict[tuple[int, tuple[int, ...]], str] = {}
        """The entry name of each file, by the file's number and state."""
        self._columns = hashlib.sha256(
            json.dumps([VERSION, list(columns), list(dictionaries)]).encode()
        ).hexdigest()
        self._cache: FileCache | None = None
        self._buffers = Buffers()
        local = [path for path in paths if path is not None]
        self._may_write = bool(local)
        if len(local) < len(paths):
            self._warn_once(
                "files in a store, and of a table that renamed columns, have no packed copy",
                "use --cache for a store",
            )
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
            self._warn_once("the folder of packed copies cannot be used", f"{error}")

    def find_entry(self, number: int, group: int) -> EntryKey | None:
        """Returns the entry of a row group, or None if it cannot have one. Call it before the row group is read from
        Parquet."""
        path = self._paths[number]
        if self._cache is None or path is None:
            return None
        try:
            state = _state(os.stat(path))
            if (number, state) not in self._names:
                name = entry_name(path, state[0], state[1], self._columns)
                if _state(os.stat(path)) != state:
                    return None
                self._names[number, state] = name
        except OSError:
            return None  # reading the file raises the error
        return EntryKey(f"{self._names[number, state]} {group}", state)

    def read(self, entry: EntryKey, keep_packed: bool = False) -> pa.Table | PackedTable | None:
        """Reads a row group from its copy. Returns None if there is no valid copy. With `keep_packed`, columns stay
        packed if all of them can be scattered directly from the copy."""
        assert self._cache is not None
        if self._buffers.idle_bytes() > _BUFFER_BYTES:
            self._buffers.trim()
        try:
            stored = self._cache.fetch(
                entry.name, lambda size: self._buffers.take_line(size, np.uint8)
            )
            found = None if stored is None else PackedTable(stored, entry.name)
            return found if found is None or (keep_packed and found.can_scatter) else found.table()
        except (DamagedCopy, pa.ArrowException, OSError) as error:
            self._warn_once("a packed copy is not valid and is made again", f"{error}")
            self._cache.drop(entry.name)
        return None

    def keep(self, entry: EntryKey, file: OpenFile, table: pa.Table) -> None:
        """Writes the copy of a row group that was read from `file`, if there is space for it. Does nothing if another
        file has replaced the one that `entry` describes."""
        if not self._may_write or self._cache is None or not isinstance(file, LocalFile):
            return
        if _state(file.status()) != entry.state:
            self._warn_once(
                "a file was replaced while it was read, so no packed copy is made of it", ""
            )
            return
        try:
            content = packed(table, entry.name)
            why = "" if content is None else self._cache.put(entry.name, content, checked=True)
        except Exception as error:  # the reader has its rows and does not need the copy
            why = f"{type(error).__name__}: {error}"
        if why:
            self._may_write = False
            self._warn_once("no more packed copies are made", why)

    def make(self, read: Callable[[int, int], Any], row_groups: Sequence[Sequence[int]]) -> None:
        """Makes all missing copies by reading each row group."""

        def read_one(row_group: tuple[int, int]) -> None:
            if self._may_write:
                with suppress(Exception):  # loading these rows raises the error
                    read(*row_group)

        with ThreadPoolExecutor(os.cpu_count() or 1, "sluice-packing") as threads:
            list(
                threads.map(
                    read_one,
                    [
                        (file, n)
                        for file, counts in enumerate(row_groups)
                        for n in range(len(counts))
                    ],
                )
            )

    def stats(self) -> dict[str, int]:
        """Returns how many copies were read, missing, damaged and not kept, and the bytes on disk."""
        if self._cache is None:
            return {}
        counts = {
            name.replace("cache_", "packed_"): count for name, count in self._cache.stats().items()
        }
        return {**counts, "packed_bytes": self._cache.own_bytes}

    def close(self) -> None:
        """Stops using the copies. They stay on disk."""
        self._may_write = False
        if self._cache is not None:
            self._cache.close()

    def _warn_once(self, what: str, why: str) -> None:
        """Prints this line on standard error, once."""
        with self._lock:
            if what in self._warned:
                return
            self._warned.add(what)
        warn(
            f"{what}{why and f' ({why})'}; the same rows are read from Parquet",
        )


def entry_name(path: str, size: int, changed_ns: int, columns: str) -> str:
    """Returns the name of a file in this state with these columns. An entry's name adds the row group's number."""
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
    encoded = sorted(
        (
            (start, n + 1, _encode(content[start : start + size].view(kind), as_lengths))
            for n, column in enumerate(batch.columns)
            for buffer, kind, as_lengths in _buffers(column)
            if (size := buffer.size // kind.itemsize * kind.itemsize)
            >= _MIN_NUMBERS * kind.itemsize
            for start in [buffer.address - stream.address]
        ),
        key=lambda one: one[0],
    )
    entry = bytearray()
    parts = list[tuple[int, ...]]()
    done = 0
    for start, number, numbers in encoded:
        if start > done:  # metadata and padding between the columns
            parts.append(_append(entry, _unpacked_bytes(content[done:start]), done, 0))
        column = number if _has_all_parts(batch.column(number - 1)) else -number
        parts.append(_append(entry, numbers, start, column))
        done = start + numbers.width * numbers.count
    if done < len(content):
        parts.append(_append(entry, _unpacked_bytes(content[done:]), done, 0))
    front = np.zeros(_front_length(len(parts)), np.int64)
    _part_descriptions(front, len(parts))[:] = parts
    head = front[: _HEAD.itemsize // 8].view(_HEAD)
    head[:] = (VERSION, len(parts), len(content), batch.num_rows, len(entry), crc32(entry), 0)
    head["head_sum"] = crc32(front.data, crc32(key.encode()))
    return front.tobytes() + entry


@dataclass(frozen=True, slots=True)
class _PackedNumbers:
    """The packed numbers of one buffer."""

    kind: int
    width: int
    bits: int
    base: int
    """The smallest number. Of offsets, the smallest difference."""
    count: int
    pieces: list[npt.NDArray[np.uint8]]
    """The packed bytes, and for INDICES the distinct values."""
    distinct: int = 0


def _unpacked_bytes(content: npt.NDArray[np.uint8], base: int = 0) -> _PackedNumbers:
    return _PackedNumbers(RAW, 1, 0, base, len(content), [content])


def _append(entry: bytearray, numbers: _PackedNumbers, at: int, column: int) -> tuple[int, ...]:
    """Appends packed numbers to an entry. Returns the part's description, in the order of PART's fields."""
    places = [0, 0]
    first = len(entry)
    for n, piece in enumerate(numbers.pieces):
        places[n] = len(entry)
        entry.extend(piece.data)
        entry.extend(bytes(-len(entry) % _ALIGNMENT))
    return (
        numbers.kind,
        numbers.width,
        numbers.bits,
        numbers.base,
        at,
        numbers.count,
        *places,
        numbers.distinct,
        crc32(memoryview(entry)[first:]),
        column,
    )


def _has_all_parts(column: pa.Array) -> bool:
    """Whether the rows of the column can be moved with nothing but the column's own parts."""
    unit = unit_of(column.type)
    if column.null_count or (unit == _WORD and column.values.null_count):
        return False
    offsets = (
        np.frombuffer(column.buffers()[1], next(_buffers(column))[1])
        if unit == 1
        else np.empty(0, np.int64)
    )
    return (unit > 0 or column.type in _SCATTER_TYPES) and not (offsets % _WORD).any()


def _front_length(parts: int) -> int:
    """Returns how many int64 values precede the first part: the head and the descriptions of the parts."""
    size = _HEAD.itemsize + PART.itemsize * parts
    return (size + -size % _ALIGNMENT) // 8


def _part_descriptions(front: npt.NDArray[np.int64], parts: int) -> npt.NDArray[np.void]:
    """Returns the descriptions of the parts, as a view of the values before the first part."""
    start = _HEAD.itemsize // 8
    described: npt.NDArray[np.void] = front[start : start + PART.itemsize // 8 * parts].view(PART)
    return described


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
    elif (
        types.is_primitive(kind)
        and not types.is_boolean(kind)
        and kind.byte_width in _INTEGER_TYPES
    ):
        yield (
            array.buffers()[1],
            np.dtype(_INTEGER_TYPES[kind.byte_width][types.is_unsigned_integer(kind)]),
            False,
        )


def _encode(values: npt.NDArray[Any], as_lengths: bool) -> _PackedNumbers:
    """Packs numbers in the smallest of these forms: unchanged, as differences from the least, or as indices. With
    `as_lengths`, they are offsets, and the lengths between them are packed."""
    given = values
    width = values.itemsize
    unsigned = _INTEGER_TYPES[values.itemsize][1]
    if as_lengths:
        values = np.diff(values)
    low, high = int(values.min()), int(values.max())
    bits = (high - low).bit_length()
    size = _WORD * bits * -(-len(values) // 32) if bits <= 32 else values.nbytes
    if not as_lengths and width >= 2 and bits > 1:
        indexed = _encode_as_indices(values.view(unsigned), low, size * _INDEX_SHARE)
        if indexed is not None:
            return indexed
    if size >= values.nbytes or (as_lengths and given[0]):
        return _unpacked_bytes(given.view(np.uint8), low)
    numbers = (values - values.dtype.type(low)).view(unsigned).astype(np.uint32)
    return _PackedNumbers(
        LENGTHS if as_lengths else PACKED,
        width,
        bits,
        low,
        len(given),
        [pack_numbers(numbers, bits)],
    )


def _encode_as_indices(values: npt.NDArray[Any], low: int, limit: float) -> _PackedNumbers | None:
    """Packs numbers as indices into their distinct values. None: that would take `limit` bytes or more."""
    encoded = pa.array(values).dictionary_encode()
    distinct = len(encoded.dictionary)
    width = values.itemsize
    bits = max(1, (distinct - 1).bit_length())
    if _WORD * bits * -(-len(values) // 32) + distinct * width >= limit:
        return None
    indices = encoded.indices.to_numpy().view(np.uint32)
    pieces = [pack_numbers(indices, bits), encoded.dictionary.to_numpy().view(np.uint8)]
    return _PackedNumbers(INDICES, width, bits, low, len(values), pieces, distinct)


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
        "_bag_offsets",
        "_column_parts",
        "_data",
        "_first_parts",
        "_parts",
        "_units",
        "can_scatter",
        "nbytes",
        "num_rows",
        "schema",
    )

    def __init__(self, stored: npt.NDArray[np.uint8], key: str):
        head, self._parts = _read_head(stored, key)
        self._data = stored[8 * _front_length(len(self._parts)) :]
        self.nbytes = int(head["stream_bytes"])
        self.num_rows = int(head["rows"])
        self._check_data(head)
        first = self._data[self._parts[0]["begin"] :][: self._parts[0]["count"]]
        self.schema, widths, self._units, columns = _schema(
            first[: 8 + int(first[4:8].view(np.int32)[0])].tobytes()
        )
        self._column_parts = self._parts[self._parts["column"] > 0]
        """The parts of complete columns. A column of bags has two: its lengths, then its ids."""
        self._first_parts = np.searchsorted(columns, np.arange(len(widths)) + 1)
        """For each column, the index of its first part among these."""
        self._bag_offsets: dict[int, npt.NDArray[Any]] = {}  # for bags of different sizes
        self.can_scatter = bool((widths + self._units).all()) and np.array_equal(
            self._column_parts["column"], columns
        )
        if self.can_scatter:
            firsts = self._column_parts[self._first_parts]
            sizes = firsts["width"] * firsts["count"]
            self.can_scatter = bool((sizes == widths * self.num_rows)[widths > 0].all()) and all(
                map(self._fits, np.flatnonzero(self._units).tolist())
            )
        """Whether the rows of all columns can be scattered directly from their packed form."""

    def _check_data(self, head: np.void) -> None:
        """Raises DamagedCopy, which names the damaged columns, if the parts are not as they were written."""
        if crc32(self._data.data) != head["part_sum"]:
            ends = [*self._parts["begin"][1:].tolist(), len(self._data)]
            damaged = [
                f"column {abs(part['column'])}" if part["column"] else "its metadata"
                for part, end in zip(self._parts, ends, strict=True)
                if crc32(self._data[part["begin"] : end].data) != part["checksum"]
            ]
            raise DamagedCopy(
                f"{', '.join(damaged) or 'its content'} differs from its checksum (CRC-32)"
            )
        if len(self._data) != head["part_bytes"] or not _are_valid_parts(
            self._parts, len(self._data), self.nbytes
        ):
            raise DamagedCopy("its parts overlap, leave gaps or exceed its bytes")

    def table(self) -> pa.Table:
        """Unpacks all columns."""
        buffer = pa.allocate_buffer(self.nbytes)
        unpack_parts(self._parts, self._data, np.frombuffer(buffer, np.uint8))
        return pa.ipc.open_stream(buffer).read_all()

    def packed(self, columns: npt.NDArray[np.int64]) -> tuple[int, npt.NDArray[np.void]]:
        """Returns the address of the packed data, and the descriptions of these columns' parts."""
        return self._data.ctypes.data, self._column_parts[self._first_parts[columns]]

    def least(self, column: int) -> int:
        """Returns the smallest number of a column that can be scattered, or the smallest id in its bags."""
        at = self._first_parts[column] + (self._units[column] > 0)
        return int(self._column_parts["base"][at])

    def bags(self, column: int, start: int, stop: int) -> PackedBags:
        """Returns the bags of some rows of a column."""
        at = self._first_parts[column]
        lengths, ids = self._column_parts[at : at + 2]
        unit = int(self._units[column])
        offsets = self._bag_offsets.get(column)
        each = int(lengths["base"]) * unit if offsets is None else -1
        return PackedBags(self._data.ctypes.data, ids, each, offsets, unit, start, stop - start)

    def _fits(self, column: int) -> bool:
        """Whether the lengths of a column's bags add up to the number of its ids."""
        at, unit = self._first_parts[column], int(self._units[column])
        lengths, ids = self._column_parts[at : at + 2]
        is_raw = ids["kind"] == RAW
        size = int(ids["count"]) * (1 if is_raw else int(ids["width"]))
        base, bits = int(lengths["base"]), int(lengths["bits"])
        if (
            lengths["kind"] != LENGTHS
            or lengths["count"] != self.num_rows + 1
            or ids["kind"] == LENGTHS
            or not 0 <= base * unit <= size
            or ids["width"] != (1 if is_raw else _WORD)
        ):
            return False
        if not bits:
            return base * unit * self.num_rows == size and base * unit % _WORD == 0
        offsets = self._bag_offsets[column] = np.empty(
            self.num_rows + 1, _INTEGER_TYPES[int(lengths["width"])][0]
        )
        part = self._column_parts[at : at + 1].copy()
        part["at"] = 0
        unpack_parts(part, self._data, offsets.view(np.uint8))
        return bool(base + 2**bits < 2**31 and offsets.min() >= 0 and offsets[-1] * unit == size)


def _read_head(stored: npt.NDArray[np.uint8], key: str) -> tuple[np.void, npt.NDArray[np.void]]:
    """Reads an entry's head and the descriptions of its parts. Raises DamagedCopy if a checksum differs."""
    size = _HEAD.itemsize
    if len(stored) < size or stored[:size].view(_HEAD)["version"][0] != VERSION:
        raise DamagedCopy("it is no packed copy of this version of sluice")
    head = stored[:size].view(_HEAD)[0]
    parts = int(head["parts"])
    end = 8 * _front_length(parts)
    front = stored[: end if size < end <= len(stored) else size].view(np.int64).copy()
    front[: size // 8].view(_HEAD)["head_sum"] = 0
    checksum = crc32(front.data, crc32(key.encode()))
    if min(parts, int(head["stream_bytes"])) < 1 or checksum != head["head_sum"]:
        raise DamagedCopy(
            "its head differs from its checksum (CRC-32), or belongs to another row group"
        )
    return head, _part_descriptions(front, parts)


@functools.lru_cache(maxsize=64)
def _schema(
    message: bytes,
) -> tuple[pa.Schema, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Returns the schema, the bytes of a value and of an offset's unit for each column, and the column of each part.
    If both sizes are 0, the column cannot be scattered directly from a copy."""
    schema = pa.ipc.read_schema(pa.py_buffer(message))
    units = np.array([unit_of(kind) for kind in schema.types], np.int64)
    widths = np.array(
        [kind.bit_width // 8 if kind in _SCATTER_TYPES else 0 for kind in schema.types], np.int64
    )
    return schema, widths, units, np.repeat(np.arange(len(units)) + 1, 1 + (units > 0))


@compiled
def _are_valid_parts(parts: Any, stored: Any, stream: Any) -> bool:
    """Whether all parts lie within the `stored` bytes and fill the `stream` bytes without a gap."""
    done = 0
    limit = max(stream, stored)
    for n in range(len(parts)):
        part = parts[n]
        kind, width = part.kind, part.width
        bits, count = part.bits, part.count
        start, values = part.begin, part.values
        distinct = part.distinct
        if (
            min(count, width) < 1
            or max(count, start, values, distinct) > limit
            or bits > 32
            or min(bits, start, values, distinct, kind) < 0
            or kind > LENGTHS
            or width not in (1, 2, 4, 8)
            or (kind == RAW and width > 1)
            or (kind == INDICES and distinct < 1)
        ):
            return False
        size = count if kind == RAW else 4 * bits * ((count - (kind == LENGTHS) + 31) // 32)
        if part.at != done or start + size > stored or values + distinct * width > stored:
            return False
        done += count * width
    return bool(done == stream)
