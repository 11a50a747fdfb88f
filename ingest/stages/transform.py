"""User functions over the columns of a batch: `Transform`. Adjacent transforms share a stage unless they are marked
`apart`."""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from typing import Any

import numpy.typing as npt
import pyarrow as pa

from sluice.common.suggest import NamedFields
from sluice.ingest.columns import column_of
from sluice.ingest.errors import LoadingError
from sluice.ingest.process.child_main import load
from sluice.ingest.process.matrix_function import MATRIX

Arrays = dict[str, npt.NDArray[Any]]
Given = Mapping[str, npt.NDArray[Any]] | None
Function = Callable[[Any], Any]


class TransformError(LoadingError):
    """A user's function returned something that does not fit. The message names function, column and batch."""


@dataclass(frozen=True, slots=True)
class Transform(NamedFields):
    """A named function over batches.

    `function` takes a batch as a dict of numpy arrays by column name. It may write into them, or return new arrays of
    the same length for some columns. The other columns stay unchanged. A column of bags comes as all its ids, and as
    `NAME.lengths`. If the function returns both, the lengths may differ from before. A function that is
    marked with `sluice.takes_matrix` takes one array instead."""

    function: Function | str
    """The function, or its name as `module:function`. One that a new process can import is known by that name. It has
    its own stage, which can also run in processes (`sluice.ingest.stages.transform_worker`). All others run in
    threads."""
    name: str = ""
    """By default the function's own."""
    apart: bool = False
    """Whether it has its own stage, with its own workers and its own line in every table."""
    pure: bool = False
    """Whether each row's result depends on what the function gets of this row alone, and it never writes into its
    input. Then no copy is kept for the case that it fails on a row, and a loader's `cache` may keep what it gives."""
    reads: tuple[str, ...] = ()
    """The columns that the function gets. Empty: all. Other columns are neither copied nor sent."""
    gives: Mapping[str, Any] = field(default_factory=dict)
    """The columns that it makes from those that it reads, with their types. Such a function gets rows with values as
    they are stored: numbers as numpy arrays, texts and lists as Arrow's. It must treat each row for itself, and returns
    a dict of these columns. Empty: it gets batches."""
    outputs: Mapping[str, int | None] = field(default_factory=dict)
    """The columns that it may return, with the cardinality of columns of ids. Empty: any that it gets."""
    added: tuple[str, ...] = ()
    """The new columns among `outputs`. The function must return them and does not get them."""
    limit_s: float | None = None
    """The time that a batch may take. A worker that takes longer is killed. It then always runs in processes."""
    depends: tuple[str, ...] = ()
    """The files that it reads, for a cache: if one changes, nothing that was kept is found."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TransformError(
                f"Transform({self.function!r}, …): give the function first, then its name"
            )
        object.__setattr__(self, "name", self.name or _name_of(self.function))
        object.__setattr__(self, "function", address_of(self.function) or self.function)
        object.__setattr__(self, "reads", tuple(self.reads))
        object.__setattr__(self, "depends", tuple(map(str, self.depends)))
        if self.gives and not self.reads:
            raise TransformError(
                f"transform {self.name!r}: it gives {', '.join(self.gives)} and reads nothing; name the columns that "
                "it gets, reads=[…]"
            )
        object.__setattr__(
            self, "gives", {name: self._type_of(name, kind) for name, kind in self.gives.items()}
        )
        if self.movable and not re.fullmatch(r"(?!__main__:)[\w.]+:\w+", str(self.function)):
            raise TransformError(
                f"transform {self.name!r}: {self.function!r} is not module:function in a module "
                "that can be imported"
            )
        if self.limit_s is not None and not (self.limit_s > 0 and self.movable):
            raise TransformError(
                f"transform {self.name!r}: limit_s={self.limit_s}: give a number above 0, and name the function as "
                "module:function, because only a process can be ended"
            )

    def _type_of(self, name: str, kind: Any) -> pa.DataType:
        """Returns Arrow's type for `float32`, `list<int64>`, a numpy type or Arrow's own."""
        try:
            if isinstance(kind, pa.DataType):
                return kind
            inner = re.fullmatch(r"list<(\w+)>", str(kind))
            if inner:
                return pa.list_(pa.type_for_alias(inner[1]))
            return pa.type_for_alias(kind) if isinstance(kind, str) else pa.from_numpy_dtype(kind)
        except (ValueError, TypeError, pa.ArrowException):
            raise TransformError(
                f"transform {self.name!r}: gives: {kind!r} of column {name!r} is not a type. Write float32, int64, "
                "string or list<int64>"
            ) from None

    @classmethod
    def of(cls, given: UserTransform) -> Transform:
        """Makes a transform from a transform, a function, `module:function`, or a pair of a name and a function. A
        function without a name is named after itself."""
        if isinstance(given, Transform):
            return given
        if isinstance(given, tuple):
            name, function = given
            return cls(function, name)
        if not (isinstance(given, str) or callable(given)):
            raise TransformError(
                f"transforms: {given!r} is not a function; give functions, module:function, or pairs of "
                "a name and one of these"
            )
        return cls(given)

    @property
    def movable(self) -> bool:
        """Whether it can also run in processes."""
        return isinstance(self.function, str)

    @property
    def sendable(self) -> bool:
        """Whether remote workers can call it. They do not support a limit of a single call."""
        return self.movable and self.limit_s is None

    @property
    def code(self) -> str | None:
        """The function as `module:function`. None if it cannot be imported, such as a notebook's function, a closure or
        a lambda."""
        return self.function if isinstance(self.function, str) else None


@dataclass(frozen=True, slots=True)
class FrameFunction(Transform):
    """A TransformSpec's function over rows. It gets whole row groups, as DataFrames."""

    frame: str = ""
    """The fields that it removes, and the shape of each of its fields, as JSON."""


def frame_of(function: Transform) -> str:
    """Returns the `frame` of a TransformSpec's function. Empty: it is another function."""
    return function.frame if isinstance(function, FrameFunction) else ""


def _name_of(function: Any) -> str:
    if isinstance(function, str):
        return function.partition(":")[2] or function
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")


def transforms_of(given: Iterable[UserTransform]) -> tuple[Transform, ...]:
    """Makes transforms from a user's list."""
    if isinstance(given, (str, Transform)) or not isinstance(given, Iterable):
        raise TransformError(f"transforms: give a list, transforms=[…], not just {_name_of(given)}")
    return tuple(Transform.of(transform) for transform in given)


def address_of(function: Any) -> str | None:
    """Returns `module:function` if a new process would import this function by it, otherwise None."""
    module = str(getattr(function, "__module__", ""))
    name = str(getattr(function, "__qualname__", ""))
    loaded = sys.modules.get(module) if module != "__main__" else None
    if loaded is None or getattr(loaded, name, None) is not function:
        return None
    return (
        f"{module}:{name}" if PathFinder.find_spec(module.partition(".")[0]) is not None else None
    )


def function_of(transform: Transform) -> Function:
    """Returns the function itself. Imports it if it is given by name."""
    if not isinstance(transform.function, str):
        return transform.function
    try:
        return load(transform.function)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise TransformError(
            f"transform {transform.name!r}: {transform.function}: {type(error).__name__}: {error}"
        ) from error


UserTransform = Transform | Function | str | tuple[str, Function | str]
"""The forms in which a user may give a transform."""


def given_by(functions: Iterable[Transform]) -> dict[str, pa.DataType]:
    """Returns the columns that functions over rows give, with their types."""
    return {name: kind for function in functions for name, kind in function.gives.items()}


def reads_of(functions: Iterable[Transform]) -> set[str]:
    return {name for function in functions for name in function.reads}


def needed_before(names: Sequence[str], functions: Sequence[Transform]) -> tuple[str, ...]:
    """Returns the columns that must be there before these functions, to have `names` after them."""
    for function in reversed(functions):
        names = tuple(
            dict.fromkeys([*(n for n in names if n not in function.gives), *function.reads])
        )
    return tuple(names)


def schema_with(
    before: pa.Schema, given: Mapping[str, pa.DataType], names: Iterable[str]
) -> pa.Schema:
    """Returns the schema of these columns after functions that give some of them."""
    return pa.schema(
        [pa.field(name, given[name]) if name in given else before.field(name) for name in names]
    )


def group_into_stages(
    transforms: Iterable[Transform],
) -> list[tuple[str, tuple[Transform, ...]]]:
    """Groups adjacent transforms into stages with names. A batch passes all of a stage's transforms while it is in the
    core's cache. Transforms that are `apart` or `movable` get their own stage."""
    stages: list[tuple[Transform, ...]] = []
    for apart, some in itertools.groupby(transforms, lambda t: t.apart or t.movable):
        run = tuple(some)
        stages += [(t,) for t in run] if apart else [run]
    return [("+".join(t.name for t in run), run) for run in stages]


def may_write(transform: Transform, name: str) -> bool:
    """Whether a function may write into an array that it gets: a matrix, or values or lengths of a column."""
    outputs = transform.outputs
    return not outputs or name == MATRIX or column_of(name) in outputs


def visible_columns(transform: Transform, arrays: Arrays) -> Arrays:
    """Returns the columns of a batch for a function in a thread. Columns that are not its outputs are read-only."""
    visible = dict(arrays)
    for name, array in arrays.items():
        if not may_write(transform, name):
            visible[name] = array.view()
            visible[name].flags.writeable = False
    return visible
