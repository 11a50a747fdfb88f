"""Where decoded row groups come from: `RowGroupSource`, with Petastorm's Reader and a plain Arrow reader behind the
same interface.

Both take stored columns from a `RowGroupReader` and run in the pool that the pipeline makes. Between the two stands
Petastorm's own worker (`sluice.ingest.read.petastorm.source`), or nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.common.extras import install_command
from sluice.etl.schema import DataFile
from sluice.etl.spec.nested_columns import flattened, parts
from sluice.ingest.columns import ColumnError
from sluice.ingest.errors import LoadingError
from sluice.ingest.knobs import nearest
from sluice.ingest.memory.governor import Charge
from sluice.ingest.plain.made_columns import MadeColumns
from sluice.ingest.read.decoding import Decoding, decoding_of
from sluice.ingest.read.files import FileOpener
from sluice.ingest.read.footers import FooterError, metadata_of
from sluice.ingest.read.open_file import LocalFile, OpenFile, StoreFile
from sluice.ingest.read.packed_copy import PackedCopy, PackedRowGroups
from sluice.ingest.read.petastorm.options import PetastormOptions
from sluice.ingest.read.petastorm.source import PetastormSource
from sluice.ingest.read.retry import DeliveryError, without_frames
from sluice.ingest.row_order import Read, drawn_rows
from sluice.ingest.stages.pool import Pool
from sluice.ingest.stages.quarantine import PROGRAM_ERRORS, kinds_of
from sluice.ingest.stages.shuffle import Decoded, ReadTask
from sluice.ingest.stages.table_operators import OperatorColumns

_KEPT_OPEN = 32
_COPIES = (
    3  # of a row group: pandas' of what was read, what a function makes of it, and Arrow's of that
)
_MAKING = 24  # bytes a row while one column is made: its values in three forms of eight bytes
_PACKING = 3  # of a row group while its packed copy is made: Arrow's stream, its packed columns, and the copy


class Rescue(Protocol):
    """Finds what takes the place of rows that cannot be read, or raises."""

    def group(self, error: BaseException, read: Read, schema: pa.Schema) -> pa.Table:
        """The table that takes the place of a row group."""

    def rows_of_group(
        self, attempt: Callable[[int, int], pa.Table], read: Read, schema: pa.Schema
    ) -> pa.Table:
        """A row group in which something takes the place of those of its rows on which `attempt` fails."""


Work = Callable[[ReadTask, Charge], Decoded]
MakePool = Callable[[Iterator[ReadTask], Callable[[], Work]], "Pool[ReadTask, Any]"]
"""A function that makes the pool of readers; its work may go on with what it decoded."""


class SourceError(LoadingError):
    """A file that cannot be read: its message names the file and the row group."""


class RowGroupSource(Protocol):
    """Decodes the row groups of tasks, in their order."""

    name: str
    row_groups: tuple[tuple[int, ...], ...]
    """The rows that each row group gives, file by file: none, if it is not read at all."""
    chosen_rows: str
    """A hash of which rows a predicate leaves; empty without one."""

    def open(self, tasks: Iterator[ReadTask], make_pool: MakePool) -> Iterator[Any]:
        """Starts reading, and yields the pool's results. `make_pool` takes the tasks and a function that makes a
        worker's work."""


class RowGroupReader:
    """Reads row groups of some files. Safe to use from many threads; page checksums are verified."""

    def __init__(
        self,
        files: Sequence[DataFile],
        columns: Sequence[str],
        before_read: Callable[[Read], None] | None = None,
        opened: FileOpener | None = None,
        *,
        bags: Mapping[str, float] | None = None,
        given: pa.Schema | None = None,
        made: MadeColumns | OperatorColumns | None = None,
        sample: str | None = None,
        folders: Sequence[Mapping[str, int | str]] = (),
        packed: PackedCopy | None = None,
    ):
        """`before_read` imitates a store's latency; it runs in the worker that reads. `opened` opens files; it is
        closed with this. `bags` says how many ids a row of a column has. `given` is the schema of what Petastorm's
        worker makes of the stored columns, `made` makes the columns of a loader of these. By the column `sample`, which
        is read besides, rows are drawn. `folders` holds the columns that stand in the names of each file's folders. Row
        groups are kept in the `packed` copy, and read from it."""
        self.files = tuple(files)
        self._before = before_read
        self._sample = sample
        self._folders = folders
        self._made, self._selection = made, made.selection if made else None
        self._wanted = tuple(columns)
        self._deciding = self._selection.sources if self._selection else ()
        self._typed = made.typed if made else {}
        self._optional = made.optional if made else frozenset[str]()
        self.columns = tuple(
            dict.fromkeys([*columns, *self._deciding, *([sample] if sample else ())])
        )
        self._opened = opened or FileOpener()
        self.rescue: Rescue | None = None
        self._footers: dict[int, pq.FileMetaData] = {}
        self._seen: dict[
            int, tuple[int, int, int]
        ] = {}  # which file was there when its footer was found right
        self._idle: deque[tuple[int, OpenFile]] = deque()
        self._closed = False
        self._lock = threading.Lock()
        self._check_sizes()
        self.row_groups = self._row_groups()
        named = pa.table(
            {name: [value] for name, value in (folders[0] if folders else {}).items()}
        ).schema
        self._in_files = self._schema([name for name in self.columns if name not in named.names])
        self.stored = pa.schema([*self._in_files, *(f for f in named if f.name in self.columns)])
        """The schema of the columns that are read, as the first file has them."""
        self.given = given
        before = (
            pa.schema([self.stored.field(name) for name in self._wanted])
            if given is None
            else given
        )
        self.schema = made.schema(before) if made else before
        """The schema of what `read` returns."""
        texts = [
            f.name for f in self._in_files if pa.types.is_string(f.type)
        ]  # each value is then worked on once
        if given is not None:
            self._dictionaries = []
        elif made is None:
            self._dictionaries = texts
        else:
            self._dictionaries = [
                name
                for name in made.repeated(self._in_files, self._footer(0))
                if name not in self._optional
            ]
        self.packed = (
            None
            if packed is None
            else PackedRowGroups(
                packed,
                [self._opened.local(file.path) for file in self.files],
                self._in_files.names,
                self._dictionaries,
            )
        )
        copies = _COPIES if given is not None else int(sample is not None)
        self.decoding = self._decoding(
            bags or {}, copies=copies + (_PACKING if packed is not None else 0)
        )
        self.compare: Callable[[pa.Schema], str | None] = self._difference
        """Says how a file's schema differs from the first one's, so that it cannot be loaded with it; None: it can."""
        self.straight = not (made or sample or any(folders) or given is not None)
        """Whether rows may stay packed, as nobody looks at them before they are placed."""
        self._usual: pa.Schema | None = (
            None  # the schema of a row group whose columns were compared
        )

    def read(self, read: Read, decode: Callable[[Read], pa.Table] | None = None) -> pa.Table:
        """Reads a row group. `decode` makes a table of it in the place of `decoded`, which it may call."""
        if self._before is not None:
            self._before(read)
        try:
            try:
                table = self.decoded(read.file, read.group) if decode is None else decode(read)
            except SourceError:
                raise
            except Exception as error:  # of a user's transform or predicate, or of Petastorm
                raise SourceError(
                    f"{self.describe(read)}: {error or type(error).__name__}"
                ) from error
            if read.draw:
                rows = drawn_rows(self._weights(read.file, read.group, table), read.draw)
                table = table.select(self._wanted).take(pa.array(rows))
            return table if self._made is None else self._columns_of(self._made, table, read)
        except SourceError as error:
            if self.rescue is None or isinstance(error.__cause__, (DeliveryError, MemoryError)):
                raise
            return self.rescue.group(error, read, self.schema)

    def _columns_of(
        self, made: MadeColumns | OperatorColumns, table: pa.Table, read: Read
    ) -> pa.Table:
        """What is made of a row group's columns."""
        try:
            return made.table(table)
        except ColumnError as error:
            if self.rescue is not None and not PROGRAM_ERRORS.intersection(
                kinds_of(error.__cause__ or error)
            ):
                return self.rescue.rows_of_group(
                    lambda start, stop: made.table(table.slice(start, stop - start)),
                    read,
                    self.schema,
                )
            raise ColumnError(f"{self.describe(read)}: {error}") from error.__cause__

    def chances(self) -> tuple[tuple[float, ...], ...]:
        """The sum of the weights in each row group. The column of weights is read for it, once."""
        places = [
            (file, group)
            for file, counts in enumerate(self.row_groups)
            for group in range(len(counts))
        ]

        def summed(place: tuple[int, int]) -> float:
            weights = self._weights(*place, self.decoded(*place, columns=[str(self._sample)]))
            return (
                float(np.cumsum(weights)[-1]) if len(weights) else 0.0
            )  # the same sum on every machine

        with ThreadPoolExecutor(os.cpu_count() or 1, "sluice-weights") as threads:
            found = iter(list(threads.map(summed, places)))
        return tuple(tuple(next(found) for _ in counts) for counts in self.row_groups)

    def _weights(self, file: int, group: int, table: pa.Table) -> npt.NDArray[np.float64]:
        column = table.column(self._sample)
        if not _is_number(column.type):
            raise SourceError(
                f"{self._where(file, group)}: column {self._sample!r} holds {column.type}, and rows are "
                "sampled by numbers"
            )
        weights: npt.NDArray[np.float64] = column.to_numpy().astype(np.float64)
        if column.null_count or not ((weights >= 0) & (weights < np.inf)).all():
            raise SourceError(
                f"{self._where(file, group)}: column {self._sample!r} holds empty values, or weights "
                "that are not finite and 0 or more; rows cannot be sampled by it"
            )
        return weights

    def decoded(self, number: int, group: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The stored columns of a row group, or some of them. Where they may stay packed, they can only be placed."""
        where, file = self._where(number, group), None
        try:
            wanted = self.packed.wanted(number, group) if self.packed and columns is None else None
            table: Any = self.packed.read(wanted, self.straight) if self.packed and wanted else None
            if table is None:
                file = self._take(number)
                table = self._table(
                    file,
                    group,
                    self.decoding.portions or ((),)
                    if columns is None
                    else (tuple(dict.fromkeys([*columns, *self._deciding])),),
                )
                if self.packed and wanted:
                    self.packed.keep(wanted, file, table)
            for name, value in self._folders[number].items() if self._folders else ():
                if name in (self.columns if columns is None else columns):
                    table = table.append_column(
                        self.stored.field(name), pa.repeat(value, table.num_rows)
                    )
        except (
            Exception
        ) as error:  # a flipped bit may cause any error: invalid text, an endless length
            if file is not None:
                file.close()
            cause = without_frames(error) if isinstance(error, OSError) else error
            raise SourceError(f"{where}: {error or type(error).__name__}") from cause
        if file is not None:
            self._give_back(number, file)
        for name in (self._optional - set(table.schema.names)) & {
            *(columns or self.columns),
            *self._deciding,
        }:
            table = table.append_column(name, pa.nulls(table.num_rows, self._typed[name]))
        if columns is None and table.schema != self._usual:
            if wrong := self.compare(
                pa.schema(
                    [
                        self.stored.field(f.name) if f.name in self._typed else f
                        for f in table.schema
                    ]
                )
            ):  # each value of these is converted by itself
                raise SourceError(f"{where}: {wrong}")
            self._usual = table.schema
        if self._selection:
            try:
                table = table.filter(pa.array(self._selection.mask(table)))
            except ColumnError as error:
                raise SourceError(f"{where}: {error}") from error
        if table.num_rows != self.row_groups[number][group]:
            raise SourceError(
                f"{where}: {table.num_rows} rows where the table has {self.row_groups[number][group]}; "
                "the file was replaced"
            )
        return table

    def _table(self, file: OpenFile, group: int, portions: Sequence[Sequence[str]]) -> pa.Table:
        """Decodes a row group; one of large columns is not decoded all at once, because the reader also holds all that
        it reads together in its stored form until it is done."""
        tables = [flattened(file.read(group, some)) for some in portions]
        if len(tables) == 1:
            return tables[0]
        return pa.table({name: part.column(name) for part in tables for name in part.column_names})

    def _difference(self, schema: pa.Schema) -> str | None:
        """Files may hold numbers of other types, as long as they are numbers; and each has all columns."""
        for field in self._in_files:
            if wrong := _missing(field.name, schema.names):
                return wrong
            there = schema.field(field.name).type
            if there != field.type and _is_number(there) != _is_number(field.type):
                return f"column {field.name!r} holds {there}, in {self.files[0].path} it holds {field.type}"
        return None

    def stats(self) -> dict[str, int]:
        """Counts what stores did (reads, bytes, retries), and the packed copy."""
        return self._opened.stats() | (self.packed.stats() if self.packed else {})

    def interrupt(self) -> None:
        """Ends all waiting for stores. Nothing can be read from them any more."""
        self._opened.close()

    def close(self) -> None:
        """Closes the files that are kept open, and those that are read now, once they are."""
        with self._lock:
            idle = self._idle
            self._idle = deque()
            self._closed = True
        for _, file in idle:
            file.close()
        if self.packed:
            self.packed.close()
        self._opened.close()

    # Opening a file takes 0.1 ms, and 5 ms if it has a thousand columns: so files stay open, each for one reader at a
    # time.

    def _take(self, number: int) -> OpenFile:
        with self._lock:
            for at, (held, file) in enumerate(self._idle):
                if held == number:
                    del self._idle[at]
                    return file
        path, footer = self.files[number].path, self._footers.get(number)
        local = self._opened.local(path)
        opened = (
            StoreFile(self._opened.open(path), footer, self._dictionaries)
            if local is None
            else LocalFile(local, footer, self._dictionaries)
        )
        self._footers[number] = opened.metadata
        if isinstance(opened, LocalFile) and footer is not None:
            self._refuse_replaced(number, opened)
        return opened

    def _refuse_replaced(self, number: int, file: LocalFile) -> None:
        """Raises a SourceError if another file lies at the path than the one whose footer is known. Its rows may fit
        that footer by chance."""
        about = file.status()
        known = about.st_ino, about.st_mtime_ns, about.st_size
        if self._seen.get(number) != known and not file.is_as_described():
            file.close()
            raise SourceError(
                "another file has taken its place since its footer was read; write files under new "
                "names, and start again"
            )
        self._seen[number] = known

    def _give_back(self, number: int, file: OpenFile) -> None:
        try:
            file.rest()
        except Exception:  # its first row group is damaged: whoever reads that gets the error
            file.close()
            return
        with self._lock:
            self._idle.append((number, file))
            oldest = (
                self._idle.popleft()[1] if self._closed or len(self._idle) > _KEPT_OPEN else None
            )
        if oldest is not None:
            oldest.close()

    def describe(self, read: Read) -> str:
        return self._where(read.file, read.group) + (
            self._selection.which if self._selection else ""
        )

    def _where(self, file: int, group: int) -> str:
        return f"{self.files[file].path}, row group {group}"

    def _footer(self, file: int) -> pq.FileMetaData:
        if file not in self._footers:  # two threads may both read it: they get the same value
            self._footers[file] = _described(self.files[file].path, self._opened)[0]
        return self._footers[file]

    def _check_sizes(self) -> None:
        """Checks sizes, so that missing and truncated files are found before the first batch, at the price of a stat
        each."""
        for file in self.files:
            path = self._opened.local(file.path)
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
        """The rows of each row group: as the table says, or as the footer does if the table does not know."""
        unknown = [n for n, file in enumerate(self.files) if not file.row_group_rows]
        if unknown:
            with ThreadPoolExecutor(16, "sluice-footers") as pool:
                list(pool.map(self._footer, unknown))
        return tuple(file.row_group_rows or self._counts(n) for n, file in enumerate(self.files))

    def _counts(self, file: int) -> tuple[int, ...]:
        footer = self._footer(file)
        return tuple(footer.row_group(n).num_rows for n in range(footer.num_row_groups))

    def _schema(self, names: Sequence[str]) -> pa.Schema:
        """The schema of these columns, taken from the first file; of those that it may lack, as a spec has them."""
        if not self.files:
            raise SourceError("there are no files to read")
        there = list(parts(self._footer(0).schema.to_arrow_schema()))
        known = [part.name for part in there]
        for name in names:
            if (name in known or name not in self._optional) and (wrong := _missing(name, known)):
                raise SourceError(f"{self.files[0].path}: {wrong}")
        return pa.schema(
            [
                there[known.index(name)] if name in known else (name, self._typed[name])
                for name in names
            ]
        )

    def _decoding(self, bags: Mapping[str, float], copies: int) -> Decoding:
        """Computes the memory for decoding by the largest row group. Rows that take more of the disk in other files are
        assumed to take more memory. Of the result there are so many `copies` besides."""
        largest = max(
            (
                (rows, -n, -g)
                for n, counts in enumerate(self.row_groups)
                for g, rows in enumerate(counts)
            ),
            default=None,
        )
        if largest is None:
            return Decoding(0.0, 0, (self.columns,))
        number, group = -largest[1], -largest[2]
        footer = self._footer(number)
        stored = [file.bytes / file.rows for file in self.files if file.rows]
        own = self.files[number].bytes / max(1, self.files[number].rows)
        scale = max(1.0, max(stored, default=0.0) / own) if own else 1.0
        group = min(group, footer.num_row_groups - 1)
        try:
            alone = decoding_of(
                footer,
                group,
                self._in_files,
                bags,
                scale=scale,
                file_bytes=self.files[number].bytes or 2**62,
            )
            found = replace(alone, beside=alone.beside + copies * alone.decoded(largest[0]))
        except Exception as error:
            raise SourceError(
                f"{self.files[number].path}: its footer cannot be read ({type(error).__name__}: "
                f"{error}); the file is damaged"
            ) from error
        if self._made is None:
            return found
        share = footer.row_group(group).num_rows / max(
            1, largest[0]
        )  # of rows that are decoded to one that is taken
        made = self._made.row_bytes + _MAKING  # of all columns, and what making one takes besides
        return replace(
            found,
            row_bytes=share * (found.row_bytes + self._made.more_bytes),
            beside=round(found.beside + share * largest[0] * made),
        )


def first_schema(files: Sequence[DataFile], opened: FileOpener) -> pa.Schema:
    """All columns of the first file."""
    if not files:
        raise SourceError("there are no files to read")
    return _described(files[0].path, opened)[1]


def _described(path: str, opened: FileOpener) -> tuple[pq.FileMetaData, pa.Schema]:
    """The footer of a file, and the columns that it describes."""
    try:
        source = opened.open(path)
        try:
            return metadata_of(path, source)
        finally:
            if not isinstance(source, str):
                source.close()
    except FooterError as error:
        raise SourceError(str(error)) from error.__cause__
    except (OSError, pa.ArrowException) as error:
        raise SourceError(f"{path}: {error}") from error


def _missing(name: str, names: Sequence[str]) -> str | None:
    if name not in names:
        return f"no column {name!r}{nearest(name, names)}"
    several = names.count(name)
    return (
        f"{several} columns are called {name!r}; write the file with one of each name"
        if several > 1
        else None
    )


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


class ArrowSource:
    """Decodes with Arrow's own reader, nothing between."""

    name = "arrow"

    def __init__(self, groups: RowGroupReader):
        self._groups = groups
        self.row_groups = groups.row_groups
        self.chosen_rows = ""

    def open(self, tasks: Iterator[ReadTask], make_pool: MakePool) -> Iterator[Any]:
        def work(task: ReadTask, charge: Charge) -> Decoded:
            return Decoded(task, self._groups.read(task.read), charge)

        return make_pool(tasks, lambda: work)


READERS = ("petastorm", "arrow")
AUTO = "auto"
"""Petastorm where it is installed, else Arrow."""


_announced: set[str] = set()


def reader_of(name: str | None) -> str:
    """The reader that is asked for. Without a wish it is Petastorm, and Arrow where that is not installed, which is
    said once."""
    if name not in (None, AUTO):
        return str(name)
    if _is_installed("petastorm"):
        return "petastorm"
    if not _announced:
        _announced.add("arrow")
        print(
            "sluice: row groups are read by the plain Arrow reader, as petastorm is not installed; the rows and "
            "their order are the same",
            file=sys.stderr,
            flush=True,
        )
    return "arrow"


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def source_of(
    reader: str | None, groups: RowGroupReader, options: PetastormOptions = PetastormOptions()
) -> RowGroupSource:
    """The source that a user names, or (None, `auto`) the best that is installed."""
    reader = reader_of(reader)
    if reader not in READERS:
        raise SourceError(f"reader {reader!r} is none of {', '.join(READERS)}")
    if reader == "arrow":
        if options.asked_for:
            raise SourceError(
                f"{', '.join(options.asked_for)}: this is Petastorm's; take reader='petastorm'"
            )
        return ArrowSource(groups)
    try:
        return PetastormSource(groups, options)
    except ModuleNotFoundError as error:
        raise SourceError(
            f"reader {reader!r} needs {error.name}, which is not installed: "
            f"{install_command('petastorm')}, or take reader='arrow', which gives the same rows"
        ) from None
