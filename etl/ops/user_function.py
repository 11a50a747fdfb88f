"""A user's own operator: `python`, a function over Arrow arrays.

The operator only names the function: `sluice.etl.apply.features.Features`, which makes rows, imports it if the spec has
the permission."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from sluice.common.errors import OperatorError
from sluice.etl.ops.base import KINDS, Operator

_TYPES = {
    "text": pa.string(),
    "number": pa.float64(),
    "id": pa.int32(),
    "texts": pa.list_(pa.string()),
    "numbers": pa.list_(pa.float64()),
    "ids": pa.list_(pa.int32()),
}
_Kind = Literal["text", "number", "id", "texts", "numbers", "ids"]


@dataclass(frozen=True, kw_only=True)
class Python(Operator):
    """Calls a user's function with one Arrow array for each input, of the kinds in `inputs`. The function returns one
    array of the kind `output`, with a value for each row. A value depends on its row's inputs alone.

    `function` is "module:function". If `output` is ids, they are below `size`. The operator does not import the
    function: `apply` gets it as its state."""

    name = "python"
    takes = KINDS
    function: str
    inputs: tuple[_Kind, ...]
    output: _Kind
    size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output in ("id", "ids") and self.size < 1:
            raise OperatorError("size: must say how many ids there are, as output is ids")

    def check(self, function: Callable[..., Any]) -> None:
        """Raises OperatorError unless the function can take the inputs."""
        try:
            signature = inspect.signature(function)
        except ValueError:  # compiled code may have no signature
            return
        try:
            signature.bind(*self.inputs)
        except TypeError as error:
            raise OperatorError(
                f"function = {self.function!r}: cannot take {len(self.inputs)} arrays ({error})"
            ) from None

    def kind(self, _taken: str) -> str:
        return self.output

    def apply(self, column: pa.Array, state: Callable[..., Any]) -> pa.Array:
        arrays = column.flatten() if pa.types.is_struct(column.type) else [column]
        if len(arrays) != len(self.inputs):
            raise OperatorError(
                f"{self.function} takes {len(self.inputs)} columns, but has {len(arrays)} here"
            )
        # A whole number beyond 2^53 becomes the nearest float, as it does for every other operator.
        result = state(
            *[
                array.cast(_TYPES[kind], safe=not kind.startswith("number"))
                for array, kind in zip(arrays, self.inputs, strict=True)
            ]
        )
        if not isinstance(result, pa.Array) or len(result) != len(column):
            what = (
                f"{len(result)} values" if isinstance(result, pa.Array) else type(result).__name__
            )
            raise OperatorError(
                f"{self.function} returned {what}, not an Arrow array for {len(column)} rows"
            )
        try:
            result.validate(full=True)  # what reads it believes its offsets
        except pa.ArrowException as error:
            raise OperatorError(
                f"{self.function} returned Arrow that is not valid: {error}"
            ) from None
        if result.type != _TYPES[self.output]:
            raise OperatorError(
                f"{self.function} returned {result.type}, not {_TYPES[self.output]}"
            )
        if self.output == "id":
            result = result.fill_null(1)
        if self.output in ("id", "ids"):
            ids = pc.list_flatten(result) if self.output == "ids" else result
            wrong = ids.filter(pc.or_(pc.less(ids, 0), pc.greater_equal(ids, self.size)))
            if len(wrong):
                raise ValueError(
                    f"the id {wrong[0]} is not from 0 to {self.size - 1}, as size says"
                )
        return result

    def cardinality(self, _state: pa.Table | None) -> int | None:
        return self.size or None
