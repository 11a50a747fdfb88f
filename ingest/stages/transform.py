"""Named functions over the columns of a batch: `Transform`. Adjacent ones share a stage, unless they are to be
apart."""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.ingest.columns import Columns
from sluice.ingest.errors import LoadingError
from sluice.ingest.memory.governor import Charge
from sluice.ingest.stages.batch import Stretch, columns_of, joined, lengths_name
from sluice.ingest.stages.counters import StageCounters, WorkerClock
from sluice.ingest.stages.number_types import ValueRefused, numbers

_AT_ONCE = 8192  # rows that pass all stages that are fused, before the next ones do: they stay in the core's cache

Arrays = dict[str, npt.NDArray[Any]]
Given = Mapping[str, npt.NDArray[Any]] | None
Function = Callable[[Any], Any]


class TransformError(LoadingError):
    """A user's function gave back what does not fit: the message names it, the column and the batch."""


@dataclass(frozen=True, slots=True)
class Transform:
    """`function` takes a batch as a dict of numpy arrays by column name. It may write into them, or return new arrays
    of some columns, of the same length; the others stay as they are. A column of bags comes as all its ids, and as
    `NAME.lengths`; if both are returned, the bags may have got other lengths."""

    name: str
    function: Function | str
    """The function; given by name, as `module:function`, it has a stage of its own, which can also run in processes
    (`sluice.ingest.stages.transform_runner`)."""
    arrow: bool = False
    """Whether it takes a pyarrow.RecordBatch instead (bags are lists), and returns one, with the columns that it
    changes."""
    apart: bool = False
    """Whether it has a stage of its own: its own workers, and its own line in every table."""
    pure: bool = False
    """Whether it writes nothing into what it gets, so that no copy is kept for the case that it fails on some row."""
    columns: tuple[str, ...] = ()
    """The columns that the function gets; if empty: all. Other columns are neither copied nor sent."""
    limit_s: float | None = None
    """The time that a batch may take in a process; a worker that takes longer is ended."""
    memory_limit: int | None = None
    """The bytes that the function may take in a process, beyond the process's own."""

    def __post_init__(self) -> None:
        if isinstance(self.function, str):
            if not re.fullmatch(r"[\w.]+:\w+", self.function) or self.function.startswith("__main__:"):
                raise TransformError(f"transform {self.name!r}: {self.function!r} is not module:function, in a module "
                                     "that can be imported")
        elif self.limit_s is not None or self.memory_limit is not None:
            raise TransformError(f"transform {self.name!r}: limits hold in processes only; name the function as "
                                 "module:function")

    @classmethod
    def of(cls, given: UserTransform) -> Transform:
        """What a user gives: a transform, a function, `module:function`, or a name with either. A function alone is
        named after itself; one that a fresh process can import may run in processes, all others run in threads."""
        if isinstance(given, Transform):
            return given
        if isinstance(given, tuple):
            return cls(*given)
        if isinstance(given, str):
            return cls(given.partition(":")[2] or given, given)
        if not callable(given):
            raise TransformError(f"transforms: {given!r} is no function; give functions, module:function, or pairs of "
                                 "a name and either")
        function: Any = given
        while isinstance(function, functools.partial):
            function = function.func
        name = getattr(function, "__name__", type(function).__name__).strip("<>")
        return cls(name, address_of(given) or given)

    @property
    def movable(self) -> bool:
        """Whether it can also run in processes."""
        return isinstance(self.function, str) and not self.arrow

    @property
    def code(self) -> str | None:
        """Where the function is found, as `module:function`; None for code without a name that others can import: a
        notebook's, a closure, a lambda."""
        return self.function if isinstance(self.function, str) else address_of(self.function)


def transforms_of(given: Iterable[UserTransform]) -> tuple[Transform, ...]:
    """The transforms that a user gives, each under a name of its own."""
    if isinstance(given, (str, Transform)) or not isinstance(given, Iterable):
        raise TransformError(f"transforms: give a list, transforms=[{given!r}]")
    found = tuple(Transform.of(one) for one in given)
    for name, count in Counter(t.name for t in found).items():
        if count > 1:
            raise TransformError(f"transforms: {count} are called {name!r}; give each a name of its own, as in "
                                 f"transforms=[('first', {name}), ('second', {name})]")
    return found


def address_of(function: Any) -> str | None:
    """`module:function`, if a fresh process finds this very function there; otherwise None."""
    module, name = str(getattr(function, "__module__", "")), str(getattr(function, "__qualname__", ""))
    there = sys.modules.get(module) if module != "__main__" else None
    if there is None or getattr(there, name, None) is not function:
        return None
    return f"{module}:{name}" if PathFinder.find_spec(module.partition(".")[0]) is not None else None


UserTransform = Transform | Function | str | tuple[str, Function | str]
"""One transform as a user may write it."""


@dataclass(frozen=True, slots=True)
class Fused:
    """Transforms of one stage: a batch passes all of them while it is in the core's cache."""

    transforms: tuple[Transform, ...]

    @property
    def name(self) -> str:
        return "+".join(t.name for t in self.transforms)

    @property
    def movable(self) -> bool:
        """Whether it can also run in processes."""
        return all(t.movable for t in self.transforms)


def fused(transforms: Iterable[Transform]) -> tuple[Fused, ...]:
    """Makes one stage of each series of adjacent transforms that are not to be apart."""
    stages: list[Fused] = []
    for apart, some in itertools.groupby(transforms, lambda t: t.apart or t.movable):
        run = tuple(some)
        stages += [Fused((t,)) for t in run] if apart else [Fused(run)]
    return tuple(stages)


class TransformCall(Protocol):
    """Calls a transform's function on batch `number` of a stretch; `where` names it in errors."""

    def __call__(self, stretch: Stretch, number: int, arrays: Arrays, where: str) -> Given: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Step:
    """A stage of transforms in one run of a pipeline."""

    fused: Fused
    tally: StageCounters
    runs: Callable[[], list[TransformCall]]
    """Makes what calls its functions, for one worker."""


class Transformer:
    """One worker of the stage of transforms number `first`. It also does the work of all stages that are fused with
    it."""

    def __init__(self, first: int, stages: Sequence[Step], columns: Columns, stint: WorkerClock,
                 until: Callable[[], int]):
        """`until` returns the number of the next stage that has workers of its own."""
        self._first, self._stages, self._columns, self._stint, self._until = first, stages, columns, stint, until
        self._runs: dict[int, list[TransformCall]] = {}

    def __call__(self, stretch: Stretch, charge: Charge) -> Stretch:
        until = self._until()
        self._leave(until)
        for number in range(self._first, until):
            self._runs[number] = self._runs.get(number) or self._stages[number].runs()
        alone, rows = until == self._first + 1, stretch.floats.shape[2]
        at_once = stretch.steps if alone else max(1, _AT_ONCE // rows)
        for low in range(0, stretch.steps, at_once):
            for number in range(self._first, until):
                self._stint.go_over(self._stages[number].tally)
                stretch = self._through(number, stretch, range(low, min(low + at_once, stretch.steps)))
        for number in range(self._first + 1, until):
            self._stint.passed(self._stages[number].tally, sum(stretch.rows), stretch.nbytes)
        stretch.charge.release()
        return stretch.replaced(charge=charge, done=until)

    def close(self) -> None:
        """Releases what this worker holds, as it leaves."""
        self._leave(self._first)

    def _leave(self, until: int) -> None:
        """Closes what ran the work of stages from that number on."""
        for number in [n for n in self._runs if n >= until]:
            for run in self._runs.pop(number):
                run.close()

    def _through(self, number: int, stretch: Stretch, batches: range) -> Stretch:
        """Takes some batches of a stretch through one stage."""
        for n in batches:
            for transform, run in zip(self._stages[number].fused.transforms, self._runs[number], strict=True):
                where = f"transform {transform.name!r}, epoch {stretch.schedule.epoch}, step {stretch.step + n}"
                arrays = columns_of(stretch, n, self._columns)
                given = run(stretch, n, arrays, where)
                if given is None:
                    continue  # the function wrote into what it got
                if not isinstance(given, Mapping):
                    raise TransformError(f"{where}: it gave back {type(given).__name__}, not a dict of arrays by "
                                         "column name, nor None")
                new = {name: value for name, value in given.items() if value is not arrays.get(name)}
                changed = self._lengths(new, arrays, where)
                for name, value in new.items():
                    if name not in changed:
                        _take(name, value, arrays, where)
                if changed:
                    ids = list(stretch.ids)
                    ids[n] = joined(self._columns, {**arrays, **changed}, stretch.floats.shape[2])
                    stretch = stretch.replaced(ids=tuple(ids))
        return stretch

    def _lengths(self, new: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]], where: str
                 ) -> dict[str, npt.NDArray[Any]]:
        """Checks bags that came back with their lengths: both are used if they fit each other."""
        changed: dict[str, npt.NDArray[Any]] = {}
        for bag in self._columns.bags:
            name = lengths_name(bag)
            if name in new:
                lengths, ids = np.asarray(new[name]), np.asarray(new.get(bag, arrays[bag]))
                if lengths.shape != arrays[name].shape or lengths.min(initial=0) < 0 or lengths.sum() != ids.size:
                    raise TransformError(f"{where}: column {name!r} came back with {lengths.size} lengths that add up "
                                         f"to {lengths.sum()}, for {arrays[name].size} rows and {ids.size} ids")
                if not np.can_cast(ids.dtype, np.int32, "same_kind"):
                    raise TransformError(f"{where}: column {bag!r} came back as {ids.dtype}, which does not become "
                                         "int32")
                changed |= {name: lengths.astype(np.int32), bag: _fitting(ids, np.int32, f"{where}: column {bag!r}")}
        return changed


def _take(name: str, value: Any, arrays: Mapping[str, npt.NDArray[Any]], where: str) -> None:
    what = f"{where}: column {name!r}"
    if name not in arrays:
        raise TransformError(f"{what} is none of the table's; a transform changes columns, it does not add them")
    value, into = np.asarray(value), arrays[name]
    if value.shape != into.shape:
        raise TransformError(f"{what} came back with shape {value.shape} instead of {into.shape}")
    if not np.can_cast(value.dtype, into.dtype, "same_kind"):
        raise TransformError(f"{what} came back as {value.dtype}, which does not become {into.dtype}")
    np.copyto(into, _fitting(value, into.dtype.type, what))


def _fitting(value: npt.NDArray[Any], kind: Any, what: str) -> npt.NDArray[Any]:
    if np.can_cast(value.dtype, kind):
        return value
    try:
        return numbers(value.reshape(-1), kind).reshape(value.shape)
    except ValueRefused as refused:
        raise TransformError(f"{what} came back with {refused}") from None


def over_arrow(function: Function, arrays: Arrays, columns: Columns, where: str) -> Arrays:
    """Calls a function that takes record batches with arrays."""
    return _from_arrow(function(_to_arrow(arrays, columns)), where)


def _to_arrow(arrays: Mapping[str, npt.NDArray[Any]], columns: Columns) -> pa.RecordBatch:
    """Makes a record batch of the arrays, without a copy."""
    found: dict[str, pa.Array] = {}
    for name in filter(arrays.__contains__, columns.names):
        lengths = arrays.get(lengths_name(name))
        values = pa.array(arrays[name])
        if lengths is not None:
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            values = pa.ListArray.from_arrays(pa.array(offsets), values)
        found[name] = values
    return pa.RecordBatch.from_pydict(found)


def _from_arrow(given: Any, where: str) -> dict[str, npt.NDArray[Any]]:
    if not isinstance(given, (pa.RecordBatch, pa.Table)):
        raise TransformError(f"{where}: it gave back {type(given).__name__}, not a pyarrow.RecordBatch")
    found: dict[str, npt.NDArray[Any]] = {}
    for name in given.schema.names:
        column = given.column(name)
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        if column.null_count:
            raise TransformError(f"{where}: column {name!r} came back with {column.null_count} empty values")
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            found[lengths_name(name)] = np.diff(column.offsets.to_numpy())
            column = column.flatten()
        found[name] = column.to_numpy(zero_copy_only=False)
    return found
