"""Named functions over the columns of a batch: `Transform`. Adjacent ones share a stage, unless they are to be
apart."""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.ingest.columns import Columns
from sluice.ingest.errors import LoadingError
from sluice.ingest.stages.batch import lengths_name

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
    (`sluice.ingest.stages.transform_worker`)."""
    arrow: bool = False
    """Whether it takes a pyarrow.RecordBatch instead (bags are lists), and returns one, with the columns that it
    changes."""
    apart: bool = False
    """Whether it has a stage of its own: its own workers, and its own line in every table."""
    pure: bool = False
    """Whether it writes nothing into what it gets, so that no copy is kept for the case that it fails on some row."""
    columns: tuple[str, ...] = ()
    """The columns that the function gets; if empty: all. Other columns are neither copied nor sent."""
    outputs: Mapping[str, int | None] = field(default_factory=dict)
    """The columns that it may give, with the cardinality of those that hold ids; if empty: any that it gets."""
    added: tuple[str, ...] = ()
    """Those of `outputs` that are no columns before: it must give them, and does not get them."""
    limit_s: float | None = None
    """The time that a batch may take in a process; a worker that takes longer is ended."""
    memory_limit: int | None = None
    """The bytes that the function may take in a process, beyond the process's own."""

    def __post_init__(self) -> None:
        if isinstance(self.function, str):
            if not re.fullmatch(r"[\w.]+:\w+", self.function) or self.function.startswith(
                "__main__:"
            ):
                raise TransformError(
                    f"transform {self.name!r}: {self.function!r} is not module:function, in a module "
                    "that can be imported"
                )
        elif self.limit_s is not None or self.memory_limit is not None:
            raise TransformError(
                f"transform {self.name!r}: limits hold in processes only; name the function as "
                "module:function"
            )

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
            raise TransformError(
                f"transforms: {given!r} is no function; give functions, module:function, or pairs of "
                "a name and either"
            )
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
    def sendable(self) -> bool:
        """Whether workers elsewhere can call it, which keep no limit of a single call."""
        return self.movable and self.limit_s is None and self.memory_limit is None

    @property
    def code(self) -> str | None:
        """Where the function is found, as `module:function`; None for code without a name that others can import: a
        notebook's, a closure, a lambda."""
        return self.function if isinstance(self.function, str) else address_of(self.function)


def transforms_of(given: Iterable[UserTransform]) -> tuple[Transform, ...]:
    """The transforms that a user gives, each under a name of its own."""
    if isinstance(given, (str, Transform)) or not isinstance(given, Iterable):
        raise TransformError(f"transforms: give a list, transforms=[…], of {said(given)}")
    found = tuple(Transform.of(one) for one in given)
    for name, count in Counter(t.name for t in found).items():
        if count > 1:
            raise TransformError(
                f"transforms: {count} are called {name!r}; give each a name of its own, as in "
                f"transforms=[('first', {name}), ('second', {name})]"
            )
    return found


def said(given: Any) -> str:
    """What a user gave, for a message: of a function its name and where it is defined."""
    if isinstance(given, Transform):
        return f"the transform {given.name!r}"
    function = given
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return (
        repr(given)
        if code is None
        else f"{function.__qualname__} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
    )


def address_of(function: Any) -> str | None:
    """`module:function`, if a fresh process finds this very function there; otherwise None."""
    module, name = (
        str(getattr(function, "__module__", "")),
        str(getattr(function, "__qualname__", "")),
    )
    there = sys.modules.get(module) if module != "__main__" else None
    if there is None or getattr(there, name, None) is not function:
        return None
    return (
        f"{module}:{name}" if PathFinder.find_spec(module.partition(".")[0]) is not None else None
    )


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

    @property
    def sendable(self) -> bool:
        return all(t.sendable for t in self.transforms)


def fused(transforms: Iterable[Transform]) -> tuple[Fused, ...]:
    """Makes one stage of each series of adjacent transforms that are not to be apart."""
    stages: list[Fused] = []
    for apart, some in itertools.groupby(transforms, lambda t: t.apart or t.movable):
        run = tuple(some)
        stages += [Fused((t,)) for t in run] if apart else [Fused(run)]
    return tuple(stages)


def shown(transform: Transform, arrays: Arrays) -> Arrays:
    """A batch's columns as a function gets them in a thread: it cannot write into those that are none of its
    outputs."""
    if not transform.outputs:
        return dict(arrays)
    visible = {}
    for name, array in arrays.items():
        visible[name] = (
            array if name.removesuffix(".lengths") in transform.outputs else array.view()
        )
        if visible[name] is not array:
            visible[name].flags.writeable = False
    return visible


def over_arrow(function: Function, arrays: Arrays, columns: Columns, where: str) -> Arrays:
    """Calls a function that takes record batches with arrays."""
    return _from_arrow(function(_to_arrow(arrays, columns)), where)


def _to_arrow(arrays: Mapping[str, npt.NDArray[Any]], columns: Columns) -> pa.RecordBatch:
    """Makes a record batch of the arrays, without a copy."""
    found: dict[str, pa.Array] = {}
    for name in filter(arrays.__contains__, (*columns.floats, *columns.sparse)):
        lengths = arrays.get(lengths_name(name))
        values = pa.array(arrays[name])
        if lengths is not None:
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            values = pa.ListArray.from_arrays(pa.array(offsets), values)
        found[name] = values
    return pa.RecordBatch.from_pydict(found)


def _from_arrow(given: Any, where: str) -> dict[str, npt.NDArray[Any]]:
    if not isinstance(given, (pa.RecordBatch, pa.Table)):
        raise TransformError(
            f"{where}: it gave back {type(given).__name__}, not a pyarrow.RecordBatch"
        )
    found: dict[str, npt.NDArray[Any]] = {}
    for name in given.schema.names:
        column = given.column(name)
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        if column.null_count:
            raise TransformError(
                f"{where}: column {name!r} came back with {column.null_count} empty values"
            )
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            found[lengths_name(name)] = np.diff(column.offsets.to_numpy())
            column = column.flatten()
        found[name] = column.to_numpy(zero_copy_only=False)
    return found
