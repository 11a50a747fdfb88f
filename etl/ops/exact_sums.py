"""Sums and distributions that come out the same whatever the order of rows: whole numbers, added up name by name.

A float64 is cut into whole numbers of a few fixed scales, each of which adds up without rounding; so a mean depends on
the values alone, not on how many workers saw them. Distributions keep 11 significant bits of a value: whole numbers
below 2048 exactly, others to within 0.1 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Floats = npt.NDArray[np.float64]
_SCALES = (84, 56, 28, 0, -28, -56)
FINEST = -_SCALES[-1]
"""The exponent of the finest scale: every part is a whole number of 2^-FINEST."""
_LIMIT = 2.0**124
_COARSE = np.uint64(~((1 << 42) - 1) & 0xFFFFFFFFFFFFFFFF)


def parts(values: Floats) -> dict[int, Floats]:
    """Writes the values as sums of whole numbers x 2^scale; scales at which all are 0 are left out."""
    rest = np.clip(values, -_LIMIT, _LIMIT)
    found = {}
    for scale in _SCALES:
        whole = np.trunc(np.ldexp(rest, -scale)) if scale > _SCALES[-1] else np.rint(np.ldexp(rest, -scale))
        rest = rest - np.ldexp(whole, scale)
        if whole.any():
            found[scale] = whole
    return found


def total(sums: Iterable[tuple[int, int]]) -> Fraction:
    """The sum of all values that were cut into parts, from the sum at each scale."""
    return sum((Fraction(count) * Fraction(2) ** scale for scale, count in sums), Fraction(0))


def coarse(values: Floats) -> Floats:
    """Values cut to 11 significant bits, toward 0."""
    return (np.ascontiguousarray(values).view(np.uint64) & _COARSE).view(np.float64) + 0.0


def distribution(values: Floats) -> tuple[list[str], list[int]]:
    """The coarse values as text, and how often each occurs."""
    kinds, counts = np.unique(coarse(values), return_counts=True)
    return [repr(v) for v in kinds.tolist()], counts.tolist()


def quantiles(table: pa.Table, shares: Iterable[float]) -> list[float]:
    """Quantiles of a distribution (value, count): for each share, the smallest value such that at least that share of
    all values are at or below it."""
    values = np.array([float(v) for v in table["value"].to_pylist()])
    order = np.argsort(values)
    values, counts = values[order], table["count"].to_numpy()[order]
    if not len(values):
        return [0.0 for _ in shares]
    below = np.cumsum(counts)
    return [float(values[int(np.searchsorted(below, math.ceil(share * int(below[-1]) - 1e-9)))]) if share > 0
            else float(values[0]) for share in shares]
