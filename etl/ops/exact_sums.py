"""Exact sums and distributions, which do not depend on the order of rows or on the number of workers.

A float64, or its square, is split into whole numbers at fixed scales. Sums of whole numbers have no rounding errors.
Distributions keep 11 significant bits of a value: whole numbers below 2048 exactly, others to within 0.1 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from sluice.etl.ops.hashing import Floats

_STEP = 28
"""The bits of a part: so 2^35 of them add up within 64 bits."""
_PARTS = 3  # of the 53 bits of a number
_HALF = 2.0**27 + 1  # splits 53 bits in two halves (Dekker)
_COARSE = np.uint64(~((1 << 42) - 1) & 0xFFFFFFFFFFFFFFFF)


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


def coarse(values: Floats) -> Floats:
    """Returns the values rounded toward 0, to 11 significant bits."""
    return (np.ascontiguousarray(values).view(np.uint64) & _COARSE).view(np.float64) + 0.0


def distribution(values: Floats) -> tuple[list[str], list[int]]:
    """Returns the different coarse values as text, and how often each occurs."""
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
    ranks = [math.ceil(share * int(below[-1]) - 1e-9) for share in shares]
    chosen: list[float] = values[np.searchsorted(below, ranks)].tolist()
    return chosen
