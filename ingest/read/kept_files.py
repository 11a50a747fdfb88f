"""The files of a reader, of which some stay open between two reads: `KeptFiles`."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.etl.schema import DataFile
from sluice.etl.table.table_columns import OWN, FileColumns
from sluice.ingest.errors import SourceError
from sluice.ingest.plain.footer_chunks import group_rows
from sluice.ingest.read.files import FileOpener
from sluice.ingest.read.footers import HeldFooters, metadata_of
from sluice.ingest.read.open_file import LocalFile, OpenFile, StoreFile
from sluice.ingest.read.retry import DeliveryError

_MOST_OPEN_FILES = 32
_REPLACED = (
    "the file was replaced or changed since it was first read. Write changed files under new names, "
    "and start again"
)

Fetched = OpenFile | Exception | None
"""An open file of a store that has the bytes of a row group, or why they did not come. None: they were not fetched."""


class KeptFiles:
    """The files that a reader decodes row groups of. Many threads can use it."""

    dictionaries: Sequence[str] = ()
    """The columns that are read as dictionaries."""

    def __init__(
        self, files: Sequence[DataFile], located: Sequence[FileColumns], opener: FileOpener
    ):
        """Opens nothing yet, except footers that the table does not list. `located` says for each file where it has the
        columns of its table. Empty: files have just their own."""
        self.files = tuple(files)
        self.located = tuple(located) or (OWN,) * len(self.files)
        self._opener = opener
        self._footers = HeldFooters()
        self._idle: deque[tuple[int, OpenFile]] = deque()
        self._closed, self._lock = False, threading.Lock()
        self._check_sizes()
        self.row_groups = self._row_groups()

    def open(self, number: int) -> Any:
        """Opens a file, which does not stay open."""
        return self._opener.open(self.files[number].path)

    def close(self) -> None:
        """Closes the files that are kept open. Files in use are closed once they are read."""
        with self._lock:
            idle = self._idle
            self._idle = deque()
            self._closed = True
        for _, file in idle:
            file.close()

    @contextmanager
    def opened(self, number: int, fetched: Fetched) -> Iterator[OpenFile]:
        """Opens a file to read from it, or takes the one that has `fetched` a row group. Raises SourceError afterwards
        if another file has taken its place.

        Files stay open, because opening one takes 0.1 ms, or 5 ms with a thousand columns. One reader at a time uses
        it."""
        if isinstance(fetched, Exception):
            raise fetched
        file = fetched or self.take(number)
        try:
            yield file
        except Exception as error:
            # A changed file explains any error, unless its store does not answer.
            changed = not isinstance(error, DeliveryError) and not self._is_unchanged(number, file)
            file.close()
            if changed:
                raise SourceError(_REPLACED) from error
            raise
        if not self._is_unchanged(number, file):
            file.close()
            raise SourceError(_REPLACED)
        file.drop_fetched()
        with self._lock:
            # A file of one row group comes again only in the next epoch, so it leaves first.
            several = len(self.row_groups[number]) > 1
            (self._idle.append if several else self._idle.appendleft)((number, file))
            is_surplus = self._closed or len(self._idle) > _MOST_OPEN_FILES
            first = self._idle.popleft()[1] if is_surplus else None
        if first is not None:
            first.close()

    def _is_unchanged(self, number: int, file: OpenFile) -> bool:
        """Whether a file is the one that was first seen."""
        return self._footers.is_unchanged(number, file.state)

    def take(self, number: int) -> OpenFile:
        """Returns an open file for one reader: one that is kept open, or a new one. Raises SourceError if another file
        has taken its place."""
        with self._lock:
            for index, (idle_number, file) in enumerate(self._idle):
                if idle_number == number:
                    del self._idle[index]
                    return file
        path = self.files[number].path
        footer = self._footers.held.get(number)
        dictionaries = self.located[number].stored(self.dictionaries)
        local = self._opener.local(path)
        if local is None:
            remote = self._opener.open_remote(path)
            opened: OpenFile = StoreFile(remote, footer, dictionaries)
        else:
            opened = LocalFile(local, footer, dictionaries)
        if not self._is_unchanged(number, opened):
            opened.close()
            raise SourceError(_REPLACED)
        self._footers.hold(number, opened.metadata, is_local=local is not None)
        return opened

    def where(self, file: int, group: int) -> str:
        """Names a row group, for messages."""
        return f"{self.files[file].path}, row group {group}"

    def footer(self, file: int) -> pq.FileMetaData:
        """Returns the footer of a file. Reads it if it is not held. Raises SourceError for a file that cannot be
        read."""
        footer = self._footers.held.get(file)
        if footer is not None:
            return footer
        path = self.files[file].path
        try:
            source = self.open(file)
            is_local = isinstance(source, str)
            with open(source, "rb", buffering=0) if is_local else source as opened:
                state = opened.fileno() if is_local else source.state
                at = f"/dev/fd/{state}" if is_local else opened
                size = self.files[file].bytes or opened.seek(0, os.SEEK_END)
                footer = metadata_of(path, at, size, SourceError)[0]
                if not self._footers.is_unchanged(file, state):
                    raise SourceError(f"{path}: {_REPLACED}")
        except (OSError, pa.ArrowException) as error:
            raise SourceError(f"{path}: {error}") from error
        self._footers.hold(file, footer, is_local=is_local)  # two threads may both have read it
        return footer

    def footers(self, files: Iterable[int]) -> list[pq.FileMetaData]:
        """Returns the footers of several files, of which some are read at the same time."""
        with ThreadPoolExecutor(16, "sluice-footers") as pool:
            return list(pool.map(self.footer, files))

    def _check_sizes(self) -> None:
        """Raises SourceError if a local file is missing or has another size, before the first batch."""
        for file in self.files:
            path = self._opener.local(file.path)
            if path is None:
                continue
            try:
                size = os.path.getsize(path)
            except OSError as error:
                raise SourceError(
                    f"{file.path}: {error.strerror}; the table lists this file"
                ) from error
            if file.bytes and size != file.bytes:
                raise SourceError(
                    f"{file.path}: {size} bytes where the table has {file.bytes}; the file was truncated "
                    "or replaced"
                )

    def _row_groups(self) -> tuple[tuple[int, ...], ...]:
        """Returns the number of rows of each row group, from the table if it lists them, otherwise from the footers."""
        unknown = [n for n, file in enumerate(self.files) if not file.row_group_rows]
        read = dict(zip(unknown, map(group_rows, self.footers(unknown)), strict=True))
        return tuple(file.row_group_rows or read[n] for n, file in enumerate(self.files))


def first_schema(
    files: Sequence[DataFile], opened: FileOpener, located: Sequence[FileColumns]
) -> pa.Schema:
    """Returns the schema of all columns of the first file."""
    if not files:
        raise SourceError("there are no files to read")
    footer = KeptFiles(files[:1], located[:1], opened).footer(0)
    stored = footer.schema.to_arrow_schema()
    return located[0].schema(stored) if located else stored
