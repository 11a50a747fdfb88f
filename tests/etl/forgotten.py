"""Looks for a text in all that a folder holds: in names, in bytes, and in the decoded columns of Parquet."""

import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq


def files_with(folder: Path, text: str) -> list[str]:
    """Returns the files that hold a text that no digit follows, as they are or decoded."""
    pattern = re.compile(re.escape(text.encode()) + rb"(?![0-9])")
    return [
        str(path.relative_to(folder))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and any(map(pattern.search, _contents(path)))
    ]


def _contents(path: Path) -> Iterator[bytes]:
    yield from (path.name.encode(), path.read_bytes())
    if path.suffix == ".parquet":
        yield repr(pq.read_table(path, partitioning=None).to_pylist()).encode()
