"""A job's passes on this machine's threads: `LocalEngine`.

The first pass parses; what it parsed is kept for the passes after it as long as there is room, and parsed again beyond
that. Rows wait for their file in memory, and beyond a budget on the disk: a file's rows are bounded by
`table.file_rows`, so the file is all that a sort ever holds."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.fs as pafs

from sluice.etl.apply.counts import Counted, CountsOfRows, selected
from sluice.etl.apply.features import Features, FileAssignment, row_keys
from sluice.etl.apply.input_checks import header_of
from sluice.etl.apply.parse import InputParser
from sluice.etl.apply.placed import Look, Placing
from sluice.etl.apply.rejected import Reject, refuse_others, texts_of
from sluice.etl.jobs.engine import Engine, JobFailure, Learnt, Sums
from sluice.etl.jobs.fitting import too_many_values
from sluice.etl.jobs.job_run import Job
from sluice.etl.jobs.progress import JobProgress
from sluice.etl.local.columns import RowGroups
from sluice.etl.local.input import LocalInput
from sluice.etl.local.pieces import Piece
from sluice.etl.local.places import store_of
from sluice.etl.local.runs import Runs, Writer
from sluice.etl.local.spool import Spool
from sluice.etl.local.sums import CountSums
from sluice.etl.local.threads import Threads, memory_limit, processors
from sluice.etl.ops import Fitted
from sluice.etl.ops.base import MAX_VALUES
from sluice.etl.spec.spec import Learned
from sluice.etl.table.fitted_state import FileBackedState, FittedState
from sluice.etl.table.sketch import Gathered, Sketch, gather

_KEY, _REJECTS = "_key", "part-00000.json"


@contextlib.contextmanager
def clearly() -> Iterator[None]:
    """Turns a disk's errors, and a lack of memory, into a `JobFailure`."""
    try:
        yield
    except MemoryError as error:
        raise JobFailure(f"this machine's memory does not do for it ({error}); nothing was published") from error
    except OSError as error:
        words = {errno.ENOSPC: f"the disk is full: make room for output and {tempfile.gettempdir()} ",
                 errno.EROFS: f"a folder cannot be written: the output, or {tempfile.gettempdir()} ",
                 errno.EACCES: f"a folder cannot be written: the output, or {tempfile.gettempdir()} "}
        what = f"{words.get(error.errno or 0, '')}({error}); nothing was published"
        raise JobFailure(f"{error.filename}: {what}" if error.filename else what) from error


def _names_in(folder: str) -> list[tuple[str, bool]]:
    fs, inner, _ = store_of(folder)
    this = fs.get_file_info(inner)
    there = [this] if this.is_file else fs.get_file_info(pafs.FileSelector(inner, allow_not_found=True))
    return [(info.base_name, info.is_file) for info in there]


class LocalEngine(Engine):
    name: ClassVar[str] = "local"

    def __init__(self, job: Job, progress: JobProgress, *, threads: int | None = None, memory: int | None = None
                 ) -> None:
        super().__init__(job, progress)
        # Nobody promises that a user's function may run twice at once.
        self._threads = Threads(1 if job.spec.functions else threads or processors())
        self._budget = (memory or memory_limit()) // 4
        pa.set_cpu_count(self._threads.count)
        self._input = LocalInput(job.spec.input, job.inputs, self._threads)
        self._kept: dict[tuple[str, int], list[pa.RecordBatch]] = {}
        self._kept_bytes = 0
        self._bad: set[tuple[str, int]] = set()
        self._spools: list[Spool] = []
        self.spilled = 0
        """How many bytes went to the disk so far."""
        self._pass = Pass("", 1)
        progress.follow(lambda: self._pass.text)

    def check(self) -> None:
        if self.job.rejects is not None:
            refuse_others(self.job.rejects, _names_in(self.job.rejects))
        self._input.check()

    def url(self, relative: str) -> str:
        return self.job.store.url(relative)

    def sums(self, level: int | None, state: FittedState, wanted: Mapping[int, Learned]) -> Sums:
        counts = CountsOfRows(self.spec, level, Features(self.spec, state, ahead=False))
        sums = CountSums(self._threads, self._budget, {number: one.op.least for number, one in wanted.items()})
        try:
            read = partial(self._first_pass if not level else self._later_pass, counts, sums)
            for _ in self._over(read, "" if level is None else f"pass {level + 1} of {max(1, self.spec.levels)}, "):
                pass
            table = sums.total(MAX_VALUES)
            if table is None:
                raise too_many_values(self.job.named, MAX_VALUES)
            return Sums(table)
        finally:
            self.spilled += sums.close()

    def _first_pass(self, counts: CountsOfRows, sums: CountSums, piece: Piece | RowGroups) -> int:
        """Parses a piece and counts its rows; keeps what was parsed if there is room."""
        parser, rows, place = InputParser(self.spec), 0, (piece.file.name, piece.number)
        kept: list[pa.RecordBatch] | None = []
        for batch in piece.batches(self._header):
            self._threads.wanted()
            parsed = parser.parse(batch)
            rows += parsed.rows + len(parsed.rejected)
            if parsed.rejected:
                self._bad.add(place)
            sums.add(counts.of_parsed(parsed))
            columns, keys = selected(self.spec, parsed)
            keys = row_keys(columns, self.spec) if keys is None else keys
            sums.add(counts.of_selected(columns, keys))
            whole = pa.record_batch([*columns.values(), pa.array(keys)], [*columns, _KEY])
            if kept is not None and self._kept_bytes + whole.nbytes <= self._budget:
                self._kept_bytes += whole.nbytes
                kept.append(whole)
            else:
                kept = None
        if kept is not None:
            self._kept[place] = kept
        return rows

    def _later_pass(self, counts: CountsOfRows, sums: CountSums, piece: Piece | RowGroups) -> int:
        rows = 0
        for columns, keys in self._selected(piece, last=False):
            self._threads.wanted()
            sums.add(counts.of_selected(columns, keys))
            rows += len(keys)
        return rows

    def _selected(self, piece: Piece | RowGroups, *, last: bool) -> Iterator[tuple[dict[str, pa.Array], Any]]:
        """The rows of a piece that filters and the sample leave, with their keys: kept, or parsed again."""
        place = (piece.file.name, piece.number)
        kept = self._kept.pop(place, None) if last else self._kept.get(place)
        if kept is not None:
            for batch in kept:
                yield dict(zip(batch.schema.names[:-1], batch.columns[:-1], strict=True)), batch[_KEY].to_numpy()
            return
        parser = InputParser(self.spec)
        for batch in piece.batches(self._header):
            columns, keys = selected(self.spec, parser.parse(batch))
            yield columns, row_keys(columns, self.spec) if keys is None else keys

    @property
    def _header(self) -> bytes:
        return header_of(self.spec.input).encode()

    def _over(self, function: Callable[[Any], int], name: str) -> Iterator[int]:
        """Calls a function on each piece of the input, and shows how far it is by the rows that it returns."""
        self._pass = Pass(name, self._input.size)

        def followed(piece: Piece | RowGroups) -> int:
            rows = function(piece)
            self._pass.add(rows, piece.size)
            return rows

        yield from self._threads.over(followed, self._input.pieces())

    def extended(self, level: int, number: int, op: Fitted, old: Learnt, new: Learnt) -> Learnt:
        held = old.read() if isinstance(old, FileBackedState) else old
        assert isinstance(new, pa.Table)  # here nothing that is learned goes to files
        return op.update(held, new)

    def set_aside(self, folder: str) -> None:
        fs, inner, _ = store_of(folder)
        refuse_others(folder, there := _names_in(folder))
        for name, _ in there:
            fs.delete_file(f"{inner}/{name}")
        fs.create_dir(inner, recursive=True)
        with fs.open_output_stream(f"{inner}/{_REJECTS}") as sink:
            for found in self._rejects():
                sink.write(f"{found.to_json()}\n".encode())

    def _rejects(self) -> Iterator[Reject]:
        """All rejects, by file and line. Only pieces that have some are read again, of compressed files all."""
        before: dict[str, int] = defaultdict(int)
        files = {file for file, _ in self._bad}
        pieces = (piece for piece in self._input.pieces() if piece.file.name in files)
        for piece, lines, found in self._threads.over(self._rejects_of, pieces):
            name, numbered = piece.file.name, isinstance(piece, Piece)
            for number, reason, raw, coded in found:
                yield Reject(name, before[name] + number + 1 if numbered else None, reason, raw, coded)
            before[name] += lines

    def _rejects_of(self, piece: Piece | RowGroups) -> tuple[Piece | RowGroups, int, list[tuple[Any, ...]]]:
        place, lines, parser = (piece.file.name, piece.number), 0, InputParser(self.spec)
        found: list[tuple[Any, ...]] = []
        for batch in piece.batches(b""):  # to number lines, all have to be there
            self._threads.wanted()
            if place in self._bad:
                found += [(lines + n, *rest) for n, *rest in texts_of(batch, parser.parse(batch), self._header)]
            lines += batch.num_rows
        return piece, lines, found

    def reject(self, folder: str, reason: str) -> Reject | None:
        fs, inner, _ = store_of(folder)
        with fs.open_input_file(f"{inner}/{_REJECTS}") as stream:
            for found in map(json.loads, io.BufferedReader(stream)):
                if found["reason"] == reason:
                    return Reject(found["file"], found.get("line"), reason, found["raw"], found.get("base64"))
        return None

    def ways(self, state: FittedState) -> dict[str, str]:
        return dict.fromkeys(state.stored, "held in memory")

    def write(self, state: FittedState, counted: Counted) -> Mapping[str, Mapping[str, Sketch]]:
        spec, job = self.spec, self.job
        placement = FileAssignment.of(spec, counted.rows, counted.pairs)
        look, features = Look.of(placement, counted.rows, job.rule_before), Features(spec, state)
        spool = Spool(self._budget)
        self._spools.append(spool)
        runs, seen = Runs(placement.total, spool), Gathered()
        names = [*(column.name for column in spec.columns), *Placing.order(placement)]

        def place(piece: Piece | RowGroups) -> int:
            placing, count = Placing(placement, look, features, state), 0
            for columns, keys in self._selected(piece, last=True):
                self._threads.wanted()
                if len(keys):
                    rows = placing.of(columns, keys)
                    made = features.apply(rows.columns, rows.keys, (), rows.split)
                    runs.add(pa.record_batch([*made, *rows.order], names), rows.files)
                    count += len(rows.keys)
            sketched.append(placing.seen)
            return count

        sketched: list[Gathered] = []
        for _ in self._over(place, "pass 1 of 2, "):
            while sketched:
                gather(seen, sketched.pop())
        while sketched:
            gather(seen, sketched.pop())
        writer = Writer(placement, job.store, job.name, runs, self._threads)
        files = [file for file in range(placement.total) if runs.rows(file)]
        self._pass = Pass("pass 2 of 2, ", counted.rows)

        def finish(file: int) -> None:
            writer.finish(file)
            self._pass.add(runs.rows(file), runs.rows(file))

        # A sort holds a file's rows three times: as they come, in order, and as they are written.
        largest = max((runs.rows(file) for file in files), default=0) * runs.row_bytes * 3
        for _ in self._threads.over(finish, files, max(1, min(2 * self._threads.count, 2 * self._budget // largest))
                                    if largest else None):
            pass
        return look.bounds.sketches(seen)

    def each(self, function: Callable[[str], Any], paths: Sequence[str]) -> list[Any]:
        return list(self._threads.over(function, paths))

    def close(self) -> None:
        self._threads.close()
        while self._spools:
            self.spilled += self._spools.pop().close()
        self._kept.clear()


class Pass:
    """How far a pass is."""

    def __init__(self, name: str, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._size, self._clock, self._start = name, max(1, size), clock, clock()
        self._rows = self._done = 0

    def add(self, rows: int, size: int) -> None:
        self._rows += rows
        self._done += size

    @property
    def text(self) -> str:
        share = min(1.0, self._done / self._size)
        left = f", {(self._clock() - self._start) * (1 - share) / share:.0f} s left" if share else ""
        return f"{self._name}{self._rows:,} rows, {share:.0%}{left}"
