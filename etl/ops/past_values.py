"""`Timeline`: looks up what was known about values before a moment.

A causal state has a row for each value and moment, by value and then by time. It holds what was known after that
moment. A row finds the last state row strictly before it, so rows of one moment do not see each other. The state is
made from sums of whole numbers, so it does not depend on the distribution of rows over workers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.ops.base import values_of
from sluice.etl.ops.hashing import Flags, Floats, Hashes, Lookup, Whole


def moments_of(time: pa.Array, step: float) -> tuple[Floats, Flags | None]:
    """Returns the moment of each row's time, and a mask of the rows without a time."""
    at, nulls = values_of(time)
    return (np.floor(at / step) * step if step else at) + 0.0, nulls


def add_moments(time: pa.Array, step: float, names: pa.Array) -> pa.Array:
    """Puts the moment of each row before its name."""
    at, _ = moments_of(time, step)
    return pc.binary_join_element_wise(pa.array(at).cast(pa.string()), names, ":")


def split_moments(names: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Splits the results of `add_moments` into (names, moments)."""
    cut = pc.extract_regex(names, "(?s)^(?P<at>[^:]*):(?P<name>.*)$")
    return cut.field("name"), cut.field("at").cast(pa.float64())


def add_running_sums(state: pa.Table, names: tuple[str, ...]) -> pa.Table:
    """Sorts the table by value and time, and replaces the named columns by running sums over a value's moments."""
    ordered = state.sort_by([("value", "ascending"), ("at", "ascending")]).combine_chunks()
    _, place = index_values(ordered)
    first = np.searchsorted(place, place)
    for name in names:
        amounts = ordered[name].to_numpy()
        sums = np.cumsum(amounts)
        ordered = ordered.set_column(
            ordered.column_names.index(name),
            name,
            pa.array(sums - (sums[first] - amounts[first]), pa.int64()),
        )
    return ordered


def index_values(state: pa.Table) -> tuple[pa.Array, Whole]:
    """Returns the distinct values of a table that is sorted by value, and each row's place among them."""
    found = state["value"].combine_chunks().dictionary_encode()
    found = found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found
    return found.dictionary, np.asarray(found.indices).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Finds the row of a causal state that says what was known about a value at a time."""

    lookup: Lookup
    moments: Floats
    """All moments in the state, in ascending order."""
    places: Whole
    """For each of the state's rows, the place of its value."""
    ranks: Whole
    """For each of the state's rows, the number of its moment."""

    @classmethod
    def of(cls, state: pa.Table) -> Timeline:
        """Returns the timeline of a state. A state without times has one moment, before every row."""
        if "at" not in state.column_names:
            rows = np.arange(state.num_rows)
            return cls(
                Lookup.of(state["value"].combine_chunks()), np.zeros(1), rows, np.zeros_like(rows)
            )
        values, places = index_values(state)
        moments, ranks = np.unique(state["at"].to_numpy(), return_inverse=True)
        return cls(Lookup.of(values), moments, places, ranks.astype(np.int64))

    def rank(self, at: Floats, nulls: Flags | None) -> Whole:
        """Returns the number of moments strictly before each time. For a row without a time, all moments count."""
        rank = np.searchsorted(self.moments, at, side="left").astype(np.int64)
        if nulls is not None:
            rank[nulls] = len(self.moments)
        return rank

    def before(self, hashes: Hashes, rank: Whole | int) -> Whole:
        """Returns the number of the state's last row with the given value before the given rank, or -1 if there is
        none."""
        place, steps = self.lookup.places(hashes).astype(np.int64), len(self.moments) + 1
        if len(self.moments) == 1:
            return np.where(np.greater(rank, 0), place, -1)
        found = (
            np.searchsorted(self.places * steps + self.ranks, place * steps + rank, side="left") - 1
        )
        known = (place >= 0) & (found >= 0)
        known[known] = self.places[found[known]] == place[known]
        return np.where(known, found, -1)

    def totals(self, running: Whole) -> Whole:
        """Sums a column of `add_running_sums` over all values. Returns what was known before each rank."""
        fresh = np.diff(running, prepend=0)
        first = np.flatnonzero(np.diff(self.places, prepend=-1))
        fresh[first] = running[first]
        sums = np.zeros(len(self.moments) + 1, np.int64)
        np.add.at(sums, self.ranks + 1, fresh)
        return np.cumsum(sums)
