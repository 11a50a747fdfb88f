"""`Lookup` finds the places of values in a vocabulary: an open hash table in numpy, for whole columns.

Only the 64-bit hashes of values are compared. If two values of one vocabulary have the same hash, the table is refused
when it is built. An unseen value has the hash of a known value with a chance of vocabulary size / 2^64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.etl.ops.hashing import hash_texts


@dataclass(frozen=True, slots=True)
class Lookup:
    """A hash table with linear probing. It is at most half full, so nearly every value is found at the first or second
    try."""

    hashes: npt.NDArray[np.uint64]
    owners: npt.NDArray[np.int32]
    """The place in the vocabulary of the value in each slot, or -1 if the slot is empty."""

    @classmethod
    def of(cls, values: pa.Array) -> Lookup:
        """Returns the table of a vocabulary."""
        hashes = hash_texts(values)
        if len(np.unique(hashes)) < len(hashes):
            raise ValueError(
                "two values of one vocabulary have the same 64-bit hash; leave one out"
            )
        slots = 1 << max(4, (2 * len(hashes)).bit_length())
        owners = np.full(slots, -1, np.int32)
        waiting = np.arange(len(hashes), dtype=np.int32)
        slot = (hashes & np.uint64(slots - 1)).astype(np.int64)
        while len(waiting):
            free = owners[slot] < 0
            owners[slot[free]] = waiting[free]  # if several want one slot, one gets it
            lost = owners[slot] != waiting
            waiting, slot = waiting[lost], (slot[lost] + 1) & (slots - 1)
        table = np.zeros(slots, np.uint64)
        taken = owners >= 0
        table[taken] = hashes[owners[taken]]
        return cls(table, owners)

    def places(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
        """Returns the place of each value, given its hash, or -1 for values outside the vocabulary."""
        last = len(self.owners) - 1
        slot = (hashes & np.uint64(last)).astype(np.int64)
        places = self.owners[slot]
        pending = np.flatnonzero((places >= 0) & (self.hashes[slot] != hashes))
        slot = slot[pending]
        while len(pending):
            slot = (slot + 1) & last
            owner = self.owners[slot]
            places[pending] = owner
            on = (owner >= 0) & (self.hashes[slot] != hashes[pending])
            pending, slot = pending[on], slot[on]
        return places
