"""`MappedLookup`: a vocabulary that is too large for a worker's memory, in a file that all workers of a machine map.
`load_features`: loads the operators in a Python worker once for all of its tasks of a pass. For a spec like Criteo's it
takes a third of a second to read the fitted state and to build the operators' tables."""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sluice.etl.apply.features import Features
from sluice.etl.apply.row_store import RowStore, split_by_number
from sluice.etl.ops.hashing import Hashes, Narrow, hash_texts
from sluice.etl.spark.workers.row_file import local_folders
from sluice.etl.spec.spec import Spec
from sluice.etl.table.fitted_state import FileBackedState, FittedState, Packed

_BUCKET_VALUES = 1 << 20
_last: list[tuple[Packed, FittedState, Features]] = []
"""What the last task of this process loaded, or nothing. A process runs one task at a time."""


@dataclass(frozen=True, slots=True)
class MappedLookup:
    """Finds the places of values by their hashes, like `Lookup`. The first worker of a machine that needs it writes the
    file. Spark removes the file when the executor ends."""

    hashes: Hashes
    """The hashes of all values, rising."""
    owners: Narrow
    """The place in the vocabulary of each of these values."""

    @classmethod
    def of(cls, state: FileBackedState) -> MappedLookup:
        path = f"{local_folders()[0]}/sluice-places-{state.digest}"
        if not os.path.exists(path):
            with open(f"{path}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not os.path.exists(path):
                    _write(state, f"{path}.new")
                    os.rename(f"{path}.new", path)
        return cls(*_map(path, state.num_rows, "r"))

    def places(self, hashes: Hashes) -> Narrow:
        """Returns the place of each value, given its hash, or -1 for values outside the vocabulary."""
        order = np.argsort(hashes)  # so that the file is read from its beginning to its end
        rising = hashes[order]
        at = np.minimum(np.searchsorted(self.hashes, rising), len(self.hashes) - 1)
        places = np.empty(len(hashes), np.int32)
        places[order] = np.where(self.hashes[at] == rising, self.owners[at], np.int32(-1))
        return places


def _map(path: str, values: int, mode: str) -> tuple[Hashes, Narrow]:
    """Returns the hashes and the places in a file."""
    content = np.memmap(path, np.uint8, mode, shape=(12 * values,))  # type: ignore[call-overload]
    return content[: 8 * values].view(np.uint64), content[8 * values :].view(np.int32)


def _write(state: FileBackedState, path: str) -> None:
    """Writes the hashes of a vocabulary in rising order, with the values' places. Sorts one part after another, so that
    it needs little memory."""
    buckets = max(1, state.num_rows // _BUCKET_VALUES)
    first = end = 0
    with contextlib.closing(RowStore(0)) as parts:
        for values in state.batches():
            hashes = hash_texts(values["value"])
            places = np.arange(first, first + len(hashes), dtype=np.int32)
            first += len(hashes)
            bucket = ((hashes >> np.uint64(32)) * np.uint64(buckets)) >> np.uint64(32)
            rows = pa.record_batch([pa.array(hashes), pa.array(places)], ["hash", "place"])
            parts.put(split_by_number(rows, bucket.astype(np.int32), buckets))
        hashes, places = _map(path, state.num_rows, "w+")
        for number in filter(parts.rows.__getitem__, range(buckets)):
            rows = pa.Table.from_batches(parts.get(number)).sort_by("hash")
            start, end = end, end + len(rows)
            hashes[start:end], places[start:end] = rows["hash"], rows["place"]
            if len(rows) > 1 and (hashes[start + 1 : end] == hashes[start : end - 1]).any():
                raise ValueError(
                    "two values of one vocabulary have the same 64-bit hash; leave one out"
                )


def load_features(spec: Spec, packed: Packed) -> tuple[FittedState, Features]:
    """Returns the state that was sent to the workers, and the spec's operators with it. All tasks of a pass get the
    same `packed` object, so those of the last task are used again."""
    if not _last or _last[0][0] is not packed:
        _last.clear()
        state = FittedState.unpacked(spec.fitted_hash, packed)
        mapped = {key: MappedLookup.of(table) for key, table in state.stored.items()}
        features = Features(spec, state, ahead=False, prepared=mapped)
        _last.append((packed, state, features))
    return _last[0][1:]
