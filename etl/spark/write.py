"""`write`: applies the operators with Spark, and writes the table's files.

Tasks apply the operators, and group their rows by file in cells. Spark moves the cells. Then one task for each file
sorts its rows and writes them, as the local engine does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyspark import StorageLevel, TaskContext
from pyspark.accumulators import Accumulator

from sluice.etl.apply.features import FileAssignment
from sluice.etl.apply.parse import Batches
from sluice.etl.apply.rejected import Rejects, read_again
from sluice.etl.apply.row_placement import RowPlacement, WritePlan, write_rows
from sluice.etl.apply.row_store import SortedRows, split_by_number
from sluice.etl.jobs.engine import Written
from sluice.etl.ops.hashing import Narrow
from sluice.etl.read.input_files import pieces_of_task
from sluice.etl.spark.read_input import RawInput, collect_cells
from sluice.etl.spark.workers.cells import read_stream, slices, write_cell
from sluice.etl.spark.workers.mapped_lookup import load_features
from sluice.etl.spark.workers.parsed_rows import ParsedRows, name_files, selected_rows
from sluice.etl.table.fitted_state import FittedState, Packed
from sluice.etl.table.job_record import FileRecord
from sluice.etl.table.new_files import NewFile
from sluice.etl.table.profile import Profile
from sluice.etl.table.sketch import Gathered, SketchSum
from sluice.etl.table.store import TableStore, folder_of

if TYPE_CHECKING:
    from sluice.etl.jobs.job import Job  # needs packages that workers of a cluster lack

_GROUPED_BYTES = 64 << 20
"""The size of the rows that a task groups by file at once. If there are many files, larger groups make fewer cells."""
_SORTED_BYTES = 160 << 20
"""The size of the rows that a task sorts in memory. With their copies they take about 512 MiB."""
_CELLS = "file int, cell binary"


def write(
    raw: RawInput,
    state: FittedState,
    plan: WritePlan,
    job: Job,
    rejects: Rejects,
) -> Written:
    """Applies the operators, sorts the rows of each file, and writes Parquet. Adds the rows that are rejected only
    now."""
    context = raw.spark.sparkContext
    gathered: Accumulator[Gathered] = context.accumulator({}, SketchSum())  # type: ignore[arg-type]
    placement = plan.placement
    shipped = context.broadcast(state.packed())
    worker = partial(
        _apply,
        raw.parsed_rows,
        plan=plan,
        packed=lambda: shipped.value,
        gathered=gathered,
    )
    cells = raw.rows.mapInArrow(worker, _CELLS).repartitionById(placement.total + 1, "file")
    writer = partial(_write_file, placement, job.store.uri, job.name)
    made = cells.mapInArrow(writer, "made string, late binary").persist(StorageLevel.DISK_ONLY)
    written = made.select("made").where("made is not null").toArrow()
    files = [_read_file(text) for text in written["made"].to_pylist()]
    if sum(file.record.rows for file in files) < plan.rows:
        for rows in collect_cells(made, "late"):
            rejects.add(rows)
    made.unpersist(blocking=True)
    shipped.unpersist(blocking=True)
    _remove_others(job.store, job.name, files)
    return Written(files, gathered.value)


def _remove_others(store: TableStore, job: str, files: list[NewFile]) -> None:
    """Removes the files of attempts that failed, or that another attempt overtook. Attempts that still run may leave
    some, which vacuum removes."""
    for path in {*store.files(folder_of(job))} - {file.record.path for file in files}:
        store.remove(path)


@name_files
def _apply(
    parsed_rows: ParsedRows,
    batches: Batches,
    *,
    plan: WritePlan,
    packed: Callable[[], Packed],
    gathered: Accumulator[Gathered],
) -> Batches:
    """Yields cells with the finished columns and the sort keys of each file's rows. After the last file, yields cells
    with rejected rows. Runs in a worker."""
    state, features = load_features(plan.placement.spec, packed())
    placing = RowPlacement(plan, features, state)
    waiting: list[tuple[pa.RecordBatch, Narrow]] = []
    size = 0
    for columns, keys in selected_rows(parsed_rows, batches):
        finished, numbers, _ = placing.finish(columns, keys)
        waiting.append((finished, numbers))
        size += finished.nbytes
        if size >= _GROUPED_BYTES:
            yield from _in_cells(waiting, plan.placement.total)
            waiting, size = [], 0
    yield from _in_cells(waiting, plan.placement.total)
    gathered.add(placing.seen)
    rejected = placing.rejected
    for piece in pieces_of_task(parsed_rows.parts_of_task()) if placing.late else ():
        if late := placing.late.get(piece.part):
            rejected += read_again(piece.part, piece.batches(), late)
    for rows in rejected:
        yield _cell(plan.placement.total, rows)


def _in_cells(waiting: list[tuple[pa.RecordBatch, Narrow]], files: int) -> Batches:
    """Yields the rows as cells, each with rows of one file."""
    if not waiting:
        return
    batches, numbers = zip(*waiting, strict=True)
    parts = split_by_number(pa.concat_batches(batches), np.concatenate(numbers), files)
    for file, rows in parts:
        for part in slices(rows):
            yield _cell(file, part)


def _cell(file: int, rows: pa.RecordBatch) -> pa.RecordBatch:
    cell = write_cell([rows], rows.schema)
    return pa.record_batch([pa.array([file], pa.int32()), cell], ["file", "cell"])


def _write_file(placement: FileAssignment, uri: str, job: str, batches: Batches) -> Batches:
    """Sorts the rows of one file, writes them, and yields a description of the file. Runs in a worker."""
    task = TaskContext.get()
    assert task is not None
    rows = SortedRows(_SORTED_BYTES)
    file = None
    for batch in batches:
        file = batch["file"][0].as_py()
        if file == placement.total:  # these are no rows of a file
            late = batch["cell"]
            yield pa.record_batch([pa.nulls(len(late), pa.string()), late], ["made", "late"])
            file = None
            continue
        for cell in batch["cell"]:
            for part in read_stream(cell):
                rows.add(part)
    if file is not None:
        pieces = rows.pieces(placement.spec.table.row_group_rows)
        made = write_rows(
            placement, TableStore(uri), job, file=file, pieces=pieces, attempt=task.taskAttemptId()
        )
        text = json.dumps([asdict(made.record), made.profile.columns])
        yield pa.record_batch([[text], pa.nulls(1, pa.binary())], ["made", "late"])
    rows.close()


def _read_file(text: str) -> NewFile:
    record, columns = json.loads(text)
    return NewFile(FileRecord.from_json(record), Profile(columns))
