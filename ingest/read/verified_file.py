"""An open Parquet file whose pages are held against their checksums: `VerifiedFile`, `StoreFile`.

Arrow verifies checksums as well, with a table of its own: that takes a fifth of the time of decoding. For local files
the processor's own instructions do it here, over the very bytes that Arrow then decodes.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from numba import njit
from zlib_ng.zlib_ng import crc32

_PAGES = 64  # of a column chunk, for which room is made at first
_KEPT = 16 * 2**20
_UNREADABLE = -1
# Of Thrift's compact protocol: kinds of values, fields of a page's head, and how deep structs lie in one another.
_FALSE, _BYTE, _DOUBLE, _BINARY, _STRUCT = 2, 3, 7, 8, 12
_SIZE, _CHECKSUM = 3, 4
_DEEPEST = 4


class DamagedPage(ValueError):
    """A page that is not as it was written."""


class PageMemory:
    """Memory for the stored columns of a row group. It is used again for the next one, which must not begin before the
    last one is decoded."""

    def __init__(self) -> None:
        self._bytes = _pages_of_memory(mmap.PAGESIZE)
        self._used = 0

    def clear(self) -> None:
        """Gives all of it back. What is kept grows to what was needed, but nobody accounts for it between two row
        groups."""
        if len(self._bytes) < min(self._used, _KEPT):
            self._bytes = _pages_of_memory(min(self._used, _KEPT))
        self._used = 0

    def take(self, size: int, at: int) -> npt.NDArray[np.uint8]:
        """So many bytes, which lie in their page as those of the file at `at` do: so they are copied much faster."""
        begin = self._used + (at - self._used) % mmap.PAGESIZE
        self._used = begin + size
        if self._used <= len(self._bytes):
            return self._bytes[begin:self._used]
        shift = at % mmap.PAGESIZE
        return _pages_of_memory(shift + size)[shift:]


def _pages_of_memory(size: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


_NOWHERE = PageMemory()


class _VerifiedBytes(io.RawIOBase):
    """What Arrow reads in the place of the file. Arrow asks for a whole column of a row group at a time."""

    def __init__(self, path: str):
        super().__init__()
        self.descriptor, self._at = os.open(path, os.O_RDONLY | os.O_CLOEXEC), 0
        self._size = os.fstat(self.descriptor).st_size
        self._found = np.empty((_PAGES, 3), np.int64)
        self.memory = _NOWHERE

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        self._at = at if whence == os.SEEK_SET else at + (self._at if whence == os.SEEK_CUR else self._size)
        return self._at

    def read_buffer(self, size: int) -> pa.Buffer:
        """What Arrow calls in the place of `read`: nothing is copied."""
        fetched, begin = self.memory.take(size, self._at), self._at
        view = fetched.data
        done = os.preadv(self.descriptor, [view], begin)
        while done < size:
            count = os.preadv(self.descriptor, [view[done:]], begin + done)
            if count == 0:
                raise DamagedPage(f"the file ends at byte {begin + done}, and a column at {begin + size}: it was "
                                  "truncated")
            done += count
        self._at += size
        if (count := _pages(fetched, self._found)) > len(self._found):
            self._found = np.empty((count, 3), np.int64)
            _pages(fetched, self._found)
        for first, end, checksum in self._found[:count].tolist():
            if first == _UNREADABLE:
                raise DamagedPage(f"the head of a page at bytes {begin} to {begin + size} cannot be read")
            if checksum >= 0 and crc32(view[first:end]) != checksum:
                raise DamagedPage(f"the page at bytes {begin + first} to {begin + end} differs from its checksum "
                                  "(CRC-32)")
        return pa.py_buffer(view)

    def close(self) -> None:
        if not self.closed:
            os.close(self.descriptor)
        super().close()


class VerifiedFile:
    """One thread uses it at a time."""

    def __init__(self, path: str, metadata: pq.FileMetaData | None, dictionaries: Sequence[str]):
        """Columns of texts among `dictionaries` are decoded as dictionaries."""
        self.metadata = pq.read_metadata(path) if metadata is None else metadata
        self._bytes = _VerifiedBytes(path)
        self._described: bool | None = None
        try:
            self._parquet = pq.ParquetFile(pa.PythonFile(self._bytes, mode="r"), metadata=self.metadata,
                                           pre_buffer=False, read_dictionary=list(dictionaries))
        except BaseException:
            self._bytes.close()
            raise

    def read(self, group: int, columns: Sequence[str], memory: PageMemory) -> pa.Table:
        """Decodes columns of a row group, by way of that memory."""
        memory.clear()
        self._bytes.memory = memory
        return self._parquet.read_row_group(group, columns=list(columns), use_threads=False)

    def status(self) -> os.stat_result:
        """What the system says of the open file: another one may lie at its path by now."""
        return os.fstat(self._bytes.descriptor)

    def is_as_described(self) -> bool:
        """Whether the footer that pages are found by is the open file's own: it may have been read before that was
        opened."""
        if self._described is None:
            with pa.OSFile(f"/dev/fd/{self._bytes.descriptor}") as again:
                self._described = bool(pq.read_metadata(again).equals(self.metadata))
        return self._described

    def rest(self) -> None:
        """Notes that nothing is read for a while."""
        self._bytes.memory = _NOWHERE

    def close(self) -> None:
        self._parquet.close(force=True)
        self._bytes.close()


class StoreFile:
    """The same of a file in a store, where Arrow verifies: there the time of fetching counts."""

    def __init__(self, opened: pa.NativeFile, metadata: pq.FileMetaData | None, dictionaries: Sequence[str]):
        """`opened` is closed with this."""
        self._parquet = pq.ParquetFile(opened, metadata=metadata, pre_buffer=True, read_dictionary=list(dictionaries),
                                       page_checksum_verification=True)
        self.metadata = self._parquet.metadata

    def read(self, group: int, columns: Sequence[str], memory: PageMemory) -> pa.Table:
        """Decodes columns of a row group. What is fetched ahead lies in Arrow's memory."""
        return self._parquet.read_row_group(group, columns=list(columns), use_threads=False)

    def rest(self) -> None:
        """Gives back what was fetched, which is kept until the next request."""
        self._parquet.read_row_group(0, columns=[], use_threads=False)

    def close(self) -> None:
        self._parquet.close(force=True)


@njit(nogil=True, cache=True)
def _pages(stored: Any, found: Any) -> int:
    """Finds the pages of a stored column: where each begins and ends, and its checksum (-1: it has none). Returns how
    many there are, also if `found` has no room for all. A page whose head cannot be read begins at -1, and is the last
    one."""
    count, at = 0, 0
    while at < len(stored):
        begin, size, checksum = _head(stored, at)
        at = begin + size
        readable = begin != _UNREADABLE and size >= 0 and at <= len(stored)
        if count < len(found):
            found[count, 0] = begin if readable else _UNREADABLE
            found[count, 1] = at
            found[count, 2] = checksum
        count += 1
        if not readable:
            break
    return count


@njit(nogil=True, cache=True)
def _head(stored: Any, at: Any) -> tuple[int, int, int]:
    """Reads the head of a page (Thrift's compact protocol): where the page begins, -1 if that cannot be read, how long
    it is, and its checksum."""
    size: Any = -1
    checksum: Any = -1
    depth, field, end = 0, 0, len(stored)
    fields: Any = np.zeros(_DEEPEST, np.int64)
    while at < end:
        byte: Any = np.int64(stored[at])
        kind, step = byte & 15, byte >> 4
        at += 1
        if byte == 0:  # the end of a struct
            if depth == 0:
                return at, size, checksum
            depth -= 1
            field = fields[depth]
            continue
        if step == 0 or kind == 0 or (kind > _BINARY and kind != _STRUCT):
            break
        field += step
        if kind == _STRUCT:
            if depth == _DEEPEST:
                break
            fields[depth] = field
            depth, field = depth + 1, 0
        elif kind in (_BYTE, _DOUBLE):
            at += 1 if kind == _BYTE else 8
        elif kind > _FALSE:
            value: Any = np.uint64(0)
            shift: Any = np.uint64(0)
            while at < end and shift < np.uint64(64):
                part: Any = np.uint64(stored[at])
                at += 1
                value |= (part & np.uint64(127)) << shift
                shift += np.uint64(7)
                if part < np.uint64(128):
                    break
            if kind == _BINARY:
                if value > np.uint64(end):
                    break
                at += np.int64(value)
            elif depth == 0 and field in (_SIZE, _CHECKSUM):  # either sign is stored as a positive number
                number: Any = np.int64(value >> np.uint64(1)) ^ -np.int64(value & np.uint64(1))
                if field == _SIZE:
                    size = number
                else:
                    checksum = number & 0xFFFFFFFF
    return _UNREADABLE, 0, checksum
