"""Entries in a folder, each whole or not there: `CacheFolder`.

An entry is an Arrow table behind a checksum. It is written under another name and then renamed, so no reader sees a
part of one. Any number of processes may share a folder, such as the ranks of a run. The entries that were used least
recently go first.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow as pa
from zlib_ng import zlib_ng

from sluice.common.lines import say
from sluice.ingest.errors import LoaderError

_HEAD_BYTES = 64
"""The bytes before a table, of which the first four are its checksum. Arrow wants tables aligned."""
_FREE_SHARE = 0.1
"""The share of the disk that stays free."""
_IN_MEMORY = ("tmpfs", "ramfs")
_COUNTED_SHARE = 1 / 64
"""The share of the limit after which a process counts again what others have written."""


def file_system_of(path: Path) -> str:
    """Returns the kind of the file system of a folder. Empty: unknown."""
    real = path.resolve()
    kinds = {Path(p.mountpoint): str(p.fstype) for p in psutil.disk_partitions(all=True)}
    return next((kinds[folder] for folder in (real, *real.parents) if folder in kinds), "")


def _is_left(name: str) -> bool:
    """Whether a file is a part of an entry whose process has ended. The part's name has its id."""
    part = re.fullmatch(r"\w+-(\d+)-[0-9a-f]+\.part", name)
    return part is not None and not psutil.pid_exists(int(part[1]))


class CacheFolder:
    """The entries of a folder. Many threads can use it."""

    def __init__(
        self,
        path: Path,
        limit_bytes: int,
        system_of: Callable[[Path], str] = file_system_of,
    ):
        """Makes the folder if it is not there. LoaderError: it is not a place for a cache."""
        self.path, self._limit = path, limit_bytes
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = path.stat()
        except OSError as error:
            raise LoaderError(f"cache {path}: {error.strerror}; name another folder") from None
        if about.st_uid != os.geteuid():
            raise LoaderError(f"cache {path}: the folder belongs to another user; name another one")
        if about.st_mode & 0o077:
            raise LoaderError(f"cache {path}: other users may open the folder; `chmod 700 {path}`")
        if (kind := system_of(path)) in _IN_MEMORY:
            raise LoaderError(f"cache {path}: {kind} is memory; name a folder on a disk")
        self._lock = threading.Lock()
        self._stopped = False
        self._used: dict[str, tuple[int, int]] = {}
        """By entry: when it was last used, and its bytes."""
        self._uncounted = 0
        """The bytes that this process wrote since it last counted the entries."""
        self._count()

    def _count(self) -> None:
        """Counts the entries of all processes, and removes what ended processes left."""
        self._used, self._uncounted = {}, 0
        for entry in os.scandir(self.path):
            with suppress(FileNotFoundError):  # another process may have removed it
                about = entry.stat()
                if entry.name.endswith(".arrow"):
                    self._used[entry.name] = about.st_mtime_ns, about.st_size
                elif _is_left(entry.name):
                    os.unlink(entry)

    def get(self, name: str) -> pa.Table | None:
        """Returns an entry. None: there is none, or it is damaged, which one line says."""
        path = self.path / f"{name}.arrow"
        try:
            raw = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        body = memoryview(raw)[_HEAD_BYTES:]
        if len(raw) < _HEAD_BYTES or zlib_ng.crc32(body) != int.from_bytes(raw[:4], "little"):
            say(f"{path} is damaged; its rows are computed again")
            self.remove(name)
            return None
        with self._lock:
            if path.name in self._used:
                self._used[path.name] = path.stat().st_mtime_ns, len(raw)
        return pa.ipc.open_stream(pa.py_buffer(body)).read_all()

    def put(self, name: str, table: pa.Table) -> None:
        """Adds an entry, if there is room."""
        if self._stopped:
            return
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        body = sink.getvalue()
        head = zlib_ng.crc32(body).to_bytes(_HEAD_BYTES, "little")
        path = self.path / f"{name}.arrow"
        part = self.path / f"{name}-{os.getpid()}-{id(self):x}.part"
        with self._lock:
            try:
                if not self._make_room(body.size + _HEAD_BYTES):
                    self._stop("a tenth of the disk stays free")
                    return
                with open(part, "wb") as file:
                    file.write(head)
                    file.write(body)
                part.rename(path)
                about = path.stat()
            except OSError as error:
                with suppress(OSError):
                    part.unlink()
                self._stop(error.strerror or str(error))
                return
            self._used[path.name] = about.st_mtime_ns, about.st_size
            self._uncounted += about.st_size

    def remove(self, name: str) -> None:
        """Removes an entry."""
        with self._lock:
            self._drop(f"{name}.arrow")

    def _make_room(self, size: int) -> bool:
        """Removes the entries that were used least recently. Returns whether there is room then."""
        if self._uncounted > self._limit * _COUNTED_SHARE:
            self._count()
        disk = shutil.disk_usage(self.path)
        free = disk.free - int(_FREE_SHARE * disk.total)
        left = self._limit - sum(bytes_ for _, bytes_ in self._used.values())
        for file in sorted(self._used, key=lambda file: self._used[file]):
            if size <= min(free, left):
                break
            removed = self._used[file][1]
            self._drop(file)
            free, left = free + removed, left + removed
        return size <= min(free, left)

    def _drop(self, file: str) -> None:
        self._used.pop(file, None)
        with suppress(OSError):
            (self.path / file).unlink()

    def _stop(self, why: str) -> None:
        self._stopped = True
        say(f"cache {self.path}: no more entries are written ({why})")
