"""Exact sums and distributions, which do not depend on the order of rows or on the number of workers.

A float64, or its square, is split into whole numbers at fixed scales. Sums of whole numbers have no rounding errors.
A distribution counts ranges of values. They have 11 significant bits at first: whole numbers below 2048 are exact, and
others are known to within 0.1 %. Where too many values lie in a range that decides, a second count divides it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from sluice.etl.ops.hashing import Floats, Whole

_STEP = 28
"""The bits of a part: so 2^35 of them add up within 64 bits."""
_PARTS = 3  # of the 53 bits of a number
_HALF = 2.0**27 + 1  # splits 53 bits in two halves (Dekker)
_BITS, _ALL_BITS = 11, 53
"""The significant bits of a range at first, and of a float."""
_MOST_RANGES, _LEAST_BITS = 17, 4
"""Ranges are divided into about 2^17 in all, and each into 2^4 at least."""
_FINE, _FINE_OF_PART = 1024, 16
"""A range that decides holds at most one in so many values, and one in so many of a part's values."""
_SIGN = "~"
"""What stands in a range's name between its end and its bits. The name of a single value has no sign."""


def count_moments(values: Floats, powers: int) -> tuple[list[str], list[int]]:
    """Returns names and counts of finite values, to be added up over batches and read by `read_moments`.

    Counts the values, and sums their first `powers` powers (1 or 2). Each value, or its square, is cut into whole
    numbers x 2^scale, exactly."""
    if not len(values):
        return [], []
    fraction, exponent = np.frexp(values)
    floats = [(1, fraction, exponent)]
    if powers == 2:
        square = fraction * fraction
        high = fraction * _HALF - (fraction * _HALF - fraction)
        low = fraction - high
        lost = ((high * high - square) + 2 * high * low) + low * low
        for some in (square, lost):
            again, shift = np.frexp(some)
            floats.append((2, again, 2 * exponent + shift))
    sums = {(0, 0): len(values)}
    for power, fraction, exponent in floats:
        scale = (exponent - 1) // _STEP * _STEP
        rest = np.ldexp(fraction, exponent - scale)
        for number in range(_PARTS):
            whole = np.trunc(rest)
            rest = np.ldexp(rest - whole, _STEP)
            for level in np.unique(scale[whole != 0]).tolist():
                key = (power, level - number * _STEP)
                sums[key] = sums.get(key, 0) + int(whole[scale == level].astype(np.int64).sum())
    return [f"{power},{scale}" for power, scale in sums], list(sums.values())


def read_moments(counted: pa.Table) -> tuple[int, list[int]]:
    """Returns the number of values (1 if there are none) and the exact sums of their powers, in units of 2^-n, with n
    before them."""
    moments = [
        (*map(int, name.split(",")), count)
        for name, count in zip(
            counted["value"].to_pylist(), counted["count"].to_pylist(), strict=True
        )
    ]
    digits = max(0, -min((scale for _, scale, _ in moments), default=0))
    sums = [0, 0, 0]
    for power, scale, count in moments:
        sums[power] += count << (scale + digits if power else 0)
    return digits, [max(1, sums[0]), *sums[1:]]


def deviation(digits: int, rows: int, first: int, second: int) -> float:
    """Returns the standard deviation of values, by their number and the sums of `read_moments`: the square root of a
    quotient that may be too large for a float."""
    numerator, denominator = (second * rows << digits) - first * first, rows * rows << 2 * digits
    half = (numerator.bit_length() - denominator.bit_length()) // 2
    scaled = (
        numerator / (denominator << 2 * half)
        if half > 0
        else (numerator << -2 * half) / denominator
    )
    return math.ldexp(math.sqrt(scaled), half)


def quotient(numerator: int, denominator: int) -> float:
    """Returns the nearest float. If the quotient is too large for a float, returns an infinity."""
    try:
        return numerator / denominator
    except OverflowError:
        return math.inf if numerator > 0 else -math.inf


def cut(values: Floats, bits: int) -> Floats:
    """Returns the values rounded toward 0, to so many significant bits."""
    mask = np.uint64(0xFFFFFFFFFFFFFFFF << (_ALL_BITS - bits) & 0xFFFFFFFFFFFFFFFF)
    return (np.ascontiguousarray(values).view(np.uint64) & mask).view(np.float64) + 0.0


def distribution(values: Floats, ranges: pa.Table | None = None) -> tuple[list[str], list[int]]:
    """Returns the names of ranges of values, and how many values are in each. A value at the end of a range is counted
    alone. With `ranges`, from `undecided`, only their values are counted, in narrower ranges."""
    bits = _BITS
    if ranges is not None:
        ends, widths = _read_names(ranges)
        before = int(widths[0])  # all have the same
        wide = cut(values, before)
        values = values[(wide != values) & np.isin(wide, ends)]
        parts = _MOST_RANGES - (len(ends) - 1).bit_length()
        bits = min(_ALL_BITS, before + max(_LEAST_BITS, parts))
    ends = cut(values, bits)
    alone = ends == values
    names, counts = list[str](), list[int]()
    for some, sign in ((ends[alone], ""), (ends[~alone], f"{_SIGN}{bits}")):
        kinds, times = np.unique(some, return_counts=True)
        names += [f"{value!r}{sign}" for value in kinds.tolist()]
        counts += times.tolist()
    return names, counts


def undecided(counted: pa.Table, shares: Sequence[float]) -> pa.Table | None:
    """Returns the ranges with a quantile that must be divided, because they hold too many values. None: there are
    none."""
    order, (_, bits), below = _sorted(counted)
    if not len(order):
        return None
    rows = order[np.unique(_places(below, shares))]
    limit = max(_FINE, _FINE_OF_PART * (len(shares) + 1))
    many = counted["count"].to_numpy()[rows] * limit > below[-1]
    chosen = rows[many & (bits[rows] > 0)]
    return counted.take(pa.array(chosen)) if len(chosen) else None


def quantiles(counted: pa.Table, shares: Sequence[float]) -> tuple[list[float], bool]:
    """Returns the quantiles of a distribution (value, count), and whether a range was divided. For each share, the
    quantile is the end of the first range such that at least that share of all values is in it or below."""
    order, (ends, bits), below = _sorted(counted)
    if not len(order):
        return [0.0 for _ in shares], False
    divided = (bits > _BITS) | (cut(ends, _BITS) != ends)
    chosen: list[float] = ends[order][_places(below, shares)].tolist()
    return chosen, bool(divided.any())


def _sorted(counted: pa.Table) -> tuple[Whole, tuple[Floats, Whole], Whole]:
    """Returns the order of the ranges, their ends and bits, and how many values each has with those before it."""
    ends, bits = _read_names(counted)
    # The other values of a range are farther from 0 than its end.
    order = np.lexsort((np.sign(ends) * (bits > 0), ends))
    return order, (ends, bits), np.cumsum(counted["count"].to_numpy()[order])


def _read_names(counted: pa.Table) -> tuple[Floats, Whole]:
    parts = [name.partition(_SIGN) for name in counted["value"].to_pylist()]
    ends = np.array([float(end) for end, _, _ in parts], np.float64)
    return ends, np.array([int(bits or 0) for _, _, bits in parts], np.int64)


def _places(below: Whole, shares: Iterable[float]) -> Whole:
    return np.searchsorted(below, [math.ceil(share * int(below[-1]) - 1e-9) for share in shares])
