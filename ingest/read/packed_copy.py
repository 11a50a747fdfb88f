"""A packed copy of row groups, from which they are decoded much faster: `PackedCopy`, of which a reader makes
`PackedRowGroups`.

Parquet stays the truth. The copy is derived from it by whoever reads a row group first, and only believed for the very
file that it was made of: its size, its time of change and its footer are in the name of every entry. A copy that is
damaged, of another version or gone costs a line and the time of reading Parquet; it never gives a row.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.ingest.read.cache import FileCache
from sluice.ingest.read.footers import stored_footer
from sluice.ingest.read.open_file import LocalFile, OpenFile
from sluice.ingest.read.packed_table import VERSION, DamagedCopy, load_compiled, packed, unpacked

FOLDER = ".sluice-packed"
_KEPT = 16 * 2**20  # bytes of memory that a thread keeps from one copy to the next


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCopy:
    """Where the packed copies of row groups lie, and how much of the disk they may take."""

    limit_bytes: int = 10 * 2**30
    """When it is reached nothing more is written; the other row groups are read from Parquet."""
    folder: str = ""
    """Empty: a hidden folder beside the files. All ranks and jobs of a host share it."""

    def __post_init__(self) -> None:
        if self.limit_bytes < 1:
            raise ValueError(f"PackedCopy: limit_bytes {self.limit_bytes} holds nothing; give 1 or more")


Wanted = tuple[str, tuple[int, ...]]
"""An entry's name, and the state of the Parquet file that it is of."""


class PackedRowGroups:
    """The packed copies of the row groups of some files. Safe to use from many threads."""

    def __init__(self, how: PackedCopy, paths: Sequence[str | None], columns: Sequence[str],
                 dictionaries: Sequence[str]):
        """`paths` are those of local files; what lies in a store has none, and no copy. Copies are of these columns,
        those of `dictionaries` decoded as such."""
        self._paths, self._said, self._lock = tuple(paths), set[str](), threading.Lock()
        self._names: dict[int, tuple[tuple[int, ...], str]] = {}  # the state of each file, and its name for entries
        self._columns = hashlib.sha256(json.dumps([VERSION, list(columns), list(dictionaries)]).encode()).hexdigest()
        self._cache: FileCache | None = None
        self._threads = threading.local()  # each has its memory for what is stored
        local = [path for path in paths if path is not None]
        self._makes = bool(local)
        if len(local) < len(paths):
            self._say("files in a store have no packed copy", "take --cache for these")
        try:
            states = [_state(os.stat(path))[:2] for path in local]
            if local:
                self._cache = FileCache(how.folder or _beside(local), how.limit_bytes, repr((self._columns, states)))
            load_compiled()
        except OSError as error:
            self._say("the folder of packed copies cannot be used", f"{error}")

    def wanted(self, number: int, group: int) -> Wanted | None:
        """The entry of a row group, if there may be one. Ask before the row group is read from Parquet."""
        path = self._paths[number]
        if self._cache is None or path is None:
            return None
        try:
            state = _state(os.stat(path))
            known = self._names.get(number)
            if known is None or known[0] != state:
                footer = hashlib.sha256(stored_footer(path, state[0])).hexdigest()
                if _state(os.stat(path)) != state:
                    return None
                known = self._names[number] = state, f"{state[0]} {state[1]} {footer} {self._columns}"
        except OSError:
            return None  # whoever reads the file says what is wrong
        return f"{known[1]} {group}", known[0]

    def read(self, wanted: Wanted) -> pa.Table | None:
        """A row group from its copy; None, if there is none, or none that can be believed."""
        assert self._cache is not None
        memory: PageMemory | None = getattr(self._threads, "memory", None)
        if memory is None:
            memory = self._threads.memory = PageMemory()
        memory.clear()
        try:
            stored = self._cache.fetch(wanted[0], memory.take)
            return None if stored is None else unpacked(stored, wanted[0])
        except (DamagedCopy, pa.ArrowException, OSError) as error:
            self._say("a packed copy cannot be believed, and is made anew", f"{error}")
            self._cache.drop(wanted[0])
        return None

    def keep(self, wanted: Wanted, file: OpenFile, table: pa.Table) -> None:
        """Makes the copy of what was read from that Parquet file, if there is room for it, and if that is the file of
        which it was wanted: another one may lie at its path by now."""
        if not self._makes or self._cache is None or not isinstance(file, LocalFile):
            return
        if _state(file.status()) != wanted[1] or not file.is_as_described():
            self._say("a file was replaced while it was read, and has no packed copy of that", "")
            return
        try:
            content = packed(table, wanted[0])
            why = "" if content is None else self._cache.put(wanted[0], content, checked=True)
        except Exception as error:  # what a reader needs it has
            why = f"{type(error).__name__}: {error}"
        if why:
            self._makes = False
            self._say("no more packed copies are made", why)

    def make(self, read: Callable[[int, int], Any], row_groups: Sequence[Sequence[int]]) -> None:
        """Has the copies made that are missing, by having each row group read."""
        def one(place: tuple[int, int]) -> None:
            if self._makes:
                with suppress(Exception):  # whoever needs its rows says what is wrong
                    read(*place)

        with ThreadPoolExecutor(os.cpu_count() or 1, "sluice-packing") as threads:
            list(threads.map(one, [(file, group) for file, counts in enumerate(row_groups)
                                   for group in range(len(counts))]))

    def stats(self) -> dict[str, int]:
        """How many copies were read, missing, damaged, and not kept; and their bytes on disk."""
        if self._cache is None:
            return {}
        counts = {name.replace("cache_", "packed_"): count for name, count in self._cache.stats().items()}
        return {**counts, "packed_bytes": self._cache.own_bytes}

    def close(self) -> None:
        """Ends the use of the copies; they stay."""
        self._makes = False
        if self._cache is not None:
            self._cache.close()

    def _say(self, what: str, why: str) -> None:
        """Says that once."""
        with self._lock:
            if what in self._said:
                return
            self._said.add(what)
        print(f"sluice: {what}{why and f' ({why})'}; rows are read from Parquet, and are the same", file=sys.stderr,
              flush=True)


class PageMemory:
    """Memory for stored copies. It is used again for the next one, which must not begin before the last one is
    unpacked."""

    def __init__(self) -> None:
        self._bytes = _pages_of_memory(mmap.PAGESIZE)
        self._used = 0

    def clear(self) -> None:
        """Gives all of it back. What is kept grows to what was needed, but nobody accounts for it between two row
        groups."""
        if len(self._bytes) < min(self._used, _KEPT):
            self._bytes = _pages_of_memory(min(self._used, _KEPT))
        self._used = 0

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        begin = self._used + -self._used % mmap.PAGESIZE
        self._used = begin + size
        return self._bytes[begin:self._used] if self._used <= len(self._bytes) else _pages_of_memory(size)


def _pages_of_memory(size: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def _beside(paths: Sequence[str]) -> str:
    return os.path.join(os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths]), FOLDER)


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev
