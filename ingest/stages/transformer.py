"""Runs batches through transform stages: `Transformer`. `apply_result` checks what a function returned and writes it
into the batch."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.array_utils import byte_bounds

from sluice.ingest.columns import Columns, column_of, lengths_name
from sluice.ingest.flow.number_types import ValueRefused, numbers, same_bytes
from sluice.ingest.memory.governor import Charge
from sluice.ingest.stages.batch import BatchSeries, Finisher, columns_of, join_ids
from sluice.ingest.stages.batch_functions import BatchFunctionCaller
from sluice.ingest.stages.quarantine import Quarantine
from sluice.ingest.stages.transform import Arrays, Given, Transform, TransformError
from sluice.ingest.stages.transform_worker import TransformStage


@dataclass(eq=False)
class Transformer:
    """One worker of a transform stage."""

    stages: Sequence[TransformStage]
    """The transforms of the stage. They run as one, with one set of counters."""
    finisher: Finisher
    columns: Columns
    quarantine: Quarantine
    is_last: bool

    def __post_init__(self) -> None:
        self.callers = [
            BatchFunctionCaller(stage, self.columns, self.quarantine) for stage in self.stages
        ]

    def __call__(self, series: BatchSeries, charge: Charge) -> BatchSeries:
        for n in range(series.steps):
            series = self._transform(series, n)
        return self.finisher.pass_on(series, charge, is_last=self.is_last)

    def prepare(self) -> None:
        """Starts the worker's processes."""
        for caller in self.callers:
            caller.worker.prepare()

    def close(self) -> None:
        """Releases the worker's processes when the worker stops."""
        for caller in self.callers:
            caller.worker.close()
        self.callers = []

    def _transform(self, series: BatchSeries, n: int) -> BatchSeries:
        """Runs batch `n` of a series through the stage."""
        for call in self.callers:
            transform = call.transform
            where = f"transform {transform.name!r}, epoch {series.schedule.epoch}, step {series.step + n}"
            arrays = columns_of(series, n, self.columns)
            changed = apply_result(
                transform,
                call(series, n, arrays, where),
                arrays,
                self.columns.bags,
                call.cardinalities,
                where,
            )
            if changed:
                ids = list(series.ids)
                ids[n] = join_ids(self.columns, {**arrays, **changed}, series.floats.shape[2])
                series = replace(series, ids=tuple(ids))
        return series


def apply_result(  # noqa: PLR0917
    transform: Transform,
    given: Given,
    arrays: Arrays,
    bags: Container[str],
    sizes: Mapping[str, int],
    where: str,
) -> Arrays:
    """Writes what a function returned into the arrays of its batch. None: it wrote into its input.

    Returns the columns of `bags` whose lengths changed, with the new lengths, because these need new arrays. `sizes`
    has the cardinalities of the columns that it got, as far as they are known."""
    if given is not None and not (
        isinstance(given, Mapping) and all(isinstance(name, str) for name in given)
    ):
        raise TransformError(
            f"{where}: it returned {type(given).__name__}, which is neither a dict of arrays by column name nor None"
        )
    new = {name: value for name, value in (given or {}).items() if value is not arrays.get(name)}
    if transform.outputs:
        new = _outputs_of(transform, new, arrays, where)
    _copy_overlapping(new, arrays)
    changed = _changed_bags(new, arrays, bags, where)
    for name, value in new.items():
        if name not in changed:
            _write_column(name, value, arrays, where)
    for name, size in (transform.outputs or sizes).items():
        if size is not None:
            _check_ids(name, changed.get(name, arrays[name]), size, where)
    return changed


def _copy_overlapping(new: Arrays, arrays: Arrays) -> None:
    """Copies returned arrays that share memory with columns that will be written, as after
    `columns["a"], columns["b"] = columns["b"], columns["a"]`."""
    own = [arrays[name] for name in new if name in arrays]
    if len(own) < 2:  # numpy handles copying a column onto itself
        return
    ids = set(map(id, own))
    low = min(map(byte_bounds, own))[0]
    high = max(byte_bounds(array)[1] for array in own)
    for name, value in new.items():
        array = np.asarray(value)
        start, end = byte_bounds(array)
        if start < high and low < end and (array.base is not None or id(array) in ids):
            new[name] = array.copy()


def _outputs_of(
    transform: Transform, new: Mapping[str, Any], arrays: Arrays, where: str
) -> dict[str, Any]:
    """Returns the returned columns that are outputs. Raises TransformError if another column was changed, or an added
    one is missing."""
    outputs = {}
    for name, value in new.items():
        if column_of(name) in transform.outputs:
            outputs[name] = value
        elif name not in arrays or not same_bytes(np.asarray(value), arrays[name]):
            how = "came back changed, and" if name in arrays else "came back, which"
            raise TransformError(
                f"{where}: column {name!r} {how} is not one of its outputs "
                f"({', '.join(transform.outputs)}); add it to them"
            )
    for name in transform.added:
        if name not in outputs or (
            lengths_name(name) in arrays and lengths_name(name) not in outputs
        ):
            lacking = name if name not in outputs else lengths_name(name)
            raise TransformError(
                f"{where}: it returned no column {lacking!r}, which its outputs name"
            )
    return outputs


def _check_ids(name: str, ids: npt.NDArray[Any], size: int, where: str) -> None:
    if ids.size and not (ids.min() >= 0 and ids.max() < size):
        at = int(np.argmax((ids < 0) | (ids >= size)))
        raise TransformError(
            f"{where}: column {name!r} came back with id {ids[at]} (number {at}), but its cardinality "
            f"is {size}, so ids go from 0 to {size - 1}; give a larger cardinality, or fewer ids"
        )


def _changed_bags(
    new: Mapping[str, Any], arrays: Arrays, bags: Container[str], where: str
) -> Arrays:
    """Returns the bags that came back with new lengths. Raises TransformError if ids and lengths do not fit.

    A function may also have written into the lengths that it got."""
    changed: Arrays = {}
    for bag in (name for name in arrays if name in bags):
        name = lengths_name(bag)
        lengths = np.asarray(new.get(name, arrays[name]))
        ids = np.asarray(new.get(bag, arrays[bag]))
        if (
            lengths.shape != arrays[name].shape
            or lengths.min(initial=0) < 0
            or lengths.sum() != ids.size
        ):
            raise TransformError(
                f"{where}: column {name!r} came back with {lengths.size} lengths that add up to "
                f"{lengths.sum()}, for {arrays[name].size} rows and {ids.size} ids"
            )
        if name not in new and ids.shape == arrays[bag].shape:
            continue  # all is in its place, or is written there
        changed |= {
            name: lengths.astype(np.int32),
            bag: _convert(ids, arrays[bag].dtype, f"{where}: column {bag!r}"),
        }
    return changed


def _write_column(name: str, value: Any, arrays: Arrays, where: str) -> None:
    what = f"{where}: column {name!r}"
    if name not in arrays:
        raise TransformError(
            f"{what} is not in the table; a transform changes columns and does not add any"
        )
    value = np.asarray(value)
    into = arrays[name]
    if value.shape != into.shape:
        raise TransformError(f"{what} came back with shape {value.shape} instead of {into.shape}")
    np.copyto(into, _convert(value, into.dtype, what))


def _convert(value: npt.NDArray[Any], kind: np.dtype[Any], what: str) -> npt.NDArray[Any]:
    """Converts numbers to a column's type. Raises TransformError for a type or a value that does not fit."""
    if np.can_cast(value.dtype, kind):
        return value
    if not np.can_cast(value.dtype, np.int32 if kind == np.uint32 else kind, "same_kind"):
        raise TransformError(f"{what} came back as {value.dtype}, which does not become {kind}")
    try:
        return numbers(value.reshape(-1), kind.type).reshape(value.shape)
    except ValueRefused as refused:
        raise TransformError(f"{what} came back with {refused}") from None
