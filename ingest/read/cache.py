"""Keeps what was read from a remote store once on local disk: `FileCache`.

Entries are the ranges that readers ask for; the same table read the same way asks for the same ranges every epoch. A
scan of a data set larger than the cache would find nothing in a cache that drops the oldest: so entries are admitted
until the cache is full, and nothing of the same data set ever leaves for another part of it. The share of reads that
hit is then the share of the data set that fits. Only whole data sets that nobody reads now make room, the one that was
opened longest ago first.

Ranks of one host share a cache: each data set has a folder with a lock that says who uses it and a ledger of its
bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import struct
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from zlib_ng.zlib_ng import crc32

from sluice.ingest.knobs import format_bytes

_HEADER = struct.Struct("<8sQL")
_MAGIC = b"SluiceC2"
_BLOCK = 4096  # a file takes whole blocks of a disk
_OWN = re.compile(r"[0-9a-f]{64}(\.[0-9a-f]{32}\.part)?|ledger(\.new)?|users|name")
_SPACE = "space"


class FileCache:
    """A cache on local disk. `limit_bytes` applies to all data sets in `folder` together, whoever writes them."""

    def __init__(self, folder: str | os.PathLike[str], limit_bytes: int, data_set: str):
        """`data_set` names what is scanned, for instance a table's URI. Nothing outside `folder`/sluice-cache is
        touched, and in there only files of the cache's own making."""
        if limit_bytes < 1:
            raise ValueError(f"FileCache: a limit of {limit_bytes} bytes is none")
        self._top = Path(folder) / "sluice-cache"
        self._home = self._top / hashlib.sha256(data_set.encode()).hexdigest()[:32]
        self._limit = limit_bytes
        self._counts = threading.Lock()
        self._hits = self._misses = self._corrupt = self._refused = 0
        self._full = self._closed = False
        self._top.mkdir(0o755, parents=True, exist_ok=True)
        _refuse_strangers(self._top)
        self._users = -1
        with self._alone():
            self._home.mkdir(exist_ok=True)
            (self._home / "name").write_text(data_set)
            self._users = os.open(
                self._home / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
            try:
                os.utime(self._users)
                self._begin_ledger()
            except BaseException:
                self.close()
                raise

    def _begin_ledger(self) -> None:
        if _lock(
            self._users, fcntl.LOCK_EX
        ):  # nobody else uses the folder: half-written files belong to no one
            for path in self._home.glob("*.part"):
                path.unlink()
            self._write_ledger(
                sum(_blocks(p.stat().st_size) for p in self._home.iterdir() if len(p.name) == 64)
            )
        _lock(self._users, fcntl.LOCK_SH)

    def get(self, key: str) -> bytes | None:
        """Returns what was put under `key`; None if it is not there, or no longer whole."""
        try:
            with open(self._path(key), "rb") as file:
                header = file.read(_HEADER.size)
                data = file.read()
        except OSError:
            self._count("_misses")
            return None
        if header != _header(key, data):
            self.drop(key)
            return None
        self._count("_hits")
        return data

    def fetch(
        self, key: str, memory: Callable[[int], npt.NDArray[np.uint8]]
    ) -> npt.NDArray[np.uint8] | None:
        """What was put under `key` with checksums of its own, in memory that the caller gives, who compares these.
        None: it is not there. What cannot be read or is another entry raises an OSError."""
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            self._count("_misses")
            return None
        try:
            size, header = os.fstat(descriptor).st_size - _HEADER.size, bytearray(_HEADER.size)
            data = memory(max(0, size))
            done = max(0, os.preadv(descriptor, [header, data.data], 0) - _HEADER.size)
            while done < size and (
                count := os.preadv(descriptor, [data.data[done:]], _HEADER.size + done)
            ):
                done += count
        finally:
            os.close(descriptor)
        if header != _header(key, data[:done], checked=True):
            raise OSError(errno.EIO, "its header is not that of this entry, or its length")
        self._count("_hits")
        return data[:done]

    def drop(self, key: str) -> None:
        """Removes an entry that is no longer whole."""
        self._count("_corrupt", "_misses")
        path = self._path(key)
        with contextlib.suppress(OSError), self._alone():
            size = path.stat().st_size
            path.unlink()
            self._add(-_blocks(size))

    def put(self, key: str, data: bytes | bytearray, *, checked: bool = False) -> str:
        """Keeps `data` if there is room; otherwise it says why not. A disk that is full or fails disables the cache,
        never the run. `checked` data holds its own checksums, and is only had by `fetch`."""
        if self._full or self._closed:
            return "the cache is full, or closed"
        path = self._path(key)
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
        size = _blocks(_HEADER.size + len(data))
        reserved = False
        try:
            reserved = self._reserve(size)
            if not reserved:
                return f"{self._top} has no room within its limit of {format_bytes(self._limit)}"
            with open(part, "xb") as file:
                file.write(_header(key, data, checked))
                file.write(data)
            os.link(part, path)  # unlike a rename, it fails if another rank was first
        except OSError as error:
            with contextlib.suppress(OSError), self._alone():
                self._add(-size if reserved else 0)
            if error.errno != errno.EEXIST:
                self._full = True
                self._count("_refused")
                return str(error)
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        return ""

    def stats(self) -> dict[str, int]:
        with self._counts:
            return {
                "cache_hits": self._hits,
                "cache_misses": self._misses,
                "cache_corrupt": self._corrupt,
                "cache_refused": self._refused,
            }

    @property
    def bytes(self) -> int:
        """The number of bytes on disk now, of all data sets."""
        with self._alone():
            return self._total()

    @property
    def own_bytes(self) -> int:
        """The number of those of this data set."""
        return self._ledger(self._home)

    def close(self) -> None:
        """Ends this cache's use of the data set; what it holds stays."""
        self._full = self._closed = True
        if self._users >= 0:
            os.close(self._users)
            self._users = -1

    def __enter__(self) -> FileCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        return f"{self._top} (at most {format_bytes(self._limit)})"

    def _path(self, key: str) -> Path:
        return self._home / _entry(key)

    def _count(self, *names: str) -> None:
        with self._counts:
            for name in names:
                setattr(self, name, getattr(self, name) + 1)

    def _reserve(self, size: int) -> bool:
        with self._alone():
            total = self._total()
            if total + size > self._limit:
                total -= self._evict(total + size - self._limit)
            if total + size > self._limit:
                self._full = self._limit - total < _BLOCK  # otherwise a smaller entry may still fit
                self._count("_refused")
                return False
            self._add(size)
        return True

    def _evict(self, wanted: int) -> int:
        """Drops whole data sets that nobody reads until `wanted` bytes are free; returns how many are."""
        freed = 0
        others = [f for f in self._top.iterdir() if f != self._home and (f / "users").is_file()]
        for folder in sorted(others, key=lambda f: (f / "users").stat().st_mtime):
            if freed >= wanted:
                break
            users = os.open(folder / "users", os.O_RDWR | os.O_CLOEXEC)
            try:
                if not _lock(users, fcntl.LOCK_EX):
                    continue
                freed += self._ledger(folder)
                for path in list(folder.iterdir()):
                    if _OWN.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                        path.unlink()
                with contextlib.suppress(OSError):  # fails if it holds somebody else's file
                    folder.rmdir()
            finally:
                os.close(users)
        return freed

    def _total(self) -> int:
        return sum(self._ledger(folder) for folder in self._top.iterdir() if folder.is_dir())

    def _ledger(self, folder: Path) -> int:
        try:
            return int((folder / "ledger").read_text())
        except FileNotFoundError:
            return 0

    def _add(self, size: int) -> None:
        self._write_ledger(self._ledger(self._home) + size)

    def _write_ledger(self, size: int) -> None:
        new = self._home / "ledger.new"
        new.write_text(str(max(0, size)))
        new.replace(self._home / "ledger")

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        return _alone(self._top)


@contextlib.contextmanager
def _alone(top: Path) -> Iterator[None]:
    """A context for one process and thread at a time, for what all data sets share."""
    descriptor = os.open(top / _SPACE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _refuse_strangers(folder: Path) -> None:
    """Refuses a folder that others may write: whoever may write into a cache chooses the rows that are read from it."""
    about = folder.lstat()
    if (
        not stat.S_ISDIR(about.st_mode)
        or about.st_uid not in (os.geteuid(), 0)
        or about.st_mode & stat.S_IWOTH
    ):
        raise PermissionError(errno.EPERM, f"{folder} is not this user's alone to write")


def half_written(folder: str | os.PathLike[str], remove: bool) -> list[Path]:
    """Files that runs began to write in `folder` before they died: those of data sets which nobody uses now."""
    top, found = Path(folder) / "sluice-cache", []
    if not top.is_dir():
        return []
    with _alone(top):
        for users in top.glob("*/users"):
            descriptor = os.open(users, os.O_RDWR | os.O_CLOEXEC)
            try:
                if _lock(descriptor, fcntl.LOCK_EX):
                    found += [
                        path for path in users.parent.glob("*.part") if _OWN.fullmatch(path.name)
                    ]
            finally:
                os.close(descriptor)
        for path in found if remove else ():
            path.unlink()
    return found


def forget(folder: str | os.PathLike[str], keys: Callable[[str], Sequence[str]]) -> int:
    """Removes the entries that `keys` names for a data set, from every data set in `folder`, and returns their bytes.
    What is left without any entry, and used by nobody, goes with them; links are not followed."""
    top, freed = Path(folder) / "sluice-cache", 0
    if top.parent.is_symlink() or top.is_symlink() or not top.is_dir():
        return 0
    with _alone(top):
        for home in [found for found in top.iterdir() if found.is_dir() and not found.is_symlink()]:
            with contextlib.suppress(
                OSError
            ):  # a folder that is no data set of ours, or that has just gone
                gone, data_set = 0, (home / "name").read_text()
                for path in [home / _entry(key) for key in keys(data_set)]:
                    if path.is_file() and not path.is_symlink():
                        gone += _blocks(path.stat().st_size)
                        path.unlink()
                if gone:
                    (home / "ledger").write_text(
                        str(max(0, int((home / "ledger").read_text()) - gone))
                    )
                    freed += gone
                    _removed_if_empty(home)
    if freed:
        with contextlib.suppress(OSError):  # it is not empty
            if [found.name for found in top.iterdir()] == [_SPACE]:
                (top / _SPACE).unlink()
            top.rmdir()
            top.parent.rmdir()
    return freed


def _removed_if_empty(home: Path) -> None:
    """Removes the folder of a data set that has no entries, and that nobody uses."""
    users = os.open(home / "users", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if _lock(users, fcntl.LOCK_EX) and {path.name for path in home.iterdir()} <= {
            "ledger",
            "users",
            "name",
        }:
            shutil.rmtree(home)
    finally:
        os.close(users)


def _entry(key: str) -> str:
    """The name of the file in which an entry lies."""
    return hashlib.sha256(key.encode()).hexdigest()


def _header(key: str, data: Any, checked: bool = False) -> bytes:
    """The header of an entry. Its checksum includes the key: data kept under another key is another range."""
    return _HEADER.pack(_MAGIC, len(data), crc32(b"" if checked else data, crc32(key.encode())))


def _blocks(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _lock(descriptor: int, how: int) -> bool:
    """Tries to take the lock, and says whether it is ours now; never waits."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
