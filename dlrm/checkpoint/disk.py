"""The few operations by which a checkpoint comes onto a disk: in one place, so that a test can break each of them off.

What has to outlast a crash of the machine is written in this order: files, the folder that holds them, the folder's own
entry, and then alone the pointer to it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_NO_SUCH_THING = (errno.EINVAL, errno.ENOTSUP)


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


class CheckpointDisk:
    """These operations on a real file system."""

    def make(self, folder: Path) -> None:
        """Makes a folder; one that is there already stays as it is."""
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, parts: Iterable[Any]) -> None:
        """Writes a file of these bytes, one after the other. When this returns, the bytes are on the disk, but perhaps
        not the file's name. A link that waits under that name is an OSError."""
        with open(path, "wb", opener=_no_link) as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())

    def settle(self, folder: Path) -> None:
        """When this returns, the names in a folder are on the disk. Some network file systems refuse this call for
        folders; there it is left to them."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_SUCH_THING:
                raise
        finally:
            os.close(descriptor)

    def replace(self, old: Path, new: Path) -> None:
        """Gives one file the name of another, wholly or not at all."""
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        """Removes a file, an empty folder, or a link (never what it leads to)."""
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()

    def write_whole(self, path: Path, text: str) -> None:
        """Writes a small file wholly or not at all; its name is then on the disk, too."""
        part = path.with_name(path.name + ".part")
        self.write(part, [text.encode()])
        self.replace(part, path)
        self.settle(path.parent)

    def clear(self, folder: Path, first: str) -> None:
        """Removes a folder. Its file `first` goes before all others: without it the folder counts for nothing."""
        if folder.is_symlink() or not folder.is_dir():
            self.remove(folder)
            return
        if (folder / first).exists():
            self.remove(folder / first)
            self.settle(folder)
        for path in sorted(folder.iterdir()):
            self.clear(path, first)
        self.remove(folder)
