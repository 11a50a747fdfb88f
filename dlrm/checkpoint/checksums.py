"""Computes checksums of a checkpoint's files while they are written, and compares them when the files are read."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_CHUNK = 8 * 2**20


class ChecksummedParts:
    """Yields the bytes of a file to its writer. `value` is the CRC-32 of the bytes so far."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self._parts = parts
        self.value = 0

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts:
            self.value = zlib.crc32(part, self.value)
            yield part


def damaged_files(folder: Path, sums: Mapping[str, int], names: Iterable[str]) -> list[str]:
    """Returns a text for each of the named files that differs from what was written."""
    found = []
    for name in names:
        now = 0
        try:
            with open(folder / name, "rb") as file:
                # The system reads from the disk, and not from its cache.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while chunk := file.read(_CHUNK):
                    now = zlib.crc32(chunk, now)
        except OSError as error:
            found.append(f"{name} cannot be read ({error.strerror})")
        else:
            if now != sums[name]:
                found.append(
                    f"{name} is not as it was written (CRC-32 {now:08x} instead of {sums[name]:08x})"
                )
    return found
