"""`Profile`: small counts of a version's columns, which add up over files. `drift` compares two profiles.

Values are counted in coarse bins, so that a profile stays small: numbers in about half octaves, ids in octaves of their
rank. Ids are in the order of falling counts, so these are bands of popularity.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.common.errors import UsageError
from sluice.etl.ops.base import FIRST, NO_NUMBER, NULL
from sluice.etl.ops.hashing import AnyArray, Floats, Whole, hash_texts, offsets_and_bytes
from sluice.etl.ops.lists import flat
from sluice.etl.schema import BagSizes, Field
from sluice.etl.spec.nested_columns import join_chunks

_TEXT_BINS = 64
_LEAST = 1e-4  # the least share of a bin, because an empty bin would make the index infinite


class DriftError(UsageError):
    """A version that differs too much from the version before. Nothing of it was published."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Describes the values of each column. `columns[name]` has the number of rows (or elements) and the bins. Depending
    on the role, it also has the least, largest and mean value, and the sizes of bags."""

    columns: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: pa.Table, fields: Sequence[Field], buckets: Mapping[str, int]) -> Profile:
        """Returns the profile of one row group. `buckets` is the number of ids from 2 on for unknown values."""
        return cls(
            {
                f.name: _column(f, join_chunks(rows[f.name]), buckets.get(f.name, 0))
                for f in fields
                if f.role != "key"
            }
        )

    @classmethod
    def joined(cls, parts: Iterable[Profile]) -> Profile:
        """Returns the profile of all parts, which does not depend on their order."""
        columns: dict[str, list[Mapping[str, Any]]] = {}
        for part in parts:
            for name, column in part.columns.items():
                columns.setdefault(name, []).append(column)
        return cls({name: _joined(same) for name, same in columns.items()})

    @property
    def bags(self) -> dict[str, BagSizes]:
        """The smallest, mean and largest bag of each column that has bags."""
        return {
            name: (c["bag"][0], c["rows"] / max(1, c["bag"][2]), c["bag"][1])
            for name, c in self.columns.items()
            if "bag" in c
        }


def _column(f: Field, values: pa.Array, buckets: int) -> dict[str, Any]:
    if f.nullable:
        return _as_read(values)
    if f.role == "id_list":
        if f.layout == "bytes":
            offsets, content = offsets_and_bytes(values)
            lengths = np.diff(offsets) // 4
            ids = content[offsets[0] : offsets[-1]].view("<u4")
        else:
            elements, lengths = flat(values)
            ids = np.asarray(elements)
        return _bag(lengths) | _ids(ids, buckets)
    numbers = np.asarray(values)
    if f.role == "sparse":
        return _left(numbers) if f.online else _ids(numbers, buckets)
    return _numbers(numbers.astype(np.float64))


def _as_read(values: pa.Array) -> dict[str, Any]:
    """Counts texts or numbers, or lists of them, from which the loader makes features. Texts are put in bins by
    hash."""
    if pa.types.is_list(values.type):
        elements, lengths = flat(values)
        return _bag(lengths) | _as_read(elements)
    if not pa.types.is_string(values.type):
        return _left(np.asarray(values))
    bins = _counted((hash_texts(values.drop_null()) % np.uint64(_TEXT_BINS)).astype(np.int64))
    return _with_nulls({"bins": bins}, len(values), values.null_count)


def _with_nulls(profile: dict[str, Any], rows: int, nulls: int) -> dict[str, Any]:
    """Adds missing values to what was counted of the others."""
    bins = profile["bins"] | ({"null": nulls} if nulls else {})
    return {**profile, "rows": rows, "nulls": nulls, "bins": bins}


def _bag(lengths: AnyArray) -> dict[str, Any]:
    """Counts the bags of a batch with these numbers of ids."""
    ends = int(lengths.min(initial=2**31 - 1)), int(lengths.max(initial=0))
    return {"bag": [*ends, len(lengths)]}


def _left(numbers: AnyArray) -> dict[str, Any]:
    """Counts numbers from which the loader makes ids. Some may be missing."""
    missing = np.isnan(numbers) if numbers.dtype == np.float64 else numbers == NO_NUMBER
    most = float(np.finfo(np.float32).max)
    profile = _numbers(np.clip(numbers[~missing].astype(np.float64), -most, most))
    return _with_nulls(profile, len(numbers), int(missing.sum()))


def _numbers(wide: Floats) -> dict[str, Any]:
    with np.errstate(over="ignore", invalid="ignore"):
        return {
            "rows": len(wide),
            "least": float(wide.min(initial=math.inf)),
            "largest": float(wide.max(initial=-math.inf)),
            "sum": float(wide.sum()),
            "bins": _counted(np.rint(np.arcsinh(wide) * 4).astype(np.int64)),
        }


def _ids(ids: AnyArray, buckets: int) -> dict[str, Any]:
    """Counts ids in bins: `null`, `unseen`, and octaves of the place in the vocabulary."""
    kinds, counts = _tally(ids)
    place = kinds.astype(np.int64) - FIRST - buckets
    known = place >= 0
    octave = np.bincount(np.log2(place[known] + 1.0).astype(np.int64), counts[known])
    bins = {f"octave {k}": int(octave[k]) for k in np.flatnonzero(octave).tolist()}
    nulls, unseen = int(counts[kinds == NULL].sum()), int(counts[(kinds >= FIRST) & ~known].sum())
    return {
        "rows": len(ids),
        "nulls": nulls,
        "unseen": unseen,
        "bins": bins | {k: v for k, v in (("null", nulls), ("unseen", unseen)) if v},
    }


def _counted(values: Whole) -> dict[str, int]:
    kinds, counts = _tally(values)
    return {str(k): int(c) for k, c in zip(kinds.tolist(), counts.tolist(), strict=True)}


def _tally(values: AnyArray) -> tuple[AnyArray, Whole]:
    """Returns the different whole numbers, rising, and how often each occurs."""
    least = int(values.min(initial=0))
    if int(values.max(initial=0)) - least >= 4 * len(values):  # far apart: sorting them is cheaper
        kinds, counts = np.unique(values, return_counts=True)
        return kinds, counts
    counts = np.bincount(values - least)
    kinds = np.flatnonzero(counts)
    return kinds + least, counts[kinds]


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Adds up what is counted of one column in several parts."""
    merged: dict[str, Any] = {}
    for key in parts[0]:
        values = [part[key] for part in parts]
        if key == "bins":
            sums: Counter[str] = Counter()
            for counts in values:
                sums.update(counts)
            merged[key] = dict(sums)
        elif key == "bag":
            least, largest, rows = zip(*values, strict=True)
            merged[key] = [min(least), max(largest), sum(rows)]
        else:
            # A sum of floats depends on their order.
            add = {"least": min, "largest": max}.get(key, sum)
            merged[key] = add(sorted(values))
    return merged


def stability(before: Mapping[str, int], after: Mapping[str, int]) -> float:
    """Returns the population stability index of two sets of bins. It is 0 if they are equal. Above 0.25 is a shift."""
    sums = [max(1, sum(side.values())) for side in (before, after)]
    index = 0.0
    for name in before.keys() | after.keys():
        old, new = (
            max(_LEAST, side.get(name, 0) / total)
            for side, total in zip((before, after), sums, strict=True)
        )
        index += (new - old) * math.log(new / old)
    return index


def _share(column: Mapping[str, Any], name: str) -> float:
    return float(column.get(name, 0)) / max(1, int(column["rows"]))


def drift(
    before: Profile,
    after: Profile,
    lost: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {}),
) -> dict[str, dict[str, float]]:
    """Returns psi, unseen (the share now) and nulls (the change of the share) of each column of both versions.

    `lost` are the shares of missing or unreadable values, before and after, which fills hide in the table."""
    drifts = {}
    for name in before.columns.keys() & after.columns.keys():
        old, new = before.columns[name], after.columns[name]
        nulls = _share(new, "nulls") - _share(old, "nulls")
        if name in lost[0] and name in lost[1]:
            nulls = max(nulls, lost[1][name] - lost[0][name], key=abs)
        drifts[name] = {
            "psi": round(stability(old["bins"], new["bins"]), 4),
            "unseen": round(_share(new, "unseen"), 4),
            "nulls": round(nulls, 4),
        }
    return dict(sorted(drifts.items()))
