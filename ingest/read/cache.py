"""Keeps on local disk what was read from a remote store: `FileCache`.

An entry is a byte range of a file. The same table, read the same way, asks for the same ranges in every epoch. A
cache that drops its oldest entries would never hit when a data set is larger than the cache. So this one accepts
entries until it is full, and never drops a part of a data set for another part of it. The hit rate is then the share
of the data set that fits. To free space, the cache removes whole data sets that no process uses, the oldest first.

Ranks of one host share a cache. Each data set has a folder with a lock file, which shows who uses it, and a ledger,
which counts its bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import struct
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

from zlib_ng.zlib_ng import crc32

_HEADER = struct.Struct("<8sQL")
_MAGIC = b"SluiceC2"
_BLOCK_BYTES = 4096  # a file takes whole blocks of the disk
_OUR_FILES = re.compile(r"[0-9a-f]{64}(\.[0-9a-f]{32}\.part)?|ledger(\.new)?|users|name")
_LOCK_FILE = "space"


class FileCache:
    """A cache on local disk. `limit_bytes` applies to all data sets in `folder` together."""

    def __init__(self, folder: str | os.PathLike[str], limit_bytes: int, data_set: str):
        """`data_set` names what is read, for instance a table's URI. The cache changes only files that it made itself
        in `folder`/sluice-cache."""
        if limit_bytes < 1:
            raise ValueError(f"FileCache: limit_bytes is {limit_bytes}; it must be 1 or more")
        self._top = Path(folder) / "sluice-cache"
        self._home = self._top / hashlib.sha256(data_set.encode()).hexdigest()[:32]
        self._limit = limit_bytes
        self._counts = threading.Lock()
        self._hits = self._misses = self._corrupt = self._refused = 0
        self._full = self._closed = False
        self._top.mkdir(0o755, parents=True, exist_ok=True)
        about = self._top.lstat()
        if (
            not stat.S_ISDIR(about.st_mode)
            or about.st_uid not in (os.geteuid(), 0)
            or about.st_mode & stat.S_IWOTH
        ):  # other users could change the rows that are read from it
            raise PermissionError(errno.EPERM, f"{self._top} can be written by other users")
        self._users_file = -1
        with self._exclusive():
            self._home.mkdir(exist_ok=True)
            (self._home / "name").write_text(data_set)
            self._users_file = os.open(
                self._home / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
            try:
                os.utime(self._users_file)
                self._start_ledger()
            except BaseException:
                self.close()
                raise

    def _start_ledger(self) -> None:
        # If no other process uses the folder, half-written files come from killed processes.
        if _lock(self._users_file, fcntl.LOCK_EX):
            for path in self._home.glob("*.part"):
                path.unlink()
            self._write_ledger(
                sum(
                    _disk_bytes(p.stat().st_size) for p in self._home.iterdir() if len(p.name) == 64
                )
            )
        _lock(self._users_file, fcntl.LOCK_SH)

    def get(self, key: str) -> bytes | None:
        """Returns what was put under `key`, or None if it is missing or damaged."""
        try:
            with open(self._path(key), "rb") as file:
                header = file.read(_HEADER.size)
                data = file.read()
        except OSError:
            self._count("_misses")
            return None
        if header != _header(key, data):  # a damaged entry
            self._count("_corrupt", "_misses")
            with contextlib.suppress(OSError), self._exclusive():
                size = self._path(key).stat().st_size
                self._path(key).unlink()
                self._add(-_disk_bytes(size))
            return None
        self._count("_hits")
        return data

    def put(self, key: str, data: bytes) -> None:
        """Keeps `data` if it can. A full or failing disk turns the cache off and does not stop the run."""
        if self._full or self._closed:
            return
        path = self._path(key)
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
        size = _disk_bytes(_HEADER.size + len(data))
        reserved = False
        try:
            reserved = self._reserve(size)
            if not reserved:
                return
            with open(part, "xb") as file:
                file.write(_header(key, data))
                file.write(data)
            os.link(part, path)  # unlike a rename, this fails if another rank was first
        except OSError as error:
            with contextlib.suppress(OSError), self._exclusive():
                self._add(-size if reserved else 0)
            if error.errno != errno.EEXIST:
                self._full = True
                self._count("_refused")
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

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
        """The bytes of all data sets on disk now."""
        with self._exclusive():
            return self._total()

    def close(self) -> None:
        """Stops using the data set. Its entries stay on disk."""
        self._full = self._closed = True
        if self._users_file >= 0:
            os.close(self._users_file)
            self._users_file = -1

    def __enter__(self) -> FileCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _path(self, key: str) -> Path:
        return self._home / hashlib.sha256(key.encode()).hexdigest()

    def _count(self, *names: str) -> None:
        with self._counts:
            for name in names:
                setattr(self, name, getattr(self, name) + 1)

    def _reserve(self, size: int) -> bool:
        with self._exclusive():
            total = self._total()
            if total + size > self._limit:
                total -= self._evict(total + size - self._limit)
            if total + size > self._limit:
                self._full = self._limit - total < _BLOCK_BYTES  # a smaller entry may still fit
                self._count("_refused")
                return False
            self._add(size)
        return True

    def _evict(self, wanted: int) -> int:
        """Removes unused data sets until `wanted` bytes are free. Returns how many bytes it freed."""
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
                    if _OUR_FILES.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                        path.unlink()
                # This fails if the folder has a file that is not ours.
                with contextlib.suppress(OSError):
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

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Returns a context that one thread of one process can have at a time. It guards what all data sets share."""
        descriptor = os.open(self._top / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _header(key: str, data: bytes) -> bytes:
    """Returns the header of an entry. Its checksum covers the key too, so an entry under a wrong key is rejected."""
    return _HEADER.pack(_MAGIC, len(data), crc32(data, crc32(key.encode())))


def _disk_bytes(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


def _lock(descriptor: int, how: int) -> bool:
    """Tries to take the lock without waiting. Returns whether it was taken."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
