"""Named functions over the columns of a batch: `Transform`, run by the worker `Transformer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ingest.batch import Stretch, columns_of, joined, lengths_name
from ingest.columns import Columns
from ingest.governor import Charge

Function = Callable[[dict[str, npt.NDArray[Any]]], Mapping[str, npt.NDArray[Any]] | None]


class TransformError(ValueError):
    """A user's function gave back what does not fit: the message names it, the column and the batch."""


@dataclass(frozen=True, slots=True)
class Transform:
    """`function` takes a batch as arrays by column name. It may write into them, or give back new arrays of some
    columns, of the same length; the others stay as they are. A column of bags comes as all its ids, and as
    `NAME.lengths`; if both come back, the bags may have got other lengths."""

    name: str
    function: Function


class Transformer:
    """One worker of a transform's stage."""

    def __init__(self, transform: Transform, columns: Columns):
        self._transform, self._columns = transform, columns

    def __call__(self, stretch: Stretch, charge: Charge) -> Stretch:
        ids = list(stretch.ids)
        for n in range(stretch.steps):
            arrays = columns_of(stretch, n, self._columns)
            where = f"transform {self._transform.name!r}, epoch {stretch.schedule.epoch}, step {stretch.step + n}"
            given = self._transform.function(dict(arrays))
            new = {name: value for name, value in (given or {}).items() if value is not arrays.get(name)}
            changed = self._lengths(new, arrays, where)
            for name, value in new.items():
                if name not in changed:
                    _take(name, value, arrays, where)
            if changed:
                ids[n] = joined(self._columns, {**arrays, **changed}, stretch.floats.shape[2])
        stretch.charge.release()
        return stretch.replaced(ids=tuple(ids), charge=charge)

    def _lengths(self, new: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]], where: str
                 ) -> dict[str, npt.NDArray[Any]]:
        """Bags that came back with their lengths: both are taken as they are, if they fit each other."""
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
                changed |= {name: lengths.astype(np.int32), bag: ids.astype(np.int32, casting="same_kind")}
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
    np.copyto(into, value, casting="same_kind")
