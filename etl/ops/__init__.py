"""Feature operators, by the name that a spec calls them. Neither Spark nor torch is imported here."""

from __future__ import annotations

from etl.ops.base import FIRST, NULL, PADDING, Fitted, Operator, OperatorError
from etl.ops.dense import Clip, Fill, Log
from etl.ops.sparse import Categorify, Hash

OPERATORS: dict[str, type[Operator]] = {kind.name: kind for kind in (Fill, Clip, Log, Categorify, Hash)}

__all__ = ["FIRST", "NULL", "OPERATORS", "PADDING", "Fitted", "Operator", "OperatorError"]
