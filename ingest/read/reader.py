"""Where decoded row groups come from: `RowGroupSource`, with Petastorm's Reader and a plain Arrow reader behind the
same interface.

Both decode with `RowGroupReader` and run in the pool that the pipeline makes; they differ in who drives it.
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

import pyarrow as pa
import pyarrow.parquet as pq

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
from sluice.ingest.read.retry import DeliveryError
from sluice.ingest.row_order import Read
from sluice.ingest.stages.pool import Pool
from sluice.ingest.stages.shuffle import Decoded, ReadTask

_KEPT_OPEN = 32

Rescue = Callable[[Exception, Read, pa.Schema], pa.Table]
"""A function that returns what takes the place of a row group that cannot be read, or raises."""
Work = Callable[[ReadTask, Charge], Decoded]
MakePool = Callable[[Iterator[ReadTask], Callable[[], Work]], "Pool[ReadTask, Any]"]
"""A function that makes the pool of readers; its work may go on with what it decoded."""


class SourceError(LoadingError):
    """A file that cannot be read: its message names the file and the row group."""


class RowGroupSource(Protocol):
    """Decodes the row groups of tasks, in their order."""

    def open(self, tasks: Iterator[ReadTask], make_pool: MakePool) -> Iterator[Any]:
        """Starts reading, and yields the pool's results. `make_pool` takes the tasks and a function that makes a
        worker's work."""


class RowGroupReader:
    """Reads row groups of some files. Safe to use from many threads; page checksums are verified."""

    def __init__(self, files: Sequence[DataFile], columns: Sequence[str],
                 before_read: Callable[[Read], None] | None = None, opened: FileOpener | None = None, *,
                 bags: Mapping[str, float] | None = None, made: MadeColumns | None = None):
        """`before_read` imitates a store's latency; it runs in the worker that reads. `opened` opens files; it is
        closed with this. `bags` says how many ids a row of a column has. `made` makes the columns of others, which are
        stored."""
        self._made = made.of(columns) if made else None
        self.files, self._before = tuple(files), before_read
        self.columns = self._made.sources if self._made else tuple(columns)
        self._opened = opened or FileOpener()
        self.rescue: Rescue | None = None
        self._footers: dict[int, pq.FileMetaData] = {}
        self._idle: deque[tuple[int, pq.ParquetFile]] = deque()
        self._lock = threading.Lock()
        self._check_sizes()
        self.row_groups = self._row_groups()
        self._stored = self._schema()
        self.schema = self._made.schema(self._stored) if self._made else self._stored
        """The schema of what `read` returns."""
        texts = [f.name for f in self._stored if pa.types.is_string(f.type)]  # each value is then worked on once
        self._dictionaries = self._made.repeated(self._stored, self._footer(0)) if self._made else texts
        self.decoding = self._decoding(bags or {})
        self._usual: pa.Schema | None = None  # the schema of a row group whose columns were checked

    def read(self, read: Read) -> pa.Table:
        if self._before is not None:
            self._before(read)
        try:
            return self._read(read)
        except SourceError as error:
            if self.rescue is None or isinstance(error.__cause__, (DeliveryError, MemoryError)):
                raise
            return self.rescue(error, read, self.schema)

    def _read(self, read: Read) -> pa.Table:
        file = None
        try:
            file = self._take(read.file)
            table = self._decoded(file, read.group)
        except Exception as error:  # a flipped bit may cause any error: invalid text, an endless length
            if file is not None:
                file.close(force=True)
            raise SourceError(f"{self.describe(read)}: {error or type(error).__name__}") from error
        self._give_back(read.file, file)
        if table.schema != self._usual:
            self._check_columns(read, table.schema)
        if self._made:
            try:
                table = self._made.table(table)
            except ColumnError as error:
                raise ColumnError(f"{self.describe(read)}: {error}") from error.__cause__
        if table.num_rows != read.rows:
            raise SourceError(f"{self.describe(read)}: {table.num_rows} rows where the table has {read.rows}; "
                              "the file was replaced")
        return table

    def _decoded(self, file: pq.ParquetFile, group: int) -> pa.Table:
        """Decodes a row group; one of large columns is not decoded all at once, because the reader also holds all that
        it reads together in its stored form until it is done."""
        read = [file.read_row_group(group, columns=list(some), use_threads=False) for some in self.decoding.portions]
        if self._made:
            read = [flattened(part) for part in read]
        if len(read) == 1:
            return read[0]
        return pa.table({name: part.column(name) for part in read for name in part.column_names})

    def _check_columns(self, read: Read, schema: pa.Schema) -> None:
        """Checks a file's columns: they may hold numbers of other types, as long as they are numbers; and each file has
        all columns."""
        for field in self._stored:
            _check_there(self.describe(read), field.name, schema.names)
            there = schema.field(field.name).type
            if there != field.type and _is_number(there) != _is_number(field.type):
                raise SourceError(f"{self.describe(read)}: column {field.name!r} holds {there}, in "
                                  f"{self.files[0].path} it holds {field.type}")
        self._usual = schema

    def stats(self) -> dict[str, int]:
        """Counts what stores did: reads, bytes, retries."""
        return self._opened.stats()

    def interrupt(self) -> None:
        """Ends all waiting for stores. Nothing can be read from them any more."""
        self._opened.close()

    def close(self) -> None:
        """Closes the files that are kept open."""
        with self._lock:
            idle, self._idle = self._idle, deque()
        for _, file in idle:
            file.close(force=True)
        self._opened.close()

    # Opening a file takes 0.1 ms, and 5 ms if it has a thousand columns: so files stay open, each for one reader at a
    # time.

    def _take(self, number: int) -> pq.ParquetFile:
        with self._lock:
            for at, (held, file) in enumerate(self._idle):
                if held == number:
                    del self._idle[at]
                    return file
        opened = self._opened.open(self.files[number].path)
        # Ranges are fetched ahead from a store; for local files the hand-over to Arrow's own threads costs more.
        file = pq.ParquetFile(opened, metadata=self._footers.get(number), pre_buffer=not isinstance(opened, str),
                              read_dictionary=self._dictionaries, page_checksum_verification=True)
        self._footers[number] = file.metadata
        return file

    def _give_back(self, number: int, file: pq.ParquetFile) -> None:
        if self._opened.local(self.files[number].path) is None:  # it keeps what it fetched until the next request
            try:
                file.read_row_group(0, columns=[], use_threads=False)
            except Exception:  # that row group is damaged: whoever reads it gets the error
                file.close(force=True)
                return
        with self._lock:
            self._idle.append((number, file))
            oldest = self._idle.popleft()[1] if len(self._idle) > _KEPT_OPEN else None
        if oldest is not None:
            oldest.close(force=True)

    def describe(self, read: Read) -> str:
        return f"{self.files[read.file].path}, row group {read.group}{self._made.which if self._made else ''}"

    def _footer(self, file: int) -> pq.FileMetaData:
        if file not in self._footers:  # two threads may both read it: they get the same value
            path = self.files[file].path
            try:
                opened = self._opened.open(path)
                try:
                    self._footers[file] = metadata_of(path, opened)[0]
                finally:
                    if not isinstance(opened, str):
                        opened.close()
            except FooterError as error:
                raise SourceError(str(error)) from error.__cause__
            except (OSError, pa.ArrowException) as error:
                raise SourceError(f"{path}: {error}") from error
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
                raise SourceError(f"{file.path}: {error.strerror}; the table lists this file") from error
            if file.bytes and size != file.bytes:
                raise SourceError(f"{file.path}: {size} bytes where the table has {file.bytes}; the file was truncated "
                                  "or replaced")

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

    def _schema(self) -> pa.Schema:
        """The schema of the columns that are read, taken from the first file."""
        if not self.files:
            raise SourceError("there are no files to read")
        there = list(parts(self._footer(0).schema.to_arrow_schema()))
        names = [part.name for part in there]
        for name in self.columns:
            _check_there(self.files[0].path, name, names)
        return pa.schema([there[names.index(name)] for name in self.columns])

    def _decoding(self, bags: Mapping[str, float]) -> Decoding:
        """Computes the memory for decoding by the largest row group. Rows that take more of the disk in other files are
        assumed to take more memory."""
        largest = max(((rows, -n, -g) for n, counts in enumerate(self.row_groups) for g, rows in enumerate(counts)),
                      default=None)
        if largest is None:
            return Decoding(0.0, 0, (self.columns,))
        number, group = -largest[1], -largest[2]
        footer = self._footer(number)
        stored = [file.bytes / file.rows for file in self.files if file.rows]
        own = self.files[number].bytes / max(1, self.files[number].rows)
        scale = max(1.0, max(stored, default=0.0) / own) if own else 1.0
        group = min(group, footer.num_row_groups - 1)
        try:
            found = decoding_of(footer, group, self._stored, bags, scale=scale,
                                file_bytes=self.files[number].bytes or 2**62)
        except Exception as error:
            raise SourceError(f"{self.files[number].path}: its footer cannot be read ({type(error).__name__}: "
                              f"{error}); the file is damaged") from error
        if self._made is None:
            return found
        share = footer.row_group(group).num_rows / max(1, largest[0])  # of rows that are decoded to one that is taken
        return replace(found, row_bytes=share * (found.row_bytes + self._made.more_bytes))


def _check_there(where: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise SourceError(f"{where}: no column {name!r}{nearest(name, names)}")
    if names.count(name) > 1:
        raise SourceError(f"{where}: {names.count(name)} columns are called {name!r}; write the file with "
                          "one of each name")


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


class ArrowSource:
    """Decodes with Arrow's own reader, nothing between."""

    def __init__(self, groups: RowGroupReader):
        self._groups = groups

    def open(self, tasks: Iterator[ReadTask], make_pool: MakePool) -> Iterator[Any]:
        def work(task: ReadTask, charge: Charge) -> Decoded:
            return Decoded(task, self._groups.read(task.read), charge)

        return make_pool(tasks, lambda: work)


class PetastormSource:
    """Decodes with Petastorm's Reader with our pool, worker and ventilator: it opens the dataset, holds the row groups
    and hands out what they decode to; the order is the plan's."""

    def __init__(self, groups: RowGroupReader):
        from sluice.ingest.read import petastorm_compat

        petastorm_compat.install()
        self._groups = groups

    def open(self, tasks: Iterator[ReadTask], make_pool: MakePool) -> Iterator[Any]:
        from petastorm.reader import Reader
        from petastorm.workers_pool.ventilator import Ventilator
        from petastorm.workers_pool.worker_base import WorkerBase

        firsts = [0]
        for counts in self._groups.row_groups:
            firsts.append(firsts[-1] + len(counts))

        class RowGroupWorker(WorkerBase):  # type: ignore[misc]
            """Decodes one row group. The Reader passes its arguments: its file system (our row groups) and its
            pieces."""

            def process(self, task: ReadTask) -> None:
                groups, _path, _schema, _ngram, pieces, *_ = self.args
                piece = pieces[firsts[task.read.file] + task.read.group]
                assert (piece.path, piece.row_group) == (groups.files[task.read.file].path, task.read.group)
                self.publish_func(groups.read(task.read))

            @staticmethod
            def new_results_queue_reader() -> Any:
                return _Results()

        class PlanVentilator(Ventilator):  # type: ignore[misc]
            """Hands out the plan's tasks when a worker asks, so it needs no thread and no queue of its own."""

            def start(self) -> None:
                pass

            def __iter__(self) -> Iterator[ReadTask]:
                return tasks

            def processed_item(self) -> None:
                pass

            def completed(self) -> bool:
                return False  # the pool sees the end of the tasks

            def stop(self) -> None:
                pass

        class PlanReader(Reader):  # type: ignore[misc]
            def _create_ventilator(self, *_arguments: Any) -> PlanVentilator:
                return PlanVentilator(None)

        return PlanReader(self._groups, [f.path for f in self._groups.files], reader_pool=_PoolOfReader(make_pool),
                          worker_class=RowGroupWorker, is_batched_reader=True)


READERS: dict[str, Callable[[RowGroupReader], RowGroupSource]] = {"petastorm": PetastormSource, "arrow": ArrowSource}
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
        print("sluice: row groups are read by the plain Arrow reader, as petastorm is not installed; the rows and "
              "their order are the same", file=sys.stderr, flush=True)
    return "arrow"


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def source_of(reader: str | None, groups: RowGroupReader) -> RowGroupSource:
    """The source that a user names, or (None, `auto`) the best that is installed."""
    reader = reader_of(reader)
    if reader not in READERS:
        raise SourceError(f"reader {reader!r} is none of {', '.join(READERS)}")
    try:
        return READERS[reader](groups)
    except ModuleNotFoundError as error:
        raise SourceError(f"reader {reader!r} needs {error.name}, which is not installed: "
                          "pip install \"sluice[petastorm]\", or take reader='arrow', which gives the same rows"
                          ) from None


class _Results:
    """Reads results for Petastorm's Reader from a pool: unchanged."""

    batched_output = True

    def read_next(self, pool: _PoolOfReader, _schema: Any, _ngram: Any) -> Any:
        return pool.get_results()


class _PoolOfReader:
    """Our pool, behind the protocol of workers' pools that Petastorm's Reader expects."""

    workers_count = 1  # the Reader sizes its own ventilator by it, which is not used here

    def __init__(self, make_pool: MakePool):
        self._make_pool = make_pool
        self._pool: Pool[ReadTask, Any] | None = None
        self._ids = iter(range(2**62))
        self._lock = threading.Lock()

    def start(self, worker_class: Any, worker_args: Any = None, ventilator: Any = None) -> None:
        def make_work() -> Work:
            published: list[pa.Table] = []
            with self._lock:
                worker = worker_class(next(self._ids), published.append, worker_args)

            def work(task: ReadTask, charge: Charge) -> Decoded:
                worker.process(task)
                return Decoded(task, published.pop(), charge)

            return work

        ventilator.start()
        self._pool = self._make_pool(iter(ventilator), make_work)

    def get_results(self) -> Any:
        assert self._pool is not None
        return next(self._pool)

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def join(self) -> None:
        if self._pool is not None:
            self._pool.join(5.0)

    @property
    def diagnostics(self) -> dict[str, Any]:
        return {} if self._pool is None else self._pool.stats().__dict__
