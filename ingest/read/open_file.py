"""An open Parquet file whose page checksums are verified: `LocalFile`, `StoreFile`."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.read.pages import StoredColumns, StoredRows, stored_places
from sluice.ingest.read.remote_files import RemoteFile

_MOST_GAP = 8192  # columns that lie closer together are fetched as one range


class OpenFile:
    """An open Parquet file. Only one thread may use it at a time."""

    state: Any
    """What `HeldFooters.is_unchanged` takes: it shows whether another file has taken the place of this one."""

    def __init__(
        self,
        opened: str | RemoteFile,
        metadata: pq.FileMetaData | None,
        dictionaries: Sequence[str],
    ):
        """Columns of texts in `dictionaries` are decoded as dictionaries."""
        self.metadata = pq.read_metadata(opened) if metadata is None else metadata
        groups = range(self.metadata.num_row_groups)
        leaves = [
            leaf
            for leaf in range(self.metadata.num_columns if dictionaries else 0)
            if self.metadata.schema.column(leaf).path in dictionaries
        ]
        chunks = (
            self.metadata.row_group(group).column(leaf) for group in groups for leaf in leaves
        )
        # Arrow does not decode texts as dictionaries that are stored as differences from the text before.
        self._differing = {
            chunk.path_in_schema for chunk in chunks if "DELTA_BYTE_ARRAY" in chunk.encodings
        }
        self._parquet = pq.ParquetFile(
            opened,
            metadata=self.metadata,
            read_dictionary=[name for name in dictionaries if name not in self._differing],
            pre_buffer=False,  # handing work to Arrow's threads costs more
            page_checksum_verification=True,
        )
        self.schema = self._parquet.schema_arrow

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Decodes these columns of a row group."""
        table = self._parquet.read_row_group(group, columns=list(columns), use_threads=False)
        for name in self._differing.intersection(table.column_names):
            at = table.column_names.index(name)
            table = table.set_column(at, name, table.column(at).dictionary_encode())
        return table

    def drop_fetched(self) -> None:
        """Frees what was fetched of a row group."""

    def close(self) -> None:
        self._parquet.close(force=True)


class LocalFile(OpenFile):
    """A file on this machine. Its state is its descriptor."""

    def __init__(self, path: str, metadata: pq.FileMetaData | None, dictionaries: Sequence[str]):
        self.state = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._release = weakref.finalize(self, os.close, self.state)
        try:  # opened by descriptor, because another file may replace it at the path
            super().__init__(f"/dev/fd/{self.state}", metadata, dictionaries)
        except BaseException:
            self._release()
            raise
        self._columns: StoredColumns | None = None

    def fetch(
        self, group: int, portions: Sequence[Sequence[str]], buffers: Buffers
    ) -> StoredRows | None:
        """Reads those columns of a row group that may stay stored. None: there are none."""
        if self._columns is None:
            size = os.fstat(self.state).st_size
            self._columns = StoredColumns(self.metadata, self.schema, size)
        return self._columns.fetch(self.state, group, portions, buffers)

    def close(self) -> None:
        super().close()
        self._release()


class StoreFile(OpenFile):
    """A file in a store. Its state is what the store had after the last row group was fetched. `close` closes the
    store's file too."""

    def __init__(
        self,
        opened: RemoteFile,
        metadata: pq.FileMetaData | None,
        dictionaries: Sequence[str],
    ):
        self._file = opened
        self._fetched: int | None = None
        """The row group that was fetched for the next `read`."""
        self._places: npt.NDArray[np.int64] | None = None
        self.state = opened.state
        super().__init__(opened, metadata, dictionaries)

    def fetch_group(
        self, group: int, columns: Sequence[str], reserve: Callable[[int], None] = lambda _: None
    ) -> None:
        """Gets the stored bytes of these columns of a row group. `reserve` is called with their number before."""
        ranges = self._ranges(group, columns)
        if ranges:
            reserve(sum(end - begin for begin, end in ranges))
        self._file.fetch(ranges)
        self._fetched, self.state = group, self._file.state

    def _ranges(self, group: int, columns: Sequence[str]) -> list[tuple[int, int]]:
        """Returns where the file has these columns of a row group. Arrow reads the rest of a damaged file itself, and
        refuses it."""
        if self._places is None:
            self._places = np.clip(stored_places(self.metadata), 0, self.state[0])
        wanted = set(columns)
        chunks = [
            chunk
            for leaf, chunk in enumerate(self._places[group].tolist())
            if not wanted.isdisjoint(  # `a.b.c` is read as `a`, as `a.b` or as itself
                itertools.accumulate(
                    self.metadata.schema.column(leaf).path.split("."), "{}.{}".format
                )
            )
        ]
        ranges: list[tuple[int, int]] = []
        for begin, end in sorted(chunks):
            if ranges and begin <= ranges[-1][1] + _MOST_GAP:
                ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
            elif begin < end:
                ranges.append((begin, end))
        return ranges

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Decodes these columns of a row group. Gets their bytes now if the row group was not fetched."""
        if self._fetched == group:
            return super().read(group, columns)
        self.fetch_group(group, columns)
        table = super().read(group, columns)
        self.drop_fetched()
        return table

    def drop_fetched(self) -> None:
        self._file.drop()
        self._fetched = None
