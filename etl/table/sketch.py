"""`Sketch`: the smallest hashes of a split's rows. They represent the same rows in every version.

Two sketches show what share of one split's rows is in another. `SketchSum` collects the hashes while rows are
written."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sluice.etl.ops.hashing import Hashes

MOST = 4096
_ALL = 1 << 64


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """All distinct hashes of rows below a bound, in ascending order."""

    hashes: Hashes = field(default_factory=lambda: np.empty(0, np.uint64))
    below: int = _ALL
    """The bound. With 2^64 every row's hash is included."""

    def __post_init__(self) -> None:
        if not 0 < self.below <= _ALL:
            raise ValueError(f"a sketch's bound {self.below} is no number from 1 to 2^64")
        if len(self.hashes) > MOST:
            raise ValueError(f"a sketch of {len(self.hashes):,} hashes; at most {MOST:,} fit")
        if (self.hashes[1:] <= self.hashes[:-1]).any() or (
            len(self.hashes) and int(self.hashes[-1]) >= self.below
        ):
            raise ValueError("a sketch's hashes do not rise, or go beyond its bound")

    @classmethod
    def of(cls, hashes: Hashes, below: int = _ALL) -> Sketch:
        """Returns the sketch of all hashes below a bound."""
        least = _under(np.unique(hashes), below)
        return cls(least[:MOST], int(least[MOST])) if len(least) > MOST else cls(least, below)

    @classmethod
    def joined(cls, sketches: Iterable[Sketch]) -> Sketch:
        """Returns one sketch of the rows of all these sketches."""
        sketches = list(sketches)
        if not sketches:
            return cls()
        return cls.of(np.concatenate([s.hashes for s in sketches]), min(s.below for s in sketches))

    def without(self, others: Iterable[Sketch]) -> Sketch:
        """Returns this sketch without the hashes of the others."""
        hashes = self.hashes
        for other in others:
            hashes = np.setdiff1d(hashes, other.hashes)
        return Sketch(hashes, self.below)

    @property
    def is_complete(self) -> bool:
        """Whether it has the hashes of all rows."""
        return self.below == _ALL

    def share_in(self, other: Sketch) -> float:
        """Returns the share of its rows that are in the other. It is exact if both are whole."""
        below = min(self.below, other.below)
        mine, theirs = _under(self.hashes, below), _under(other.hashes, below)
        return len(np.intersect1d(mine, theirs, assume_unique=True)) / max(1, len(mine))

    def to_json(self) -> dict[str, Any]:
        return {
            "below": f"{self.below:x}",
            "hashes": base64.b64encode(self.hashes.astype("<u8").tobytes()).decode(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Sketch:
        try:
            return cls(
                np.frombuffer(base64.b64decode(value["hashes"], validate=True), "<u8").astype(
                    np.uint64
                ),
                int(value["below"], 16),
            )
        except (binascii.Error, KeyError, TypeError) as error:
            raise ValueError(f"a sketch that cannot be read ({error})") from None


def _under(hashes: Hashes, below: int) -> Hashes:
    """Returns the part of ascending hashes that is below a bound."""
    return hashes if below == _ALL else hashes[: int(np.searchsorted(hashes, np.uint64(below)))]


Gathered = dict[tuple[str, str], Hashes]
"""(recognition, split) → the smallest hashes so far."""


def gather(into: Gathered, added: Gathered) -> Gathered:
    """Adds hashes in place. Adding the same hashes again changes nothing, so tasks may run twice."""
    for key, hashes in added.items():
        before = into.get(key)
        both = hashes if before is None else np.concatenate([before, hashes])
        into[key] = np.unique(both)[: MOST + 1]  # the last one becomes the bound
    return into


class SketchSum:
    """Adds up the hashes of Spark's tasks in an accumulator."""

    def zero(self, value: Gathered) -> Gathered:
        return dict(value)

    def addInPlace(self, value1: Gathered, value2: Gathered) -> Gathered:
        return gather(value1, value2)


@dataclass(frozen=True, slots=True, kw_only=True)
class HashBounds:
    """The bounds above which a job's tasks may ignore hashes. Over all tasks together, about twice as many hashes as a
    sketch holds are below the bound."""

    below: Mapping[str, int]
    """The bound of each split."""

    @classmethod
    def of(cls, rows: int, shares: Mapping[str, float]) -> HashBounds:
        return cls(
            below={
                split: max(1, min(_ALL, int(_ALL * (2 * MOST / max(1.0, rows * share)))))
                for split, share in shares.items()
            }
        )

    def smallest(self, split: str, hashes: Hashes) -> Hashes:
        below = self.below[split]
        return hashes if below == _ALL else hashes[hashes < np.uint64(below)]

    def sketches(self, gathered: Gathered) -> dict[str, dict[str, Sketch]]:
        """Returns the sketches by recognition, then by split."""
        by_recognition: dict[str, dict[str, Sketch]] = {}
        for (recognition, split), hashes in sorted(gathered.items()):
            by_recognition.setdefault(recognition, {})[split] = Sketch.of(hashes, self.below[split])
        return by_recognition
