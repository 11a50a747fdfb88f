"""Applies the operators that a table leaves to the loader, and measures the cost for each column.

They run where a row group is decoded. There, a number still has 64 bits, a text that is stored once is processed once,
and results that wait for the shuffle take four bytes a value.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.etl import ops
from sluice.etl.schema import Field
from sluice.etl.spec.spec import Spec
from sluice.ingest.columns import ColumnError, Columns
from sluice.ingest.stage_spec import READ
from sluice.ingest.stages.number_types import to_batch_type

_SAMPLE_ROWS = 4096
_TRIES = 3
_SAMPLES: Mapping[str, npt.NDArray[Any]] = {
    "double": np.linspace(0.01, 0.99, _SAMPLE_ROWS),
    "int64": np.arange(_SAMPLE_ROWS) * 0x1E3779B97F4A7,
}
_CODEC = "lz4_raw"  # the codec that tables are written with
Function = ops.Online


class Operators:
    """Runs a table's online operators. `stored` maps each such column to a function over its stored values. `costs`
    reports each column's cost so far. Any thread may call all of them."""

    def __init__(
        self,
        fields: Sequence[Field],
        state: Any,
        spec: str = "",
        clock: Callable[[], float] = time.thread_time,
    ):
        """`state` is the table's fitted state. `spec` says which operators the ETL applied."""
        online = [f for f in fields if f.online]
        self._fields = fields
        self._state = state
        self._spec = spec
        self._functions = {f.name: ops.online(f, state) for f in online}
        self._chains = {f.name: "+".join(str(step["op"]) for step in f.online) for f in online}
        self.stored: Mapping[str, Function] = {
            name: partial(self._of_stored, name) for name in self._chains
        }
        self._clock, self._lock = clock, threading.Lock()
        self._cpu_s = dict.fromkeys(self._chains, 0.0)
        self._rows = dict.fromkeys(self._chains, 0)
        self._bytes: dict[str, tuple[float, float]] = {}

    def filled(self, columns: Columns) -> Columns:
        """Returns the columns with a fill only for columns without online operators."""
        return replace(
            columns, fill={n: value for n, value in columns.fill.items() if n not in self.stored}
        )

    def made(self, columns: Columns, names: Sequence[str] = ()) -> OperatorColumns | None:
        """Returns what makes these columns, or only those in `names`, from a decoded row group. None: no operator makes
        one of them."""
        names = names or columns.names
        stored = {name: own for name, own in self.stored.items() if name in names}
        return OperatorColumns(stored, columns, names) if stored else None

    def _of_stored(
        self, name: str, values: npt.NDArray[Any] | pa.Array
    ) -> npt.NDArray[Any] | pa.Array:
        began = self._clock()
        made = to_batch_type(self._functions[name](values))
        self._charge(name, self._clock() - began, values, made)
        return made

    def _charge(
        self,
        name: str,
        cpu_s: float,
        values: npt.NDArray[Any] | pa.Array,
        made: npt.NDArray[Any] | pa.Array,
    ) -> None:
        with self._lock:
            self._rows[name] += len(made)
            self._cpu_s[name] += cpu_s
            first = name not in self._bytes
            if first:
                self._bytes[name] = 0.0, 0.0
        if first:
            self._bytes[name] = _stored(values), _stored(made)

    def costs(self) -> list[dict[str, Any]]:
        """Lists for each column its operators, their stage, processor seconds a row, and stored bytes a row before and
        after them."""
        with self._lock:
            return [
                {
                    "column": name,
                    "operators": chain,
                    "stage": READ.name,
                    "cpu_s": self._cpu_s[name] / self._rows[name],
                    "bytes_before": self._bytes[name][0],
                    "bytes_after": self._bytes[name][1],
                }
                for name, chain in self._chains.items()
                if self._rows[name]
            ]

    def others(self) -> list[dict[str, Any]]:
        """Lists the operators that the ETL applied and could have left to the loader: column, operators, their stage,
        and processor seconds a row. The cost is measured now on made-up values, because it depends little on them."""
        if not self._spec:
            return []
        kinds = {f.name for f in self._fields if f.role in ("dense", "sparse") and not f.online}
        found = []
        for column in Spec.parse(self._spec).columns:
            number = next(
                (n for n in range(len(column.ops)) if all(op.online_too for op in column.ops[n:])),
                None,
            )
            if (
                column.name not in kinds
                or number is None
                or (self._state is None and column.fitted)
            ):
                continue
            left = replace(column, online=number, left_as=column.ops[number].left_as)
            steps = left.left_to_loader
            function = ops.online(
                Field(name=left.name, role=left.role, type=left.type, online=steps), self._state
            )
            values = _SAMPLES[left.type]
            times = []
            for _ in range(_TRIES):
                began = self._clock()
                function(values)
                times.append(self._clock() - began)
            found.append(
                {
                    "column": column.name,
                    "operators": "+".join(str(step["op"]) for step in steps),
                    "stage": READ.name,
                    "cpu_s": min(times) / _SAMPLE_ROWS,
                }
            )
        return found


class OperatorColumns:
    """A table's columns as they are loaded: online operators change some, and the others stay as they are stored."""

    selection = None
    typed: Mapping[str, pa.DataType] = MappingProxyType({})
    optional = frozenset[str]()
    more_bytes = 0  # the stored columns of operators are texts or have eight bytes a value

    def __init__(self, functions: Mapping[str, Function], columns: Columns, names: Sequence[str]):
        self._functions, self.sources = functions, tuple(names)
        kinds = {name: pa.from_numpy_dtype(columns.id_kind(name)) for name in columns.sparse}
        self._types = {
            name: pa.list_(kinds[name]) if name in columns.bags else kinds.get(name, pa.float32())
            for name in functions
        }
        self.row_bytes = round(sum(4 + 4 * columns.bags.get(name, 0.0) for name in functions))

    def schema(self, stored: pa.Schema) -> pa.Schema:
        """Returns the schema of `table`'s result for a stored table of this schema."""
        return pa.schema(
            [
                pa.field(f.name, self._types.get(f.name, f.type))
                for f in map(stored.field, self.sources)
            ]
        )

    def dictionary_columns(self, stored: pa.Schema, _footer: Any) -> list[str]:
        """Returns the columns to read as dictionaries: texts, so that each distinct text is processed once."""
        return [f.name for f in stored if pa.types.is_string(f.type)]

    def table(self, stored: pa.Table) -> pa.Table:
        """Makes the columns of a row group. Raises ColumnError if an operator fails."""
        made = {}
        for name in self.sources:
            made[name] = stored.column(name)
            if name in self._functions:
                try:
                    made[name] = pa.chunked_array(
                        [pa.array(self._functions[name](chunk)) for chunk in made[name].chunks],
                        self._types[name],
                    )
                except (Exception, SystemExit, KeyboardInterrupt) as error:
                    raise ColumnError(
                        f"the operators of column {name!r} failed: {type(error).__name__}: {error}"
                    ) from error
        return pa.table(made)


def _stored(values: npt.NDArray[Any] | pa.Array) -> float:
    """Estimates the bytes that a value takes in a file, from some of the values."""
    if isinstance(values, pa.Array):
        some = values.slice(0, _SAMPLE_ROWS)
        if pa.types.is_dictionary(some.type):
            some = some.dictionary_decode()
        buffers = pa.concat_arrays([some]).buffers()  # of the slice alone
        return sum(len(pa.compress(one, _CODEC, asbytes=True)) for one in buffers if one) / max(
            1, len(some)
        )
    some = np.ascontiguousarray(values[:_SAMPLE_ROWS])
    return len(pa.compress(some.tobytes(), _CODEC, asbytes=True)) / max(1, len(some))
