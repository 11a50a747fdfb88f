"""Reads the footers of Parquet files: `Footer`, `footers_of`, `HeldFooters`."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.common.stores import Place
from sluice.etl.schema import DataFile
from sluice.etl.spec.input_section import Input
from sluice.etl.spec.nested_columns import is_bytes, is_list, parts
from sluice.etl.table.table_columns import FileColumns, PartitionError, refuse_twice
from sluice.ingest.plain.file_types import SEVERAL
from sluice.ingest.plain.footer_chunks import chunks_of_group, group_rows
from sluice.ingest.plain.roles import ParquetError
from sluice.ingest.read.retry import without_frames

_HELD_BYTES = 4 * 2**20
"""Stored bytes of the footers that a loader holds. Arrow takes about eleven times as much memory for them."""
_DENSEST = 1024  # most ids a byte of a file; a larger figure comes from a damaged footer
_MOST_GROUP_ROWS = 2**31 - 1  # of a row group: Arrow counts its values in 32 bits
_ROWS_A_BYTE = (
    2**24
)  # most rows a byte of a file: a page of 2**31 equal values takes more than 100 bytes
_TAIL = 8  # bytes after a footer: its length, and `PAR1`


@dataclass(frozen=True, slots=True)
class Footer:
    """The parts of a file's footer that a loader needs."""

    file: DataFile
    """The file, with the digest of the footer's bytes."""
    types: Mapping[str, pa.DataType]
    """The type of each column. Parts of structs have dotted names (`sluice.etl.spec.nested_columns`)."""
    ids: Mapping[str, int]
    """For each column that may hold bags, an estimate of the number of its ids in the file."""
    columns: FileColumns
    """Where the file has the columns."""


class HeldFooters:
    """The footers of files by number, as many of local files as fit. Other footers are read again with their file.

    None is dropped for another one, and the footer of one row group is not held. Otherwise small objects of many ages
    would scatter the free memory, and a file would cost up to twice as much. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.held: dict[int, pq.FileMetaData] = {}
        self._bytes = 0
        """The stored bytes of the held footers that can be read again for little."""
        self._seen: dict[int, tuple[tuple[Any, ...], bytes]] = {}
        """For each file, its size, time (or a store's tag) and inode, and the digest of a local file's footer."""

    def hold(self, number: int, footer: pq.FileMetaData, *, is_local: bool) -> None:
        """Holds a footer if it is the first, if its file is in a store, or if it has several row groups and fits."""
        with self._lock:
            size = footer.serialized_size if is_local else 0
            fits = footer.num_row_groups > 1 and self._bytes + size <= _HELD_BYTES
            if number not in self.held and (fits or not size or not self.held):
                self.held[number] = footer
                self._bytes += size

    def is_unchanged(self, number: int, at: int | tuple[Any, ...]) -> bool:
        """Whether a file is the one that was first seen under this number. `at` is the descriptor of a local
        file, or the state of a store's file (`OpenFile.state`).

        Some mounts give a file another inode. Its footer must then be the same."""
        if isinstance(at, tuple):
            return self._seen.setdefault(number, (at, b""))[0] == at
        about = os.stat(at)
        state = about.st_size, about.st_mtime_ns, about.st_ino
        before = self._seen.get(number, (state, b""))[0]
        if number not in self._seen or (before[:2] == state[:2] and before != state):
            footer = _stored_footer(partial(os.pread, at), about.st_size)
            digest = hashlib.sha256(footer).digest()
            with self._lock:
                if self._seen.get(number, (state, digest))[1] == digest:
                    self._seen[number] = state, digest
        return self._seen[number][0] == state


def _stored_footer(read: Callable[[int, int], bytes], size: int) -> bytes:
    """Returns the stored footer with its length. `read` takes a length and an offset. For a file that is not Parquet,
    returns its last bytes."""
    before = max(0, size - _TAIL)
    tail = read(_TAIL, before)
    length = min(int.from_bytes(tail[:4], "little"), before)
    return read(length, before - length) + tail


def metadata_of(
    path: str, opened: Any, size: int, refuse: Callable[[str], Exception]
) -> tuple[pq.FileMetaData, pa.Schema, tuple[int, ...]]:
    """Reads the footer of a file of `size` bytes, its schema and the rows of its row groups. Raises what `refuse` makes
    of a message that names the file. Rows that the file cannot hold are refused before anything counts them off."""
    try:
        metadata = pq.read_metadata(opened)
        schema = metadata.schema.to_arrow_schema()
        rows = group_rows(metadata)
        str(schema)  # only this detects names that are not valid text
    except Exception as error:  # flipped bits can cause any kind of error
        if isinstance(error, OSError) and error.errno == errno.EIO:
            what = "cannot be read ({}); check its disk or mount, or copy the file again from another place"
        else:
            what = (
                f"its footer cannot be read ({type(error).__name__}: {{}}); the file is damaged, or it is not Parquet "
                "(`sluice etl` makes a table of other logs)"
            )
        raise refuse(f"{path}: {what.format(error)}") from without_frames(error)
    if min(rows, default=0) < 0 or sum(rows) != metadata.num_rows:
        raise refuse(
            f"{path}: its footer lists {metadata.num_rows} rows, but its {len(rows)} row groups have "
            f"{sum(rows)}; the file is damaged"
        )
    if sum(rows) > _ROWS_A_BYTE * size or max(rows, default=0) > _MOST_GROUP_ROWS:
        raise refuse(
            f"{path}: its footer lists {sum(rows)} rows, up to {max(rows)} in a row group. A file of {size} bytes "
            f"cannot hold so many, and a row group at most {_MOST_GROUP_ROWS}; the file is damaged, so write it again"
        )
    return metadata, schema, rows


def footers_of(located: Mapping[str, FileColumns], source: Input | None) -> list[Footer]:
    """Reads the footers of files here or in stores, several at a time. They have the names of the table's columns, or
    those of a spec's `source`. Raises ParquetError, and a PartitionError if a column of the source, or any without
    one, is in a file and in the name of its folder."""
    try:
        with ThreadPoolExecutor(16, "sluice-footers") as pool:
            return list(pool.map(_footer, located, located.values(), repeat(source)))
    except (ParquetError, PartitionError) as error:
        raise error.with_traceback(None) from error.__cause__  # without the frames of threads


def _footer(path: str, columns: FileColumns, source: Input | None) -> Footer:
    try:
        with Place.of(path).open() as file:
            size = file.size()
            if not size:
                raise ParquetError(f"{path}: this file is empty; write it anew, or leave it out")
            content = _stored_footer(file.read_at, size)
    except OSError as error:
        raise ParquetError(f"{path}: {error.strerror or error}") from error
    metadata, schema, rows = metadata_of(path, pa.BufferReader(content), size, ParquetError)
    there = list(parts(schema))
    own = [f.name for f in there]
    refuse_twice(path, [name for name in own if not source or name in source.columns], columns)
    if source and source.also:
        columns = FileColumns(columns.constants, _names(path, schema.names, source))
    ids = _ids(path, size, metadata, schema)
    constants = {name: value.type for name, value in columns.constants.items()}
    return Footer(
        DataFile(
            path=path,
            rows=metadata.num_rows,
            bytes=size,
            row_group_rows=rows,
            content=hashlib.sha256(content).hexdigest()[:32],
        ),
        {
            name: f.type if own.count(f.name) == 1 else SEVERAL
            for name, f in zip(columns.named(own), there, strict=True)
            if name
        }
        | constants,
        {name: n for name, n in zip(columns.named(ids), ids.values(), strict=True) if name}
        | dict.fromkeys(constants, 0),
        columns,
    )


def _names(path: str, stored: Sequence[str], source: Input) -> Mapping[str, str]:
    """Returns the name in a file of each column. A column may have one of several names of the source."""
    names = dict(zip(stored, stored, strict=True))
    for name in source.also:
        there = [other for other in source.names[name] if other in stored]
        if len(there) > 1:
            raise ParquetError(
                f"{path}: has {' and '.join(map(repr, there))}, which are names of one column (`also` in "
                "input.columns). A loader reads one of them in each file; `sluice etl` takes the first with a value"
            )
        for other in there:
            names[name] = names.pop(other)
    return names


def _ids(path: str, size: int, metadata: pq.FileMetaData, schema: pa.Schema) -> dict[str, int]:
    """Estimates the number of ids in each column of bags, from the first row group that has rows.

    For lists, it counts values, where an empty list counts as one. For binary columns, it uses the uncompressed bytes,
    which include page headers and hold repeated bags of a dictionary only once."""
    lists = {f.name for f in schema if is_list(f.type)}
    packed = {f.name for f in schema if is_bytes(f.type)}
    first = next(
        (n for n in range(metadata.num_row_groups) if metadata.row_group(n).num_rows), None
    )
    if first is None or not (lists or packed):
        return dict.fromkeys(lists | packed, 0)
    counts = {}
    try:
        share = metadata.num_rows / metadata.row_group(first).num_rows
        for leaf, chunk in enumerate(chunks_of_group(metadata, first)):
            name = metadata.schema.column(leaf).path.split(".")[0]
            if name in lists | packed:
                ids = chunk.values if name in lists else chunk.plain // 4 - chunk.values
                counts[name] = round(share * min(max(0, ids), size * _DENSEST))
    except Exception as error:
        raise ParquetError(
            f"{path}: its footer cannot be read ({type(error).__name__}: {error}); the file is "
            "damaged"
        ) from error
    return counts
