"""Decodes row groups: `RowGroupReader`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sluice.etl.schema import DataFile
from sluice.etl.spec.nested_columns import flattened, parts
from sluice.etl.table.table_columns import FileColumns
from sluice.ingest.cache.identity import Uncacheable
from sluice.ingest.choices import Errors
from sluice.ingest.columns import ColumnError
from sluice.ingest.errors import SourceError
from sluice.ingest.flow.decoded import LOST, DamagedPage, Decoded, ReadTask, hold
from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.memory.governor import Charge
from sluice.ingest.plain.file_types import difference, why_missing
from sluice.ingest.plain.footer_chunks import (
    check_file,
)
from sluice.ingest.plain.made_columns import MadeColumns
from sluice.ingest.read.decoding import Decoding, StoredMemory, decoding_of_pieces
from sluice.ingest.read.files import FileOpener
from sluice.ingest.read.kept_files import Fetched, KeptFiles
from sluice.ingest.read.open_file import LocalFile, StoreFile
from sluice.ingest.read.page_table import PIECE_ROWS, PageTable
from sluice.ingest.read.pages import StoredRows
from sluice.ingest.read.retry import DeliveryError, without_frames
from sluice.ingest.read.user_history import (
    GroupRange,
    HistoryError,
    SplitEvents,
    UserHistories,
    in_order,
)
from sluice.ingest.row_order import HUGE_ROWS, Read
from sluice.ingest.stages.quarantine import Quarantine
from sluice.ingest.stages.transform import (
    Transform,
    frame_of,
    given_by,
    needed_before,
    reads_of,
    schema_with,
)

if TYPE_CHECKING:
    from sluice.ingest.cache.made_rows import MadeCache
    from sluice.ingest.stages.taken_rows import TakenRows

_FRAME_COPIES = 3
"""Copies of a row group for a function over frames: as pandas, as the function returns it, and as Arrow again."""
_MAKE_ROW_BYTES = 24
"""Bytes of a row while one column is made: three forms of eight bytes each."""
_LARGE_BYTES = 64 * 2**20
"""A row group of more bytes is decoded in pieces if that is cheap."""
_MOST_AGAIN = 0.25
"""Pieces may read so much of a row group a second time: dictionaries, and pages in which a piece begins."""
_LEAST_PIECES = 8
"""A first batch needs rows from eight places. So with fewer pieces, it needs nearly all of them."""
_IDLE_BYTES = 32 * 2**20
"""Memory that is kept for the stored bytes of the next row groups."""


class RowGroupReader:
    """Reads row groups of a list of files. Many threads can use it. Page checksums are verified."""

    name = "arrow"
    chosen_rows = ""
    """A hash of the rows that a predicate keeps."""
    cache: MadeCache | None = None
    """What keeps the results of the first functions."""
    rescue = Quarantine(Errors())
    """What replaces rows that cannot be read, if they may be lost."""
    largest_read = 0
    """The most rows of a read and its pages, if large row groups are cut. 0: they are read whole."""
    _most_whole = _most_cut = 0
    """The most rows of a row group that is not cut, and of a piece."""

    def __init__(
        self,
        files: Sequence[DataFile],
        columns: Sequence[str],
        opened: FileOpener | None = None,
        *,
        bags: Mapping[str, float] | None = None,
        is_filtered: bool = False,
        filters: Sequence[str] = (),
        made: MadeColumns | None = None,
        located: Sequence[FileColumns] = (),
        in_pages: bool = False,
        history: UserHistories | None = None,
        functions: Sequence[Transform] = (),
    ):
        """Opens nothing yet, except footers that the table does not list.

        - `close` also closes `opened`.
        - `bags` has the average number of ids a row for each column of bags.
        - `is_filtered`: Petastorm's worker may leave out rows, by a predicate on `filters`, or change them.
        - `made` makes the loader's columns.
        - `located` says for each file where it has the columns of its table. Empty: files have just their own.
        - `in_pages` lets columns stay stored in rows that `read` returns, if nothing reads their values here.
        - `history` adds the histories of users.
        - `finish` takes rows after the `functions` over rows."""
        self._made = made
        plain = made or MadeColumns(())
        self._selection = plain.selection
        self._history = history
        self.result_columns = tuple(columns)
        self.functions = self.early = tuple(functions)
        self.needed = list(needed_before(self.result_columns, self.functions))
        """The stored columns of which the result is made."""
        self._selection_columns = self._selection.sources if self._selection else ()
        self._spec_types = plain.typed
        self._optional = plain.optional
        others = self._history.sources if self._history else ()
        self.columns = tuple(
            dict.fromkeys([*self.needed, *self._selection_columns, *filters, *others])
        )
        self._opener = opened or FileOpener()
        self._buffers = Buffers()
        self._kept = kept = KeptFiles(files, located, self._opener)
        self.files, self.row_groups, self._located = kept.files, kept.row_groups, kept.located
        self._is_filtered = is_filtered
        self._set_schemas()
        kept.dictionaries = self._dictionary_columns()
        self._memory = StoredMemory(kept, self._file_schema, made is not None)
        self.decoding = self._decoding(bags or {})
        adds = any(file.of(self.columns).constants or file.renames for file in self._located)
        self._may_stay = in_pages and not any((made, history, is_filtered, adds))
        self.in_pages = self._may_stay and not functions
        """Whether columns may stay stored, because nothing reads their values before they are moved to batches."""
        self._made_early = self._made_late = made
        self.held: tuple[str, ...] = ()
        """The columns that the late functions get of a read."""
        self.late_columns: tuple[str, ...] = ()
        """The columns that are needed after the late functions."""
        self.fetches = any(self._opener.local(file.path) is None for file in self.files)
        """Whether row groups come from a store, or as if they did."""

    def _set_schemas(self) -> None:
        """Sets the schemas of the files, of the read columns and of the result."""
        constants = self._located[0].constants if self._located else {}
        self._first_with = {
            name: next(
                (n for n, file in enumerate(self._located) if name not in file.constants), None
            )
            for name in self.columns
        }
        """For each column, the number of the first file that stores it. None: no file does."""
        in_files = [name for name in self.columns if self._first_with[name] is not None]
        self._file_schema = self._schema(in_files)
        others = ((name, constants[name].type) for name in self.columns if name not in in_files)
        self.stored = pa.schema([*self._file_schema, *others])
        """The schema of the columns that are read, in the types of the first file."""
        wanted = schema_with(self.stored, given_by(self.functions), self.result_columns)
        self.schema = self._made.schema(wanted) if self._made else wanted
        if self._history:
            self.schema = pa.schema([*self.schema, *self._history.fields])
        """The schema of the table that `read` returns."""
        self._by_users: list[GroupRange] = []
        self._other_readers: list[RowGroupReader] = []
        """The readers of other splits whose events are in histories."""
        self._others: list[SplitEvents] = []
        if history := self._history:
            self._by_users = self._groups_by_users(history)
            self._other_readers = [
                RowGroupReader(files, history.sources, opened=self._opener, made=history.made)
                for files in history.other_files
            ]
            self._others = [
                reader._events(history, reader._groups_by_users(history))
                for reader in self._other_readers
            ]
        self._places = {group.at: place for place, group in enumerate(self._by_users)}
        """The place of each row group in the order of the users."""
        self._checked_schema: pa.Schema | None = None
        """The schema of a row group that can be loaded along with the first file."""

    def _dictionary_columns(self) -> list[str]:
        """Returns the text columns that are read as dictionaries, so that each distinct value is processed once."""
        if self._is_filtered:
            return []
        if self._made is None:
            names = [f.name for f in self._file_schema if pa.types.is_string(f.type)]
        else:
            names = self._made.dictionary_columns(self._file_schema, self._kept.footer(0))
        return [name for name in names if name not in self._optional | reads_of(self.functions)]

    def call_late(self, late: Sequence[Transform]) -> frozenset[str]:
        """Calls the last functions, which are `late`, after the rows are placed. Returns the loader's columns that are
        made of what they give."""
        self.early = self.functions[: len(self.functions) - len(late)]
        self.in_pages = self._may_stay and not self.early
        given = given_by(late)
        self.late_columns = columns = tuple(n for n in self.result_columns if n in given)
        if self._made is not None:
            self._made_early, self._made_late = self._made.split(given)
            self.late_columns, columns = self._made_late.sources, self._made_late.names
        self.held = needed_before(self.late_columns, late)
        return frozenset(columns)

    def source_of(self, number: int) -> tuple[str | None, list[Any]]:
        """Returns a file's path on this machine, and what else decides which of its rows come, with which values."""
        if self._is_filtered:
            raise Uncacheable("nothing tells which rows a predicate keeps")
        file, chosen = self.files[number], self._selection
        path = self._opener.local(file.path)
        if not path and not file.content:
            return None, []
        rule = [chosen.split, chosen.spec.text, repr(chosen.spec.table)] if chosen else []
        reads = reads_of(self.functions).intersection(self.needed)
        types = [str(self.stored.field(name)) for name in sorted(reads)]
        described = self._located[number].described
        return path, [file.path, file.bytes, file.content, described, types, rule]

    def work(self, task: ReadTask, charge: Charge) -> Decoded:
        """Decodes a row group."""
        return Decoded(task, self.read(task.read, fetched=task.fetched), charge)

    @property
    def kept(self) -> int:
        """How many of the first functions have a cache."""
        return len(self.cache.functions) if self.cache else 0

    def kept_rows(self, read: Read) -> pa.Table | None:
        """Returns what functions made of a read in an earlier pass, if it was kept."""
        return self.cache.get(read) if self.cache else None

    def work_made(self, task: ReadTask, made: pa.Table, charge: Charge) -> Decoded:
        """Decodes a row group without the columns of which functions made others, which an earlier pass has kept."""
        cache, read = self.cache, task.read
        assert cache is not None
        rows = self._finish_made(cache, read, self._read_rest(cache, read, made, task.fetched))
        if isinstance(rows, StoredRows):
            rows.replacement = partial(self._replace_damaged, read)
        return Decoded(task, rows, charge, made_by=cache.functions)

    def with_made(self, rows: pa.Table, read: Read, made: pa.Table) -> pa.Table:
        """Returns decoded rows with what functions made of them in an earlier pass."""
        assert self.cache is not None
        rest = rows.select(self.cache.rest)
        return self._finish_made(self.cache, read, pa.table(_columns_of(rest) | _columns_of(made)))

    def _finish_made(self, cache: MadeCache, read: Read, rows: Any) -> Any:
        """Makes the loader's columns, if no function is called after those of the cache."""
        return self.finish(rows, read) if len(self.early) == len(cache.functions) else rows

    def _read_rest(self, cache: MadeCache, read: Read, made: pa.Table, fetched: Fetched) -> Any:
        """Reads the columns that are needed besides those that the functions of a cache have made."""
        stays = self._may_stay and self.early == cache.functions and not self.held
        if not cache.rest:
            return made
        if not stays:
            rows = self.decoded(read.file, read.group, cache.rest, fetched, read)
            return pa.table(_columns_of(rows) | _columns_of(made))
        rows = self._read_stored(read.file, read.group, cache.rest, fetched, read, stays=True)
        if not isinstance(rows, StoredRows):
            return pa.table(_columns_of(rows) | _columns_of(made))
        rows.complete(self.result_columns, pa.table(_columns_of(rows.others) | _columns_of(made)))
        return rows

    def fetch(self, read: Read, reserve: Callable[[int], None]) -> Fetched:
        """Gets the stored bytes of a row group, if its file lies in a store, for a later `read`. `reserve` is called
        with their number before."""
        try:
            file = self._kept.take(read.file)
            if isinstance(file, StoreFile):
                columns = self._located[read.file].stored(self.columns)
                file.fetch_group(read.group, columns, reserve)
        except Exception as error:  # `read` raises it, in the order of the reads
            return error
        return file

    def read(
        self,
        read: Read,
        decode: Callable[[Read], pa.Table] | None = None,
        fetched: Fetched = None,
    ) -> pa.Table:
        """Reads a row group, from the bytes that were `fetched`, if they were. If `decode` is given, it makes the table
        instead of `decoded`, which it may call."""
        try:
            try:
                table = (
                    self.decoded(read.file, read.group, fetched=fetched, read=read)
                    if decode is None
                    else decode(read)
                )
            except (SourceError, HistoryError):
                raise
            except Exception as error:  # raised by a user's transform or predicate, or by Petastorm
                raise SourceError(
                    f"{self.describe(read)}: {error or type(error).__name__}"
                ) from error
            if self.early:
                return table
            made = self.finish(table, read)
            if isinstance(made, StoredRows):
                made.replacement = partial(self._replace_damaged, read)
            return made if self._history is None else self._history.joined(made, table)
        except SourceError as error:
            if isinstance(error.__cause__, (DeliveryError, MemoryError)):
                raise
            return self.replace_lost(read, error)

    def replace_lost(self, read: Read, error: SourceError) -> pa.Table:
        """Returns rows to take instead of those that cannot be read, or raises the error."""
        lost = self.rescue.replace_group(error, read, self.schema)
        return lost.replace_schema_metadata(LOST)

    def _replace_damaged(self, read: Read, damaged: DamagedPage) -> pa.Table:
        """Returns rows to take instead of a row group with a damaged page, or raises."""
        what = f"{self.describe(read)}: {damaged}. The file is damaged; write it again"
        return self.replace_lost(read, SourceError(what))

    def finish(self, table: pa.Table, read: Read) -> pa.Table:
        """Makes the loader's columns of the columns that are there after the early functions over rows. With them are
        those that the late ones get."""
        rows = self._make(self._made_early, table, read, self.describe(read))
        return hold(rows, table, self.held) if self.held else rows

    def finish_late(self, table: pa.Table, rows: TakenRows, where: str) -> pa.Table:
        """Makes the loader's columns of the columns that are there after the late functions over rows."""
        return self._make(self._made_late, table, rows, where)

    def _make(
        self, made: MadeColumns | None, table: pa.Table, read: Read | TakenRows, where: str
    ) -> pa.Table:
        if made is None:
            return table
        try:
            return made.table(table)
        except ColumnError as error:
            named = ColumnError(f"{where}: {error}")
            named.__cause__ = error.__cause__
            return self.rescue.replace_rows(
                named,
                lambda start, stop: made.table(table.slice(start, stop - start)),
                read,
                self.schema,
            )

    def prepare_pieces(self) -> None:
        """Lets `cut` make pieces of large row groups, with the pages of the largest one as the measure.

        A row group stays whole if rows of it need others: for a history, or a function over frames. So it does if only
        some of its rows are kept, because row numbers of pages are not those of the plan. Whole are also row groups of
        a far store, which are fetched whole, and those with lists or structs, whose pages do not say their rows."""
        others = self._history, self._selection, self._is_filtered, self.fetches
        known = [
            (n, file, g) for file, some in enumerate(self.row_groups) for g, n in enumerate(some)
        ]
        rows, number, group = max(known, key=itemgetter(0), default=(0, 0, 0))
        most = min(HUGE_ROWS, int(_LARGE_BYTES / max(1.0, self.decoding.row_bytes)))
        is_whole = rows <= most or any((*others, *map(frame_of, self.functions)))
        table = None if is_whole else self._page_table(number, group)
        cut = table.piece_rows(PIECE_ROWS, _MOST_AGAIN) if table else rows
        if table and cut * _LEAST_PIECES <= rows:
            self._most_whole, self._most_cut = most, cut
            if not self._repeated_texts(table, number):
                self.decoding, of_piece = decoding_of_pieces(self.decoding, table, cut)
                self.largest_read = max(of_piece, *(n for n, *_ in known if n <= most), 0)

    def cut(self, read: Read) -> Sequence[Read]:
        """Returns the pieces of a large read, if it can be cut (`prepare_pieces`)."""
        is_large = self._most_cut and read.rows > self._most_whole
        if is_large and (table := self._page_table(read.file, read.group)):
            return replace(read, pages=table).cut_at(table.cuts(self._most_cut))
        return [read]

    def _repeated_texts(self, table: PageTable, number: int) -> list[str]:
        """Returns the columns that store a text once, while each row gets its own copy. So a piece may have as many
        bytes as all rows."""
        texts = {f.name for f in self._file_schema if f.type in (pa.string(), pa.binary())}
        dense = self._located[number].stored(texts.difference(self._kept.dictionaries))
        return [name for name in dense if table.columns[name][0, 2]]

    def _page_table(self, number: int, group: int) -> PageTable | None:
        """Finds the pages of a row group. None: they are not understood, or the file cannot be read, which reading the
        row group says."""
        columns = self._located[number].stored(self.columns)
        with suppress(Exception), self._kept.opened(number, None) as file:
            assert isinstance(file, LocalFile)
            return file.page_table(group, columns)
        return None

    def decoded(
        self,
        number: int,
        group: int,
        columns: Sequence[str] | None = None,
        fetched: Fetched = None,
        read: Read | None = None,
    ) -> pa.Table:
        """Decodes the stored columns of a row group, or only those in `columns`, or of a `read` that is a piece. The
        result may be `StoredRows`, which can only be moved to batches."""
        where = self._kept.where(number, group)
        rows = read.rows if read and read.pages else self.row_groups[number][group]
        table = self._read_stored(number, group, columns, fetched, read)
        if columns is None and table.schema != self._checked_schema:
            # Values of typed columns are converted one by one, so their stored type may differ.
            fields = (
                self.stored.field(f.name) if f.name in self._spec_types else f for f in table.schema
            )
            if wrong := difference(self._file_schema, pa.schema(fields), self.files[0].path):
                raise SourceError(f"{where}: {wrong}")
            self._checked_schema = table.schema
        if self._history and columns is None:
            before = self._by_users[: self._places.get((number, group), 0)]
            earlier = self._events(self._history, before, is_own=True)
            table = self._history.added(table, earlier, self._others, where)
        if self._selection:
            try:
                table = table.filter(pa.array(self._selection.mask(table)))
            except ColumnError as error:
                raise SourceError(f"{where}: {error}") from error
        if table.num_rows != rows:
            raise SourceError(
                f"{where}: {table.num_rows} rows where the table has {rows}; the file was replaced. Start again"
            )
        return table

    def _read_stored(
        self,
        number: int,
        group: int,
        columns: Sequence[str] | None,
        fetched: Fetched = None,
        read: Read | None = None,
        *,
        stays: bool = False,
    ) -> Any:
        """Reads stored columns of a row group. Adds the columns that its folders name. Columns may stay stored if all
        are read, or with `stays`."""
        wanted, portions = self.columns, self.decoding.portions or ((),)
        if columns is not None:
            wanted = tuple(dict.fromkeys([*columns, *self._selection_columns]))
            portions = (wanted,)
        try:
            with self._kept.opened(number, fetched) as file:
                decode = partial(file.read, group)
                if read and read.pages and isinstance(file, LocalFile):
                    decode = partial(file.read_piece, read)
                if stays or (columns is None and self.in_pages):
                    if self._buffers.idle_bytes() > _IDLE_BYTES:
                        self._buffers.trim()
                    if rows := file.read_stored(
                        group, wanted, self._buffers, () if stays else self.held, read
                    ):
                        unread = ([n for n in some if n not in rows.stored] for some in portions)
                        rows.complete(wanted, self._table(number, decode, [*filter(None, unread)]))
                        rows.decode = lambda name: self._read_stored(
                            number, group, [name], read=read
                        )[name]
                        return rows
                table = self._table(number, decode, portions)
            table = self._located[number].with_constants(table, wanted)
            lacking = self._optional and (self._optional - set(table.schema.names)) & set(wanted)
            for name in lacking:
                table = table.append_column(name, pa.nulls(table.num_rows, self._spec_types[name]))
        except Exception as error:  # a damaged file can cause any error
            cause = without_frames(error) if isinstance(error, OSError) else error
            raise SourceError(
                f"{self._kept.where(number, group)}: {error or type(error).__name__}"
            ) from cause
        return table

    def _events(
        self, history: UserHistories, groups: Sequence[GroupRange], is_own: bool = False
    ) -> SplitEvents:
        return SplitEvents(
            groups, lambda group: self._read_stored(*group.at, history.sources), is_own
        )

    def _groups_by_users(self, history: UserHistories) -> list[GroupRange]:
        history.check(self.stored, self.files[0].path)
        footers = self._kept.footers(range(len(self.files)))
        ranges = []
        for number, (footer, located) in enumerate(zip(footers, self._located, strict=True)):
            if wrong := located.constants.keys() & {history.by, history.time}:
                raise HistoryError(
                    f"{self.files[number].path}: column {min(wrong)!r} is only in the names of folders. A "
                    "history needs it in the files"
                )
            check_file(self.files[number].path, footer, HistoryError)
            names = located.stored((history.by, history.time))
            ranges += [
                GroupRange.of((number, group), self._kept.where(number, group), rows, names)
                for group in range(footer.num_row_groups)
                if (rows := footer.row_group(group)).num_rows
            ]
        return in_order(ranges, history.history)

    def _table(
        self,
        number: int,
        decode: Callable[[Sequence[str]], pa.Table],
        portions: Iterable[Sequence[str]],
    ) -> pa.Table:
        """Decodes some columns at a time. Parts of structs become columns.

        Arrow's reader keeps the stored form of all columns of one call until the call returns, so large columns are
        read separately."""
        located = self._located[number]
        tables = [flattened(located.table(decode(located.stored(some)), ())) for some in portions]
        tables = [table for table in tables if table.num_columns] or tables[:1]
        if len(tables) == 1:
            return tables[0]
        return pa.table({name: part.column(name) for part in tables for name in part.column_names})

    def stats(self) -> dict[str, int]:
        """Returns the counts of reads, bytes and retries of stores."""
        return self._opener.stats()

    def interrupt(self) -> None:
        """Stops all waiting for stores. Later reads from stores fail."""
        self._opener.close()

    def close(self) -> None:
        """Closes the files that are kept open. Files in use are closed once they are read."""
        self._kept.close()
        for reader in self._other_readers:
            reader.close()
        self._opener.close()

    def describe(self, read: Read) -> str:
        """Returns the file, row group and selection of a read, for messages."""
        return self._kept.where(read.file, read.group) + (
            self._selection.which if self._selection else ""
        )

    def _schema(self, names: Sequence[str]) -> pa.Schema:
        """Returns the schema of these columns in the first file. An optional column that the file lacks has the spec's
        type."""
        if not self.files:
            raise SourceError("there are no files to read")
        schemas: dict[int, list[pa.Field]] = {}
        fields = []
        for name in names:
            number = self._first_with[name] or 0
            if number not in schemas:
                stored = self._kept.footer(number).schema.to_arrow_schema()
                schemas[number] = list(parts(self._located[number].schema(stored)))
            there = schemas[number]
            known = [part.name for part in there]
            if name not in known and name in self._optional:
                fields.append(pa.field(name, self._spec_types[name]))
                continue
            if wrong := why_missing(name, known):
                raise SourceError(f"{self.files[number].path}: {wrong}")
            fields.append(there[known.index(name)])
        return pa.schema(fields)

    def _decoding(self, bags: Mapping[str, float]) -> Decoding:
        """Estimates the memory for decoding."""
        alone, rows = self._memory.decoding(bags, self._file_schema.names)
        whole = alone.decoded(rows)
        decoding = replace(
            alone, extra_bytes=alone.extra_bytes + _FRAME_COPIES * self._is_filtered * whole
        )
        if self._history:
            others = self._history.share_of_others(self._by_users, self._others)
            views = self._history.row_bytes(rows, others)
            making = rows * round(views + 2 * _MAKE_ROW_BYTES * (1 + others))
            work = [
                earlier.at_work(count) + 2 * _MAKE_ROW_BYTES * count * bool(others)
                for earlier, count in (
                    reader._memory.decoding({}, self._history.sources)
                    for reader in (self, *self._other_readers)
                )
            ]
            decoding = replace(
                decoding,
                row_bytes=decoding.row_bytes + views,
                extra_bytes=decoding.extra_bytes + max(work) + making,
            )
        if self._made is None:
            return decoding
        made = rows * (self._made.row_bytes + _MAKE_ROW_BYTES)
        return replace(
            decoding,
            row_bytes=decoding.row_bytes + self._made.more_bytes,
            # The kept rows are copied from the whole row group.
            extra_bytes=decoding.extra_bytes + made + whole * (self._selection is not None),
        )


def _columns_of(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    return dict(zip(table.column_names, table.columns, strict=True))
