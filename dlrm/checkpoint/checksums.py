"""Compares a checkpoint's files with their checksums."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

_CHUNK = 8 * 2**20


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
