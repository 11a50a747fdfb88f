"""Exact sums and distributions, which do not depend on the order of rows or on the number of workers.

A float64, or its square, is split into whole numbers at fixed scales. Sums of whole numbers have no rounding errors.
Distributions keep 11 significant bits of a value: whole numbers below 2048 exactly, others to within 0.1 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.ops.hashing import Floats, Whole

_STEP = 28
"""The bits of a part: so 2^35 of them add up within 64 bits."""
_PARTS = 3  # of the 53 bits of a number
_HALF = 2.0**27 + 1  # splits 53 bits in two halves (Dekker)
_COARSE = np.uint64(~((1 << 42) - 1) & 0xFFFFFFFFFFFFFFFF)


def parts(values: Floats, power: int = 1) -> dict[int, Floats]:
    """Writes the finite values, or with a `power` of 2 their squares, as sums of whole numbers x 2^scale, exactly;
    scales at which all are 0 are left out."""
    fraction, exponent = np.frexp(values)
    found: dict[int, Floats] = {}
    if power == 1:
        _cut(fraction, exponent, found)
    else:
        square = fraction * fraction
        high = fraction * _HALF - (fraction * _HALF - fraction)
        low = fraction - high
        lost = ((high * high - square) + 2 * high * low) + low * low
        for some in (square, lost):
            again, shift = np.frexp(some)
            _cut(again, 2 * exponent + shift, found)
    return found


def _cut(fraction: Floats, exponent: npt.NDArray[np.integer], found: dict[int, Floats]) -> None:
    """Adds the parts of fraction x 2^exponent to those that were found, scale by scale."""
    scale = (exponent - 1) // _STEP * _STEP
    rest = np.ldexp(fraction, exponent - scale)
    for number in range(_PARTS):
        whole = np.trunc(rest)
        rest = np.ldexp(rest - whole, _STEP)
        for one in np.unique(scale[whole != 0]).tolist():
            here = np.where(scale == one, whole, 0.0)
            place = one - number * _STEP
            found[place] = found[place] + here if place in found else here


def count_moments(
    values: Floats, place: Whole, keys: pa.Array, powers: Iterable[int] = (1, 2)
) -> tuple[pa.Array, pa.Array]:
    """Returns names and counts, to be added up over batches and read by `read_moments`. `place` is the place of each
    value's key."""
    names = [pc.binary_join_element_wise("n:", keys, "")]
    counts = [np.bincount(place, minlength=len(keys))]
    for power in powers:
        for scale, whole in parts(values, power).items():
            sums = np.zeros(len(keys), np.int64)
            np.add.at(sums, place, whole.astype(np.int64))
            names.append(pc.binary_join_element_wise(f"{power},{scale}:", keys, ""))
            counts.append(sums)
    return pa.concat_arrays(names), pa.array(np.concatenate(counts).astype(np.int64))


def read_moments(counted: pa.Table) -> tuple[int, dict[str, list[int]]]:
    """Returns the number of each key's values and the exact sums of their powers, in units of 2^-n, with n before
    them."""
    found = []
    for name, count in zip(counted["value"].to_pylist(), counted["count"].to_pylist(), strict=True):
        head, _, key = name.partition(":")
        power, _, scale = head.partition(",")
        found.append((key, "n12".index(power), int(scale or 0), count))
    digits = max(0, -min((scale for _, _, scale, _ in found), default=0))
    sums: dict[str, list[int]] = {}
    for key, power, scale, count in found:
        sums.setdefault(key, [0, 0, 0])[power] += count << (scale + digits if power else 0)
    return digits, sums


def deviation(digits: int, rows: int, first: int, second: int) -> float:
    """Returns the standard deviation of values, by their number and the sums of `read_moments`."""
    return root((second * rows << digits) - first * first, rows * rows << 2 * digits)


def quotient(numerator: int, denominator: int) -> float:
    """Returns the nearest float. If the quotient is too large for a float, returns an infinity."""
    try:
        return numerator / denominator
    except OverflowError:
        return math.inf if numerator > 0 else -math.inf


def root(numerator: int, denominator: int) -> float:
    """Returns the square root of a quotient of 0 or more. The quotient may be too large for a float."""
    half = (numerator.bit_length() - denominator.bit_length()) // 2
    scaled = (
        numerator / (denominator << 2 * half)
        if half > 0
        else (numerator << -2 * half) / denominator
    )
    return math.ldexp(math.sqrt(scaled), half)


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
    found: list[float] = values[np.searchsorted(below, ranks)].tolist()
    return found
