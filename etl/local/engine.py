"""`LocalEngine`: runs a job's passes on this machine's threads.

The first pass parses, and stores the rows for the later passes in memory and then on the disk. If the disk is full,
later passes parse again. Before rows are written, they wait for their file in memory, and beyond a budget on the disk.
A sort needs the rows of one file at a time, and `table.file_rows` limits these.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import psutil
import pyarrow as pa

from sluice.common.control_groups import ControlGroups
from sluice.etl.apply.count_sums import CountSums
from sluice.etl.apply.counts import CountsOfRows, KeyedRows, selected, split_keys, with_key_column
from sluice.etl.apply.features import Features
from sluice.etl.apply.input_checks import Before, Part, rows_before
from sluice.etl.apply.parse import Parsed
from sluice.etl.apply.rejected import (
    PartParser,
    count_rows,
    encoded_headers,
    read_again,
)
from sluice.etl.apply.row_counts import COUNTS
from sluice.etl.apply.row_placement import RowPlacement, WritePlan, write_rows
from sluice.etl.apply.row_store import RowStore, SortedRows, split_by_number
from sluice.etl.jobs.engine import Engine, JobFailure, Sums, Written, too_many_values
from sluice.etl.jobs.job import Job
from sluice.etl.jobs.progress import JobProgress, Pass
from sluice.etl.local.threads import Threads
from sluice.etl.ops.base import MAX_VALUES, Fitted
from sluice.etl.ops.chain import FeatureError
from sluice.etl.read.input_files import InputFiles
from sluice.etl.read.pieces import Piece
from sluice.etl.read.row_groups import RowGroups
from sluice.etl.spec.spec import Learned
from sluice.etl.table.fitted_state import FileBackedState, FittedState, Learnt
from sluice.etl.table.new_files import NewFile
from sluice.etl.table.sketch import Gathered, gather


class LocalEngine(Engine):
    name: ClassVar[str] = "local"

    def __init__(
        self, job: Job, progress: JobProgress, *, threads: int = 0, memory: int = 0
    ) -> None:
        super().__init__(job, progress)
        # A thread takes some 200 MiB. A user's function may not be thread-safe.
        most = 1 if job.spec.functions else max(1, _memory_limit() >> 28)
        self._threads = Threads(min(most, threads or max(1, int(ControlGroups().cores()))))
        self._budget = (memory or _memory_limit()) // 4
        pa.set_cpu_count(self._threads.count)
        self._input = InputFiles(job.spec.input, job.inputs)
        free = shutil.disk_usage(tempfile.gettempdir()).free
        self._parsed, self._finished = RowStore(self._budget, free // 2), RowStore(self._budget)
        self._complete = set[Part]()
        """The pieces of which all rows are in `_parsed`."""
        self._before: Before | None = None
        self._pass = Pass("", 0)
        progress.follow(lambda: self._pass.text)

    def check(self) -> None:
        super().check()
        self._input.check()
        if self.spec.input.place:
            # A row's place depends on the number of rows in earlier pieces, so all rows are counted first.
            headers = encoded_headers(self.spec.input)

            def count(piece: Piece | RowGroups) -> tuple[Part, int]:
                return piece.part, sum(count_rows(batch, headers) for batch in piece.batches())

            self._before = rows_before(dict(self._threads.map(count, self._input.pieces())))

    def sums(self, level: int | None, state: FittedState, operators: Mapping[int, Learned]) -> Sums:
        features = Features(self.spec, state, ahead=False)
        counts = CountsOfRows(self.spec, level, features)
        least = {number: learned.op.least for number, learned in operators.items()}

        def read(piece: Piece | RowGroups) -> int:
            rows = 0
            for columns, keys in self._rows(
                piece, None if level else lambda parsed: sums.add(counts.count_parsed(parsed))
            ):
                sums.add(counts.count_selected(columns, keys))
                rows += len(keys)
            return rows

        with contextlib.closing(CountSums(self._budget, least)) as sums:
            name = "" if level is None else f"pass {level + 1} of {max(1, self.spec.levels)}, "
            self._over(read, "closer pass, " if features.ranges else name)
            tables, values = [COUNTS.empty_table()], 0
            for table in sums.tables(self._threads.map):
                tables.append(table)
                if (values := values + table.num_rows) > MAX_VALUES:
                    raise too_many_values(self.job.input_names, MAX_VALUES)
        return Sums(pa.concat_tables(tables))

    def _rows(
        self,
        piece: Piece | RowGroups,
        first: Callable[[Parsed], None] | None = None,
        *,
        last: bool = False,
    ) -> Iterator[KeyedRows]:
        """Yields the rows of a piece that filters and the sample keep, with their keys.

        In the first pass, `first` is called with all parsed rows, and the kept rows are stored if memory or disk allow.
        Later passes read the stored rows, or parse again. After the `last` pass, stored rows are dropped."""
        if piece.part in self._complete:
            for rows in self._parsed.get(piece.part):
                self._threads.check_wanted()
                yield split_keys(rows)
            if last:
                self._parsed.drop(piece.part)
            return
        parser = PartParser(self.spec, self._before)
        has_room = True
        for batch in piece.batches():
            self._threads.check_wanted()
            parsed, rejected = parser.parse(piece.part, batch)
            columns, keys = selected(self.spec, parsed)
            if first is not None:
                first(parsed)
                self.rejects.add(rejected)
                rows = with_key_column(columns, keys)
                has_room = has_room and self._parsed.put([(piece.part, rows)])
            yield columns, keys
        if first is not None:
            for lines in parser.lines():
                self.rejects.add(lines)
        if first is not None and has_room:
            self._complete.add(piece.part)
        else:
            self._parsed.drop(piece.part)

    def _over(self, function: Callable[[Any], int], name: str) -> None:
        """Calls a function on each piece of the input, and shows the progress by the rows that it returns."""
        self._pass = Pass(name, self._input.bytes)

        def counted(piece: Piece | RowGroups) -> None:
            try:
                self._pass.add(function(piece), piece.size)
            except FeatureError as failure:
                raise JobFailure(
                    f"{piece.file.name}: {failure}; nothing was published"
                ) from failure

        deque(self._threads.map(counted, self._input.pieces()), 0)

    def extend(self, level: int, number: int, op: Fitted, old: Learnt, new: Learnt) -> Learnt:
        assert isinstance(new, pa.Table)  # this engine writes no fitted table to files
        return op.update(old.read() if isinstance(old, FileBackedState) else old, new)

    def write(self, state: FittedState, plan: WritePlan) -> Written:
        placement, features = plan.placement, Features(self.spec, state)
        seen, widest = Gathered(), [1]
        lock = threading.Lock()

        def place(piece: Piece | RowGroups) -> int:
            placing, count = RowPlacement(plan, features, state), 0
            for columns, keys in self._rows(piece, last=True):
                if len(keys):
                    batch, files, every = placing.finish(columns, keys)
                    widest[0] = max(widest[0], batch.nbytes // max(1, batch.num_rows))
                    self._finished.put(split_by_number(batch, files, placement.total))
                    count += every
            if late := placing.late.get(piece.part):
                for rows in read_again(piece.part, piece.batches(), late):
                    self.rejects.add(rows)
            with lock:
                gather(seen, placing.seen)
            return count

        self._over(place, "pass 1 of 2, ")
        # About how many bytes each file takes.
        sizes = {file: count * widest[0] for file, count in sorted(self._finished.rows.items())}
        self._pass = Pass("pass 2 of 2, ", sum(sizes.values()))

        def finish(file: int) -> NewFile:
            with contextlib.closing(SortedRows(self._budget)) as rows:
                for batch in self._finished.get(file):
                    rows.add(batch)
                made = write_rows(
                    placement,
                    self.job.store,
                    self.job.name,
                    file=file,
                    pieces=self._threads.while_wanted(rows.pieces(self.spec.table.row_group_rows)),
                )
            self._pass.add(made.record.rows, sizes[file])
            return made

        # A sort has three copies of a file's rows in memory: unsorted, sorted, and as they are written.
        largest = 3 * max(sizes.values(), default=1)
        ahead = max(1, min(2 * self._threads.count, 2 * self._budget // largest))
        files = list(self._threads.map(finish, sizes, ahead))
        return Written(files, seen)

    def close(self) -> None:
        self._threads.close()
        self._parsed.close()
        self._finished.close()
        super().close()


def _memory_limit() -> int:
    """Returns how many bytes this process may use: the free memory of the machine, or less if its control groups limit
    it."""
    free: int = psutil.virtual_memory().available
    return min([free, *(group.limit for group in ControlGroups().limited())])
