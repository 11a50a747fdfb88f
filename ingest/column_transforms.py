"""Makes a table's transforms callable: `bound` for a loader's pipeline, `ColumnTransforms` for a server's rows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.etl import ops
from sluice.etl.ops.base import as_one_column, id_kind
from sluice.etl.ops.chain import applied
from sluice.etl.ops.lists import flat, relisted
from sluice.etl.schema import Field
from sluice.etl.spec.permission import Permission
from sluice.etl.spec.table_transform import KINDS, TableTransform, inputs_of, transformed
from sluice.ingest.columns import lengths_name
from sluice.ingest.process import protocol
from sluice.ingest.process.matrix_function import takes_matrix
from sluice.ingest.stages.transform import Arrays, Transform, function_of, visible_columns
from sluice.ingest.stages.transformer import apply_result

if TYPE_CHECKING:
    from sluice.etl.table.table import FeatureTable

_PLACE = (
    "put its module where Python finds it (PYTHONPATH), as on the host where the run began, or train another "
    "model without the transform"
)


def bound(
    transforms: Sequence[TableTransform], stored: Sequence[Field], permission: Permission
) -> list[Transform]:
    """Makes transforms over these stored columns ready to be called. Raises an error now for one that cannot run."""
    made, fields = [], tuple(stored)
    for transform in transforms:
        before, fields = fields, transformed(fields, (transform,))
        there, now = {f.name: f for f in before}, {f.name: f for f in fields}
        inputs = inputs_of(transform, before)
        names = [output.name for output in transform.outputs] or list(inputs)
        added = tuple(name for name in names if name not in there)
        outputs = {
            name: now[name].cardinality if now[name].role != "dense" else None for name in names
        }
        make = functools.partial(
            Transform, name=transform.name, reads=inputs, outputs=outputs, added=added
        )
        if transform.ops:
            made.append(make(Chain(transform, [there[name] for name in inputs]), pure=True))
        else:
            try:
                permission.load(transform.function, f"transform {transform.name!r}")
            except ops.OperatorError as error:
                why = "" if "--allow-code" in str(error) else f"transform {transform.name!r}: "
                raise ops.OperatorError(f"{why}{error}{f'; {_PLACE}' if why else ''}") from None
            made.append(make(transform.function, limit_s=transform.limit_s, pure=transform.pure))
    return list(_merge_equal(made, fields))


def _merge_equal(transforms: Iterable[Transform], fields: Sequence[Field]) -> Iterator[Transform]:
    """Merges adjacent chains that change one column each by the same operators: they take a matrix of these columns, in
    the order of `fields`, in which they may lie together."""
    places = {f.name: number for number, f in enumerate(fields)}

    def kind(transform: Transform) -> Any:
        chain = transform.function
        if not isinstance(chain, Chain) or not chain.equals:
            return transform.name
        return chain.equals, id_kind(fields[places[transform.reads[0]]].cardinality)

    for _, run in itertools.groupby(transforms, kind):
        same = list(run)
        names = sorted(
            (name for transform in same for name in transform.reads), key=places.__getitem__
        )
        if len(same) == 1 or len(set(names)) < len(same):
            yield from same
        else:
            chain: Any = same[0].function
            yield Transform(
                takes_matrix(chain.of_matrix),
                "+".join(transform.name for transform in same),
                pure=True,
                reads=tuple(names),
                outputs={
                    name: size for transform in same for name, size in transform.outputs.items()
                },
            )


class ColumnTransforms:
    """A table's transforms over columns outside a pipeline, such as a server's rows."""

    def __init__(self, calls: Sequence[Transform], fields: Sequence[Field]):
        self._calls = [(call, function_of(call)) for call in calls]
        self._fields = tuple(f for f in fields if f.role in KINDS)
        self._bags = frozenset(f.name for f in self._fields if f.role == "id_list")

    @classmethod
    def of(cls, table: FeatureTable) -> ColumnTransforms:
        return cls(bound(table.transforms, table.stored, table.permission), table.fields)

    def __call__(self, arrays: Arrays, rows: int) -> Arrays:
        """Returns the columns after all transforms, in a batch's types. A column of bags comes with `NAME.lengths`."""
        if not self._calls:
            return arrays
        columns: Arrays = {}
        for f in self._fields:
            is_bag = f.name in self._bags
            empty = _zeros(f, 0 if is_bag else rows)
            # The values are copied, because a function may write into them.
            columns[f.name] = empty if f.made else np.array(arrays[f.name], empty.dtype)
            if is_bag:
                lengths = arrays.get(lengths_name(f.name), np.zeros(rows))
                columns[lengths_name(f.name)] = np.array(lengths, np.int32)
        for call, function in self._calls:
            names = (column for name in call.reads for column in (name, lengths_name(name)))
            given = protocol.call_function(
                function,
                visible_columns(call, {name: columns[name] for name in names if name in columns}),
            )
            columns |= apply_result(
                call, given, columns, self._bags, {}, f"transform {call.name!r}"
            )
        return columns


class Chain:
    """A transform of built-in operators over some columns of a batch."""

    def __init__(self, transform: TableTransform, inputs: Sequence[Field]):
        self._transform, self._inputs = transform, tuple(inputs)
        try:
            self(self._nothing())
        except (ops.OperatorError, TypeError, ValueError, pa.ArrowException) as error:
            raise transform.fault(str(error)) from None

    @property
    def equals(self) -> tuple[Any, ...]:
        """Equal for chains that do the same to their column. Empty: it does not change one column of single values."""
        names = [f.name for f in self._inputs]
        changed = [output.name for output in self._transform.outputs]
        single = len(names) == 1 and names == changed and self._inputs[0].role != "id_list"
        return (self._transform.ops, self._inputs[0].role) if single else ()

    def of_matrix(self, matrix: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Applies the operators to a matrix [rows, columns] of columns like its own."""
        columns = np.ascontiguousarray(matrix.T)
        made = applied(self._transform.ops, pa.array(columns.reshape(-1)))
        values: npt.NDArray[Any] = made.to_numpy(zero_copy_only=False)
        return values.reshape(columns.shape).T

    def __call__(self, arrays: Arrays) -> Arrays:
        columns = [_column(f, arrays) for f in self._inputs]
        values = applied(
            self._transform.ops, as_one_column(columns, [f.name for f in self._inputs])
        )
        outputs = [output.name for output in self._transform.outputs]
        if pa.types.is_list(values.type):
            elements, lengths = flat(values)
            return {
                outputs[0]: elements.to_numpy(zero_copy_only=False),
                lengths_name(outputs[0]): lengths,
            }
        return {outputs[0]: values.to_numpy(zero_copy_only=False)}

    def _nothing(self) -> Arrays:
        """One row of zeros, to check that the operators accept these columns."""
        arrays: Arrays = {}
        for f in self._inputs:
            arrays[f.name] = _zeros(f, 1)
            if f.role == "id_list":
                arrays[lengths_name(f.name)] = np.ones(1, np.int32)
        return arrays


def _zeros(field: Field, rows: int) -> npt.NDArray[Any]:
    return np.zeros(rows, np.float32 if field.role == "dense" else id_kind(field.cardinality))


def _column(field: Field, arrays: Arrays) -> pa.Array:
    values = pa.array(arrays[field.name])
    return (
        relisted(values, arrays[lengths_name(field.name)].astype(np.int64))
        if field.role == "id_list"
        else values
    )
