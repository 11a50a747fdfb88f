"""`refuse_by_first_rows` checks the first rows of an input before Spark starts. `warn_of_unknown_members` names JSON
members that are no columns."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sluice.common.errors import InputError
from sluice.etl.apply.cells import stored_cells
from sluice.etl.apply.failure import FeatureError
from sluice.etl.apply.features import Features
from sluice.etl.apply.input_checks import refuse_header
from sluice.etl.apply.lines import are_headers
from sluice.etl.apply.parse import InputParser
from sluice.etl.apply.rejected import encoded_headers, texts_of
from sluice.etl.jobs.engine import JobFailure
from sluice.etl.jobs.job import Job
from sluice.etl.ops import Fitted
from sluice.etl.read.input_paths import files_of
from sluice.etl.read.pieces import PIECE_BYTES, SPARK_ONLY, first_line, pieces_of
from sluice.etl.spec.nested_columns import flattened
from sluice.etl.table.fitted_state import FittedState

ROWS = 1000
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class FirstRows:
    file: str
    batch: pa.RecordBatch
    share: float
    """The rows' share of the input's bytes."""


def refuse_by_first_rows(job: Job, environment: Mapping[str, str] = os.environ) -> None:
    """Refuses a job if the first rows of its first file show that it must fail. Such rows have another header, or too
    many of them do not parse, or a user's function fails on them. Does not check files that only Spark can reach or
    read."""
    if (first := _first_rows(job, environment)) is None:
        return
    spec, parser = job.spec, InputParser(job.spec)
    parsed = parser.parse(first.batch.slice(0, ROWS))
    if first.batch.num_rows and not parsed.rows and first.share > job.max_rejects:
        every = parser.parse(first.batch)
        if not every.rows:
            number, reason, text, _ = next(iter(texts_of(first.batch, every.rejected)))
            raise InputError(
                f"{first.file}: none of its first {first.batch.num_rows:,} rows parses, more than "
                f"--max-rejects {job.max_rejects:g} allows (row {number + 1}: {reason}: {text[:200]!r}); "
                f"correct [input] in {spec.name}, or the file"
            )
    features = Features(spec, FittedState(), ahead=False)
    try:
        for column in spec.columns:
            learning = (n for n, op in enumerate(column.ops) if isinstance(op, Fitted) or op.needs)
            before = column.left_to_spark[: next(learning, len(column.ops))]
            if (
                any(op.name == "python" for op in before)
                and set(column.sources) <= parsed.columns.keys()
            ):
                features.run(column, before, parsed.columns, {})
    except FeatureError as failure:
        raise JobFailure(f"{first.file}: {failure}; nothing was published") from failure


def warn_of_unknown_members(
    job: Job, say: Callable[[str], None], environment: Mapping[str, str] = os.environ
) -> None:
    """Warns of members of the first JSON objects that are no input column, nor a part of one."""
    first = _first_rows(job, environment) if job.spec.input.format == "json" else None
    if first is None:
        return
    columns, names = job.spec.input.read_as, dict[str, None]()
    for line in first.batch["line"][:ROWS].to_pylist():
        with contextlib.suppress(ValueError):  # the job rejects this line
            value = json.loads(line.decode(job.spec.input.encoding))
            names.update(dict.fromkeys(_unknown_members(value, columns)))
    if names:
        say(
            f"warning: {first.file}: {len(names)} JSON members are no input columns, such as "
            f"{', '.join(map(repr, list(names)[:_SHOWN]))}; to use a member, name it in input.columns of "
            f"{job.spec.name}"
        )


def _unknown_members(value: Any, columns: Collection[str], outer: str = "") -> Iterator[str]:
    """Yields the dotted names of the members that are no column. `outer` precedes the names of an inner object."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        full = f"{outer}{name}"
        if isinstance(inner, dict) and any(column.startswith(f"{full}.") for column in columns):
            yield from _unknown_members(inner, columns, f"{full}.")
        elif full not in columns:
            yield full


def _first_rows(job: Job, environment: Mapping[str, str]) -> FirstRows | None:
    """Returns the first rows of the first file for `InputParser`, or None if only Spark reaches or reads the file."""
    source = job.spec.input
    has_hadoop = any(environment.get(name) for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR"))
    is_here = (
        path.startswith("file:") or ("://" not in path and not has_hadoop) for path in job.inputs
    )
    if source.is_table or not all(is_here):
        return None
    files = files_of(job.inputs)
    file = next((file for file in files if file.size), None)
    if file is None or file.path.endswith(SPARK_ONLY) or source.multiline:
        return None
    if source.format == "parquet":
        try:
            with file.open() as stream:
                rows = flattened(
                    next(pq.ParquetFile(stream).iter_batches(ROWS, columns=list(source.columns)))
                )
            typed = stored_cells(rows.select(list(source.columns)), source)
            return (
                None
                if pc.any(typed["_bad"].is_valid()).as_py()
                else FirstRows(file.name, typed, 0.0)
            )
        except (pa.ArrowException, OSError, KeyError, StopIteration):
            return None
    if source.header:
        refuse_header(file.name, first_line(file, source.encoding), source)
    piece = next(pieces_of([file], PIECE_BYTES))
    batch = next(piece.batches())
    rows = batch.filter(pa.array(~are_headers(batch["line"], encoded_headers(source))))
    return FirstRows(file.name, rows, piece.size / sum(file.size for file in files))
