"""Runs batches through transform stages: `Transformer`. `apply_result` checks what a function returned and writes it
into the batch."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from numpy.lib.array_utils import byte_bounds

from sluice.ingest.columns import Columns
from sluice.ingest.memory.governor import Charge
from sluice.ingest.stages.batch import BatchSeries, columns_of, join_ids, lengths_name
from sluice.ingest.stages.counters import StageCounters, WorkerClock
from sluice.ingest.stages.number_types import ValueRefused, numbers, same_bytes
from sluice.ingest.stages.transform import Arrays, Fused, Given, Transform, TransformError

_AT_ONCE = 8192  # rows that pass all fused stages together, so that they stay in the core's cache
_LENGTHS = lengths_name("")


class TransformCall(Protocol):
    """Calls a transform's function on batch `number` of a series; `where` names it in errors."""

    def __call__(self, series: BatchSeries, number: int, arrays: Arrays, where: str) -> Given: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Step:
    """A transform stage in one run of a pipeline."""

    fused: Fused
    tally: StageCounters
    runs: Callable[[], list[TransformCall]]
    """Makes the callers of its functions for one worker."""


class Transformer:
    """One worker of transform stage number `first`. It also does the work of the stages that are fused with it."""

    def __init__(
        self,
        first: int,
        stages: Sequence[Step],
        columns: Columns,
        stint: WorkerClock,
        until: Callable[[], int],
    ):
        """`until` returns the number of the next stage that has its own workers."""
        self._first = first
        self._stages = stages
        self._columns = columns
        self._stint = stint
        self._until = until
        self._runs: dict[int, list[TransformCall]] = {}

    def __call__(self, series: BatchSeries, charge: Charge) -> BatchSeries:
        until = self._until()
        self._leave(until)
        for number in range(self._first, until):
            self._runs[number] = self._runs.get(number) or self._stages[number].runs()
        alone, rows = until == self._first + 1, series.floats.shape[2]
        at_once = series.steps if alone else max(1, _AT_ONCE // rows)
        for low in range(0, series.steps, at_once):
            for number in range(self._first, until):
                self._stint.go_over(self._stages[number].tally)
                series = self._through(number, series, range(low, min(low + at_once, series.steps)))
        for number in range(self._first + 1, until):
            self._stint.passed(self._stages[number].tally, sum(series.rows), series.nbytes)
        series.charge.release()
        return series.replaced(charge=charge, done=until)

    def close(self) -> None:
        """Releases the worker's processes when it leaves."""
        self._leave(self._first)

    def _leave(self, until: int) -> None:
        """Closes the callers of stage `until` and all later stages."""
        for number in [n for n in self._runs if n >= until]:
            for run in self._runs.pop(number):
                run.close()

    def _through(self, number: int, series: BatchSeries, batches: range) -> BatchSeries:
        """Runs some batches of a series through one stage."""
        for n in batches:
            for transform, run in zip(
                self._stages[number].fused.transforms, self._runs[number], strict=True
            ):
                where = f"transform {transform.name!r}, epoch {series.schedule.epoch}, step {series.step + n}"
                arrays = columns_of(series, n, self._columns)
                changed = apply_result(
                    transform,
                    run(series, n, arrays, where),
                    arrays,
                    self._columns.bags,
                    self._columns.cardinalities,
                    where,
                )
                if changed:
                    ids = list(series.ids)
                    ids[n] = join_ids(self._columns, {**arrays, **changed}, series.floats.shape[2])
                    series = series.replaced(ids=tuple(ids))
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
    has the known cardinalities of columns."""
    if given is not None and not (
        isinstance(given, Mapping) and all(isinstance(name, str) for name in given)
    ):
        raise TransformError(
            f"{where}: it returned {type(given).__name__}, which is neither a dict of arrays by column name nor None"
        )
    new = {name: value for name, value in (given or {}).items() if value is not arrays.get(name)}
    if transform.outputs:
        new = _expected(transform, new, arrays, where)
    _part(new, arrays)
    changed = _lengths(new, arrays, bags, where)
    for name, value in new.items():
        if name not in changed:
            _take(name, value, arrays, where)
    for name, size in (transform.outputs or sizes).items():
        if size is not None and (
            transform.outputs or not transform.columns or name in transform.columns
        ):
            _check_ids(name, changed.get(name, arrays[name]), size, where)
    return changed


def _part(new: Arrays, arrays: Arrays) -> None:
    """Copies returned arrays that overlap memory of columns that will be written, as after
    `columns["a"], columns["b"] = columns["b"], columns["a"]`."""
    own = [arrays[name] for name in new if name in arrays]
    if len(own) < 2:  # numpy handles copying a column onto itself
        return
    ids = set(map(id, own))
    low = min(map(byte_bounds, own))[0]
    high = max(byte_bounds(array)[1] for array in own)
    for name, value in new.items():
        array = np.asarray(value)
        begin, end = byte_bounds(array)
        if begin < high and low < end and (array.base is not None or id(array) in ids):
            new[name] = array.copy()


def _expected(
    transform: Transform, new: Mapping[str, Any], arrays: Arrays, where: str
) -> dict[str, Any]:
    """Returns the outputs among what came back. Other columns may only come back unchanged."""
    found = {}
    for name, value in new.items():
        if name.removesuffix(_LENGTHS) in transform.outputs:
            found[name] = value
        elif name not in arrays or not same_bytes(np.asarray(value), arrays[name]):
            how = "came back changed, and" if name in arrays else "came back, which"
            raise TransformError(
                f"{where}: column {name!r} {how} is not one of its outputs "
                f"({', '.join(transform.outputs)}); add it to them"
            )
    for name in transform.added:
        if name not in found or (lengths_name(name) in arrays and lengths_name(name) not in found):
            lacking = name if name not in found else lengths_name(name)
            raise TransformError(
                f"{where}: it returned no column {lacking!r}, which its outputs name"
            )
    return found


def _check_ids(name: str, ids: npt.NDArray[Any], size: int, where: str) -> None:
    if ids.size and not (ids.min() >= 0 and ids.max() < size):
        at = int(np.argmax((ids < 0) | (ids >= size)))
        raise TransformError(
            f"{where}: column {name!r} came back with id {ids[at]} (number {at}), but its cardinality "
            f"is {size}, so ids go from 0 to {size - 1}; give a larger cardinality, or fewer ids"
        )


def _lengths(new: Mapping[str, Any], arrays: Arrays, bags: Container[str], where: str) -> Arrays:
    """Checks bags that came back with new lengths. Ids and lengths must fit each other."""
    changed: Arrays = {}
    for name in (name for name in new if name.endswith(_LENGTHS)):
        bag = name.removesuffix(_LENGTHS)
        if bag not in bags or name not in arrays:
            continue
        lengths, ids = np.asarray(new[name]), np.asarray(new.get(bag, arrays[bag]))
        if (
            lengths.shape != arrays[name].shape
            or lengths.min(initial=0) < 0
            or lengths.sum() != ids.size
        ):
            raise TransformError(
                f"{where}: column {name!r} came back with {lengths.size} lengths that add up to "
                f"{lengths.sum()}, for {arrays[name].size} rows and {ids.size} ids"
            )
        kind = arrays[bag].dtype
        if not _whole(ids.dtype, kind):
            raise TransformError(
                f"{where}: column {bag!r} came back as {ids.dtype}, which does not become {kind}"
            )
        changed |= {
            name: lengths.astype(np.int32),
            bag: _fitting(ids, kind.type, f"{where}: column {bag!r}"),
        }
    return changed


def _take(name: str, value: Any, arrays: Arrays, where: str) -> None:
    what = f"{where}: column {name!r}"
    if name not in arrays:
        raise TransformError(
            f"{what} is not in the table; a transform changes columns and does not add any"
        )
    value, into = np.asarray(value), arrays[name]
    if value.shape != into.shape:
        raise TransformError(f"{what} came back with shape {value.shape} instead of {into.shape}")
    if not _whole(value.dtype, into.dtype):
        raise TransformError(
            f"{what} came back as {value.dtype}, which does not become {into.dtype}"
        )
    np.copyto(into, _fitting(value, into.dtype.type, what))


def _whole(given: np.dtype[Any], kind: np.dtype[Any]) -> bool:
    """Whether numbers of this type may be converted to a column's type. Each value is checked separately."""
    return np.can_cast(given, np.int32 if kind == np.uint32 else kind, "same_kind")


def _fitting(value: npt.NDArray[Any], kind: Any, what: str) -> npt.NDArray[Any]:
    if np.can_cast(value.dtype, kind):
        return value
    try:
        return numbers(value.reshape(-1), kind).reshape(value.shape)
    except ValueRefused as refused:
        raise TransformError(f"{what} came back with {refused}") from None
