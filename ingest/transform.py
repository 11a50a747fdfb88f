"""Named functions over the columns of a batch: `Transform`, run by the worker `Transformer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ingest.batch import Stretch
from ingest.columns import Columns
from ingest.governor import Charge

Function = Callable[[dict[str, npt.NDArray[Any]]], Mapping[str, npt.NDArray[Any]] | None]


class TransformError(ValueError):
    """A user's function gave back what does not fit: the message names it, the column and the batch."""


@dataclass(frozen=True, slots=True)
class Transform:
    """`function` takes a batch as arrays by column name. It may write into them, or give back new arrays of some
    columns, of the same length; the others stay as they are."""

    name: str
    function: Function


class Transformer:
    """One worker of a transform's stage."""

    def __init__(self, transform: Transform, columns: Columns):
        self._transform, self._columns = transform, columns

    def __call__(self, stretch: Stretch, charge: Charge) -> Stretch:
        for n in range(stretch.steps):
            arrays = dict(zip(self._columns.names, [*stretch.floats[n], *stretch.ids[n]], strict=True))
            given = self._transform.function(dict(arrays))
            for name, value in (given or {}).items():
                if value is not arrays.get(name):
                    self._take(name, value, arrays, f"epoch {stretch.schedule.epoch}, step {stretch.step + n}")
        stretch.charge.release()
        return stretch.with_charge(charge)

    def _take(self, name: str, value: Any, arrays: Mapping[str, npt.NDArray[Any]], where: str) -> None:
        what = f"transform {self._transform.name!r}, {where}: column {name!r}"
        if name not in arrays:
            raise TransformError(f"{what} is none of the table's; a transform changes columns, it does not add them")
        value, into = np.asarray(value), arrays[name]
        if value.shape != into.shape:
            raise TransformError(f"{what} came back with shape {value.shape} instead of {into.shape}")
        if not np.can_cast(value.dtype, into.dtype, "same_kind"):
            raise TransformError(f"{what} came back as {value.dtype}, which does not become {into.dtype}")
        np.copyto(into, value, casting="same_kind")
