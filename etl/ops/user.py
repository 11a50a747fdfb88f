"""A user's own operator: `python`, a function over Arrow arrays."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from etl.ops.base import KINDS, Operator, OperatorError

_TYPES = {"text": pa.string(), "number": pa.float64(), "id": pa.int32(), "texts": pa.list_(pa.string()),
          "numbers": pa.list_(pa.float64()), "ids": pa.list_(pa.int32())}


@dataclass(frozen=True, kw_only=True)
class Python(Operator):
    """Calls `function` ("module:function") with one Arrow array for each input, of the kinds in `inputs`; it returns
    one array of the kind `output`, one value for each row, from those values alone. `size` bounds the ids it gives."""

    name: ClassVar[str] = "python"
    takes: ClassVar[tuple[str, ...]] = KINDS
    gives: ClassVar[str] = "number"
    function: str
    inputs: tuple[str, ...]
    output: str
    size: int = 0

    def __post_init__(self) -> None:
        for key, kinds in (("inputs", self.inputs), ("output", (self.output,))):
            for kind in kinds:
                if kind not in _TYPES:
                    raise OperatorError(f"{key} = {kind!r}: must be of {', '.join(_TYPES)}")
        if self.output in ("id", "ids") and self.size < 1:
            raise OperatorError("size: must say how many ids there are, as output is ids")
        try:
            inspect.signature(self._loaded()).bind(*self.inputs)
        except TypeError as error:
            raise OperatorError(f"function = {self.function!r}: cannot take {len(self.inputs)} arrays ({error})"
                                ) from None

    def _loaded(self) -> Callable[..., Any]:
        module, colon, name = self.function.partition(":")
        try:
            found = getattr(importlib.import_module(module), name) if colon else None
        except (ImportError, AttributeError, ValueError) as error:
            raise OperatorError(f"function = {self.function!r}: cannot be imported ({error})") from None
        if not callable(found):
            raise OperatorError(f"function = {self.function!r}: must be module:function")
        function: Callable[..., Any] = found
        return function

    def kind(self, _taken: str) -> str:
        return self.output

    def apply(self, column: pa.Array, _state: Any) -> pa.Array:
        given = column.flatten() if pa.types.is_struct(column.type) else [column]
        if len(given) != len(self.inputs):
            raise OperatorError(f"{self.function} takes {len(self.inputs)} columns, but has {len(given)} here")
        result = self._loaded()(*[c.cast(_TYPES[kind]) for c, kind in zip(given, self.inputs, strict=True)])
        if not isinstance(result, pa.Array) or len(result) != len(column):
            what = f"{len(result)} values" if isinstance(result, pa.Array) else type(result).__name__
            raise OperatorError(f"{self.function} returned {what}, not an Arrow array for {len(column)} rows")
        if result.type != _TYPES[self.output]:
            raise OperatorError(f"{self.function} returned {result.type}, not {_TYPES[self.output]}")
        if self.output == "id":
            result = result.fill_null(1)
        return result

    def cardinality(self, _state: pa.Table | None) -> int | None:
        return self.size or None
