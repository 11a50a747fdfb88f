"""Checksums of a checkpoint's files: taken while they are written, and compared whenever they are read again."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_CHUNK = 8 * 2**20


class Summed:
    """Bytes on their way to a file. `value` is the CRC-32 of those that went by."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self._parts, self.value = parts, 0

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts:
            self.value = zlib.crc32(part, self.value)
            yield part


def damaged(folder: Path, sums: Mapping[str, int], names: Iterable[str]) -> list[str]:
    """Says what is wrong with each of the named files that is not as it was written."""
    found = []
    for name in names:
        try:
            now = _sum(folder / name)
        except OSError as error:
            found.append(f"{name} cannot be read ({error.strerror})")
        else:
            if now != sums[name]:
                found.append(
                    f"{name} is not as it was written (CRC-32 {now:08x} instead of {sums[name]:08x})"
                )
    return found


def _sum(path: Path) -> int:
    """The checksum of what the disk holds, as far as the system lets go of what it has in memory."""
    value = 0
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value
