"""Checksums of a checkpoint's files: written beside them, and compared before they are read again."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

_CHUNK = 8 * 2**20


def sums_of(folder: Path) -> dict[str, int]:
    """File → CRC-32 of its bytes."""
    return {path.name: _sum(path) for path in sorted(folder.iterdir())}


def damaged(folder: Path, sums: Mapping[str, int], names: Iterable[str]) -> list[str]:
    """What is wrong with those of the files that are not as they were written."""
    found = []
    for name in names:
        try:
            now = _sum(folder / name)
        except OSError as error:
            found.append(f"{name} cannot be read ({error.strerror})")
        else:
            if now != sums[name]:
                found.append(f"{name} is not as it was written (CRC-32 {now:08x} instead of {sums[name]:08x})")
    return found


def _sum(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value
