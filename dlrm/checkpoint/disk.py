"""The file operations that write a checkpoint: `CheckpointDisk`. Tests replace it to interrupt each operation.

To survive a crash of the machine, a checkpoint is written in this order: its files, their folder, the folder's own
entry, and at last the pointer to the folder."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_CHUNK = 8 * 2**20


class CheckpointDisk:
    """The operations on a real file system."""

    def make(self, folder: Path) -> None:
        """Makes a folder, unless it exists."""
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, parts: Iterable[Any]) -> None:
        """Writes a file of these bytes. When this returns, the bytes are on the disk, but perhaps not the file's name.
        Each part is valid until the next one is asked for. Raises OSError if the path is a link."""
        with open(
            path, "wb", opener=lambda p, flags: os.open(p, flags | os.O_NOFOLLOW, 0o666)
        ) as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())

    def sync_folder(self, folder: Path) -> None:
        """Writes the names in a folder to the disk. Some network file systems do not support this for folders. There it
        does nothing."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)

    def replace(self, old: Path, new: Path) -> None:
        """Renames a file over another one, atomically."""
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        """Removes a file, an empty folder, or a link (never what it leads to)."""
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()

    def write_atomically(self, path: Path, text: str) -> None:
        """Writes a small file atomically. When this returns, its name is on the disk too."""
        part = path.with_name(path.name + ".part")
        self.write(part, [text.encode()])
        self.replace(part, path)
        self.sync_folder(path.parent)

    def clear(self, folder: Path, first: str) -> None:
        """Removes a folder. Its file `first` is removed first, because a folder without it counts as incomplete."""
        if folder.is_symlink() or not folder.is_dir():
            self.remove(folder)
            return
        if (folder / first).exists():
            self.remove(folder / first)
            self.sync_folder(folder)
        for path in sorted(folder.iterdir()):
            self.clear(path, first)
        self.remove(folder)


def damaged_files(folder: Path, sums: Mapping[str, int], names: Iterable[str]) -> list[str]:
    """Returns a text for each of the named files that differs from what was written."""
    damages = []
    for name in names:
        now = 0
        try:
            with open(folder / name, "rb") as file:
                # The system reads from the disk, and not from its cache.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while chunk := file.read(_CHUNK):
                    now = zlib.crc32(chunk, now)
        except OSError as error:
            damages.append(f"{name} cannot be read ({error.strerror})")
        else:
            if now != sums[name]:
                damages.append(
                    f"{name} is not as it was written (CRC-32 {now:08x} instead of {sums[name]:08x})"
                )
    return damages
