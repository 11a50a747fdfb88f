"""`Steps` maps a column's values to whole steps. The files of a table in time order are cut at steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sluice.etl.ops.base import Fitted, values_of
from sluice.etl.ops.hashing import Whole


@dataclass(frozen=True, kw_only=True)
class Steps(Fitted):
    """Maps a value to the number of whole `step`s below it. Missing values come first.

    The step decides a row's file in every split. It is no input of a model."""

    name = "steps"
    of_all_splits = True
    step: float

    def _find_steps(self, column: pa.Array) -> Whole:
        values, nulls = values_of(column)
        steps = np.floor(np.clip(values / self.step, -(2.0**62), 2.0**62))
        steps[np.isnan(steps) if nulls is None else np.isnan(steps) | nulls] = -(2.0**62)
        return steps.astype(np.int64)

    def count(self, column: pa.Array) -> tuple[pa.Array, pa.Array]:
        kinds, counts = np.unique(self._find_steps(column), return_counts=True)
        return pa.array(kinds).cast(pa.string()), pa.array(counts)

    def learn(self, counted: pa.Table) -> pa.Table:
        table = pa.table({"step": counted["value"].cast(pa.int64()), "count": counted["count"]})
        return table.sort_by("step").combine_chunks()

    def prepare(self, state: pa.Table) -> tuple[Whole, Whole]:
        """Returns the steps, and the number of rows before each."""
        counts = state["count"].to_numpy()
        return state["step"].to_numpy(), np.cumsum(counts) - counts

    def apply(self, column: pa.Array, state: tuple[Whole, Whole]) -> pa.Array:
        """Returns the share of all rows that come before a value's step: from 0 to below 1."""
        steps, before = state
        if not len(steps):
            return pa.array(np.zeros(len(column)))
        place = np.clip(np.searchsorted(steps, self._find_steps(column), side="right") - 1, 0, None)
        return pa.array(before[place] / max(1.0, float(before[-1] + 1)))
