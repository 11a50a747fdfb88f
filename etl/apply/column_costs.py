"""Measures what it costs to read a column, with its operators applied in the ETL or in the loader: `forms`.

Each form of a column is written as in the table, then read back and processed as the loader does it. Costs are
processor time of this thread. Bytes are those of the Parquet pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.etl import ops
from sluice.etl.apply.features import Features, cardinalities, stored
from sluice.etl.schema import Field
from sluice.etl.spec.columns import ColumnSpec, leave_to_loader
from sluice.etl.spec.nested_columns import join_chunks
from sluice.etl.spec.row_split import Keys
from sluice.etl.spec.spec import Spec
from sluice.etl.spec.toml_keys import SpecError
from sluice.etl.table.data_files import arrow_schema, with_dictionaries
from sluice.etl.table.fitted_state import FittedState

_TRIES = 5
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way to store a column, with its costs a row."""

    left: tuple[str, ...]
    """The names of the operators that are left to the loader."""
    bytes: float
    decode_s: float
    """Processor seconds of reading it."""
    apply_s: float = 0.0
    """Processor seconds of the operators that are left."""


def ways(column: ColumnSpec, kinds: Mapping[str, str]) -> tuple[list[ColumnSpec], str]:
    """Returns the ways to store the column, first with all its operators applied. Also returns why none can be left to
    the loader, if none can."""
    found, why = (
        [leave_to_loader(column, None, kinds, column.name)],
        "it has no operators" if not column.ops else "",
    )
    for number in range(len(column.ops)):
        try:
            found.append(leave_to_loader(column, number, kinds, column.name))
        except SpecError as error:
            why = why or str(error).partition(": ")[2]
    return found, why if len(found) == 1 else ""


def forms(
    spec: Spec,
    state: FittedState,
    columns: Mapping[str, pa.Array],
    keys: Keys | None,
    *,
    clock: Clock = time.thread_time,
) -> dict[str, list[Form]]:
    """Returns all forms of each column that may be left to the loader. `columns` are a row group's rows, as the loader
    processes them."""
    features = Features(spec, state)
    extras = features.extras(columns, keys)
    sizes = cardinalities(spec, state)
    found = {}
    for column in spec.columns:
        if len(there := ways(column, spec.kinds)[0]) > 1:
            found[column.name] = [
                _measured(
                    spec.field(one, sizes.get(one.name)),
                    stored(features.run(one, one.left_to_spark, columns, extras), spec, one),
                    state,
                    clock,
                )
                for one in there
            ]
    return found


def _measured(field: Field, values: pa.Array, state: FittedState, clock: Clock) -> Form:
    schema = arrow_schema([field])
    texts = with_dictionaries(schema)
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table([values], [field.name]).cast(schema),
        sink,
        compression="lz4",
        use_dictionary=texts,
        write_page_checksum=True,
        store_schema=False,
        row_group_size=len(values),
    )
    file = pq.ParquetFile(
        pa.BufferReader(sink.getvalue()), read_dictionary=texts, page_checksum_verification=True
    )
    decode_s, table = _timed(lambda: file.read_row_group(0, use_threads=False), clock)
    apply_s = 0.0
    if field.online:
        function = ops.online(field, state)
        array = join_chunks(table.column(0))
        apply_s, _ = _timed(lambda: function(array), clock)
    rows = max(1, len(values))
    stored_bytes = file.metadata.row_group(0).column(0).total_compressed_size
    return Form(
        left=tuple(str(step["op"]) for step in field.online),
        bytes=stored_bytes / rows,
        decode_s=decode_s / rows,
        apply_s=apply_s / rows,
    )


def _timed(work: Callable[[], Any], clock: Clock) -> tuple[float, Any]:
    """Returns the median seconds of a few tries, and the result of the work."""
    times = []
    for _ in range(_TRIES):
        began = clock()
        made = work()
        times.append(clock() - began)
    return sorted(times)[_TRIES // 2], made
