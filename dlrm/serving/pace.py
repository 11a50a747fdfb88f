"""Predicts how long a batch takes, from earlier batches: `Pace`. It does no I/O and reads no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_KEPT_SHARE = 0.9  # share of earlier observations that is kept at each new batch
_LARGEST_JUMP = 4.0  # a batch counts as at most 4 times slower or faster than expected, because one may be an outlier
_LEAST = 1e-9
_LEAST_SPREAD = 1e-3
"""If the sizes of batches differ less, they do not show which part of the time each unit takes."""


@dataclass(frozen=True, slots=True)
class Pace:
    """A batch takes `fixed` seconds, and `each` more for every unit of work in it."""

    fixed: float = 1e-3
    each: float = 1e-5
    sums: tuple[float, ...] = field(default=(), compare=False, repr=False)
    """Sums over batches of (1, units, units², seconds, units × seconds), each batch weighted by 1 / seconds², so that
    an error counts as a share of the batch's own time; older batches count less."""

    @classmethod
    def from_two_batches(cls, small: tuple[int, float], large: tuple[int, float]) -> Pace:
        """Returns the pace from two batches, each (units, seconds). The small batch may have been delayed. So at least
        half of the large batch's time counts as spent on its units."""
        each = max(large[1] - small[1], large[1] / 2) / (large[0] - small[0])
        return cls(max(_LEAST, min(small[1], large[1]) - each * small[0]), each)

    def seconds(self, units: int) -> float:
        """Returns how long a batch of so many units takes."""
        return self.fixed + self.each * units if units else 0.0

    def after(self, units: int, seconds: float) -> Pace:
        """Returns the pace after one more batch: the line that fits all batches best."""
        expected = self.seconds(units)
        took = min(max(seconds, expected / _LARGEST_JUMP), expected * _LARGEST_JUMP)
        sums = self.sums or _sum_terms(*(_terms(n, self.seconds(n)) for n in (1, 1000)))
        one, x, xx, y, xy = sums = _sum_terms(
            tuple(_KEPT_SHARE * value for value in sums), _terms(units, took)
        )
        spread = one * xx - x * x
        if spread < _LEAST_SPREAD * one * xx:
            share = (took / expected) ** (1 - _KEPT_SHARE)
            return Pace(self.fixed * share, self.each * share, sums)
        fixed, each = (xx * y - x * xy) / spread, (one * xy - x * y) / spread
        if fixed < _LEAST:
            fixed, each = _LEAST, xy / xx
        if each < _LEAST:
            fixed, each = y / one, _LEAST
        return Pace(fixed, each, sums)

    def units_within(self, seconds: float) -> int:
        """Returns how many units fit into so many seconds, at least 1, because a request cannot be split."""
        return max(1, int((seconds - self.fixed) / self.each))

    def retry_after(self, ahead_s: float, units: int, within_s: float) -> int:
        """Returns 0 if a request of so many units, after `ahead_s` seconds of other work, is answered within `within_s`
        seconds. Otherwise returns the seconds after which to try again. Without other work it returns 0."""
        overdue_s = ahead_s + self.seconds(units) - within_s
        return max(1, math.ceil(overdue_s)) if ahead_s > 0 and overdue_s > 0 else 0


def _terms(units: int, seconds: float) -> tuple[float, ...]:
    weight = 1 / max(_LEAST, seconds) ** 2
    return (
        weight,
        weight * units,
        weight * units * units,
        weight * seconds,
        weight * units * seconds,
    )


def _sum_terms(*summands: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*summands, strict=True)))
