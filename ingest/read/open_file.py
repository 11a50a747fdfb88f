"""An open Parquet file whose page checksums are verified: `LocalFile`, `StoreFile`."""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.ingest.flow.place_rows import READ_BEYOND
from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.plain.footer_chunks import delta_texts
from sluice.ingest.read.page_table import PageTable, find_pages
from sluice.ingest.read.pages import InMemory, StoredColumns, StoredRows, read_chunks, stored_places
from sluice.ingest.read.remote_files import RemoteFile
from sluice.ingest.row_order import Read

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.11 does not name it
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
        self._plain_texts = delta_texts(self.metadata, dictionaries)
        self._open = functools.partial(
            pq.ParquetFile,
            metadata=self.metadata,
            read_dictionary=[name for name in dictionaries if name not in self._plain_texts],
            pre_buffer=False,  # handing work to Arrow's threads costs more
            page_checksum_verification=True,
        )
        self._parquet = self._open(opened)
        self.schema = self._parquet.schema_arrow
        self._columns: StoredColumns | None = None

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Decodes these columns of a row group."""
        table = self._parquet.read_row_group(group, columns=list(columns), use_threads=False)
        for name in self._plain_texts.intersection(table.column_names):
            at = table.column_names.index(name)
            table = table.set_column(at, name, table.column(at).dictionary_encode())
        return table

    def read_stored(
        self,
        group: int,
        columns: Sequence[str],
        buffers: Buffers,
        decoded: Container[str],
        piece: Read | None = None,
    ) -> StoredRows | None:
        """Reads those of these columns of a row group, or of a piece, that may stay stored. None: there are none. Those
        that must be `decoded` may not."""
        if self._columns is None:
            self._columns = StoredColumns(self.metadata, self.schema, self.size)
        read = functools.partial(self._read_chunks, buffers=buffers)
        return self._columns.fetch(group, [n for n in columns if n not in decoded], read, piece)

    @property
    def size(self) -> int:
        """The bytes of the file."""
        raise NotImplementedError

    def _read_chunks(self, chunks: npt.NDArray[np.int64], buffers: Buffers) -> InMemory:
        """Gets the bytes of chunks of columns."""
        raise NotImplementedError

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

    def _read_chunks(self, chunks: npt.NDArray[np.int64], buffers: Buffers) -> InMemory:
        return read_chunks(self.state, chunks, buffers)

    @property
    def size(self) -> int:
        return os.fstat(self.state).st_size

    def page_table(self, group: int, columns: Sequence[str]) -> PageTable:
        """Finds the pages of columns of a row group. KeyError for lists, columns of structs, and texts that are stored
        as differences; ValueError for pages that are not understood."""
        schema, rows = self.metadata.schema, self.metadata.row_group(group).num_rows
        numbered = enumerate(map(schema.column, range(self.metadata.num_columns)))
        flat = {
            leaf.path: number
            for number, leaf in numbered
            if leaf.name == leaf.path not in self._plain_texts and not leaf.max_repetition_level
        }
        places, pages = stored_places(self.metadata)[group].tolist(), {}
        for name in columns:
            if {name, name.partition(".")[0]}.isdisjoint(self.schema.names):
                continue  # an optional column that this file lacks
            begin, end = places[flat[name]]
            pages[name] = find_pages(self.state, begin, end, rows)
        return PageTable(rows, pages)

    def read_piece(self, piece: Read, columns: Sequence[str]) -> pa.Table:
        """Decodes the rows of a piece. Reads only the pages that have them."""
        # The needed pages, as if each column began with them. Only what is written takes memory.
        memory = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | _NO_RESERVE)
        file, decoded = self._open(pa.BufferReader(memory)), {}
        assert piece.pages is not None
        for name in filter(piece.pages.columns.__contains__, columns):
            pages = piece.pages.pages_of(name, piece.first, piece.rows)
            (begin, to), (at, end) = pages.places
            memory[begin:to] = os.pread(self.state, to - begin, begin)  # the dictionary
            memory[to : to + end - at] = os.pread(self.state, end - at, at)
            batches = []
            left = pages.skip + piece.rows
            try:
                for batch in file.iter_batches(left, [piece.group], [name], use_threads=False):
                    batches.append(batch)
                    left -= batch.num_rows
                    if not left:  # what follows are no pages
                        break
            except OSError as error:
                raise OSError(f"column {name!r}: {error}") from error
            decoded[name] = pa.Table.from_batches(batches).column(name).slice(pages.skip)
        return pa.table(decoded)

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

    @functools.cached_property
    def _places(self) -> npt.NDArray[np.int64]:
        return np.clip(stored_places(self.metadata), 0, self.state[0])

    @functools.cached_property
    def _names(self) -> list[list[str]]:
        """The names by which each leaf is read: `a.b.c` as `a`, as `a.b` or as itself."""
        schema = self.metadata.schema
        paths = [schema.column(leaf).path.split(".") for leaf in range(self.metadata.num_columns)]
        return [list(itertools.accumulate(path, "{}.{}".format)) for path in paths]

    def _ranges(self, group: int, columns: Sequence[str]) -> list[tuple[int, int]]:
        """Returns where the file has these columns of a row group. Arrow reads the rest of a damaged file itself, and
        refuses it."""
        wanted, chunks = set(columns), self._places[group].tolist()
        chunks = [
            chunk
            for chunk, names in zip(chunks, self._names, strict=True)
            if not wanted.isdisjoint(names)
        ]
        ranges: list[tuple[int, int]] = []
        for begin, end in sorted(chunks):
            if ranges and begin <= ranges[-1][1] + _MOST_GAP:
                ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
            elif begin < end:
                ranges.append((begin, end))
        return ranges

    def read_stored(
        self,
        group: int,
        columns: Sequence[str],
        buffers: Buffers,
        decoded: Container[str],
        piece: Read | None = None,
    ) -> StoredRows | None:
        if self._fetched != group:
            self.fetch_group(group, columns)
        return super().read_stored(group, columns, buffers, decoded, piece)

    @property
    def size(self) -> int:
        return int(self.state[0])

    def _read_chunks(self, chunks: npt.NDArray[np.int64], buffers: Buffers) -> InMemory:
        return self._file.fetched(chunks, READ_BEYOND)

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
