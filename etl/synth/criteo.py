"""`Clicks`: makes synthetic clicks like Criteo's, with known probabilities. A row depends only on seed and row number.

The shape follows measurements of real Criteo logs. Nulls come in blocks of columns, one count may be negative, and
ranges saturate. Most distinct values of the long-tailed categories occur once, and some first occur on a later day.
The click model is planted: main effects of counts and of frequent values, and products of latent factors of pairs of
columns. A model without interactions cannot express these products.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sluice.etl.ops.hashing import Flags, Floats, Whole, mix

INTEGERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = ("label", *INTEGERS, *CATEGORIES)


def _rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


# Share of nulls, and the columns that are null together.
_NULLS = [
    (float(share), block)
    for share, *block in _rows("""
0.448 I1 I10
0.204 I3
0.198 I4 I13
0.049 I5
0.251 I6
0.049 I7 I9 I11
0.001 I8
0.773 I12
0.818 C22
0.45 C19 C20 C25 C26
0.133 C6
0.036 C3 C4 C12 C16 C21 C24
""")
]
# Counts: median, spread of the logarithm, largest value (where it saturates), weight in the click model.
_COUNTS = {
    name: (int(median), float(spread), int(largest), float(weight))
    for name, median, spread, largest, weight in _rows("""
I1 2 1.0 5775 0.3
I2 6 2.0 18522 0.0
I3 7 1.6 65535 -0.15
I4 5 1.0 969 0.0
I5 2500 2.2 1618112 -0.12
I6 45 1.7 12167 -0.2
I7 4 1.4 6000 0.22
I8 8 1.1 1500 0.0
I9 40 1.5 9000 0.15
I10 1 0.5 6 0.0
I11 2 0.9 150 0.25
I12 1 0.9 98 0.0
I13 5 1.0 1100 0.2
""")
}
# Categories: distinct values there are, share of the most frequent one (without one: what a log-uniform rank gives).
_VALUES = {
    name: (int(count), float(share[0]) if share else None)
    for name, count, *share in _rows("""
C1 300
C2 500
C3 2000000
C4 60000
C5 100 0.67
C6 7
C7 9000
C8 200
C9 3 0.89
C10 6000
C11 4000
C12 1000000
C13 2500
C14 26 0.36
C15 5000
C16 200000
C17 10
C18 2000
C19 400
C20 3
C21 400000
C22 8
C23 12
C24 12000
C25 40
C26 30000
""")
}
(_MAIN_EFFECTS,) = _rows("C1 C2 C5 C6 C8 C9 C14 C17 C18 C19 C20 C22 C23 C25")
_MAIN_SPREAD = 0.30
_CROSSES = _rows("""
C1 C17
C8 C14
C17 C23
C2 C23
C1 C14
C8 C25
C5 C6
""")
_CROSS_SPREAD = 0.55
_FACTORS = 2
_CLICK_RATE = 0.25
_SAMPLE = 8192  # how many rows set the bias
_FREQUENT = 512  # ranks beyond it have no effect of their own: nothing could be learned about them
_CHURN = 0.3  # share of the rarer values that are new each day, in columns of more than _CHURN_FROM values
_CHURN_FROM = 1_000
_STEADY = 64  # the most frequent ranks never change
_AUC_BINS = 4096

_GAMMA = 0x9E3779B97F4A7C15


def _stream(*parts: int | str) -> np.uint64:
    """Returns a constant that identifies one source of randomness."""
    state = 0
    for part in parts:
        for byte in str(part).encode() + b"\0":
            state = ((state ^ byte) * _GAMMA + 0x632BE59BD9B4E019) % 2**64
            state ^= state >> 29
    return np.uint64(state)


def _normal(count: int, *name: int | str) -> Floats:
    """Returns `count` standard normal numbers, the same ones for the same name."""
    generator = np.random.Generator(np.random.Philox(key=int(_stream(*name))))
    return generator.standard_normal(count)


@dataclass(frozen=True, slots=True)
class SyntheticRows:
    """Some consecutive rows. A value under a null mask exists, and the writer drops it."""

    first: int
    label: npt.NDArray[np.int8]
    probability: Floats
    """The true click probability, from which the label was drawn."""
    counts: Mapping[str, Whole]
    ranks: Mapping[str, Whole]
    """Ranks of the values of categories: 0 is the most frequent one; a value new on its day has a rank of its own."""
    nulls: Mapping[str, Flags]
    """The null masks of those columns that have nulls."""

    def __len__(self) -> int:
        return len(self.label)

    def codes(self, name: str) -> npt.NDArray[np.uint32]:
        """Returns the 32 bits of each value of a category. The log has them as eight hexadecimal digits."""
        return (
            mix(self.ranks[name].astype(np.uint64) + _stream("code", name)) >> np.uint64(32)
        ).astype(np.uint32)


@dataclass(frozen=True)
class Clicks:
    """The source of all rows of one seed."""

    seed: int = 0
    effects: Mapping[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        effects: dict[str, Any] = {}
        for name in _MAIN_EFFECTS:
            size = min(_VALUES[name][0], _FREQUENT)
            effects[name] = np.append(
                _MAIN_SPREAD * _normal(size + 1, self.seed, "main", name), 0.0
            )
        scale = math.sqrt(_CROSS_SPREAD / math.sqrt(_FACTORS))
        for pair in _CROSSES:
            for name in pair:
                size = min(_VALUES[name][0], _FREQUENT)
                factors = scale * _normal((size + 1) * _FACTORS, self.seed, "cross", *pair, name)
                effects["/".join((*pair, name))] = np.vstack(
                    [factors.reshape(size + 1, _FACTORS), np.zeros((1, _FACTORS))]
                )
        effects["bias"] = 0.0
        object.__setattr__(self, "effects", effects)
        effects["bias"] = self._bias()

    def _bias(self) -> float:
        """Returns the bias that makes the click rate the same for every seed."""
        truth = self.rows(0, _SAMPLE).probability
        logit = np.log(truth / (1.0 - truth))
        low = -20.0
        high = 20.0
        for _ in range(40):
            middle = (low + high) / 2
            above = (1.0 / (1.0 + np.exp(-(logit + middle)))).mean() > _CLICK_RATE
            low, high = (low, middle) if above else (middle, high)
        return low

    def rows(self, first: int, count: int, day: int = 0) -> SyntheticRows:
        """Makes the rows `first` to `first + count`, which belong to that day."""
        number = np.arange(first, first + count, dtype=np.uint64)
        base = mix(number * np.uint64(_GAMMA) + _stream("seed", self.seed))

        def uniform(*name: str) -> Floats:
            bits = mix(base ^ _stream(*name)) >> np.uint64(11)
            return (bits.astype(np.float64) + 0.5) * 2.0**-53

        nulls: dict[str, Flags] = {}
        for share, block in _NULLS:
            mask = uniform("null", block[0]) < share
            nulls |= dict.fromkeys(block, mask)
        counts = {name: _count(name, uniform("count", name)) for name in INTEGERS}
        ranks = {name: _rank(name, uniform("rank", name)) for name in CATEGORIES}
        probability = 1.0 / (1.0 + np.exp(-self._logit(counts, ranks, nulls)))
        label = (uniform("label") < probability).astype(np.int8)
        for name in CATEGORIES:
            if _VALUES[name][0] > _CHURN_FROM and day:
                # A share of the rarer values has a new identity on that day.
                mixed = mix(ranks[name].astype(np.uint64) ^ _stream("churn", name))
                chosen = mixed < np.uint64(int(_CHURN * 2**64))
                ranks[name][chosen & (ranks[name] >= _STEADY)] += day * _VALUES[name][0]
        return SyntheticRows(first, label, probability, counts, ranks, nulls)

    def _logit(
        self, counts: Mapping[str, Any], ranks: Mapping[str, Any], nulls: Mapping[str, Any]
    ) -> Floats:
        logit = np.full(len(ranks["C1"]), self.effects["bias"])
        for name, (median, _, _, weight) in _COUNTS.items():
            if weight:
                effect = weight * (np.log1p(np.maximum(counts[name], 0)) - math.log1p(median))
                logit += np.where(nulls[name], -0.5 * weight, effect) if name in nulls else effect
        # This count matters most in the middle of its range: no single weight can express that.
        logit += 0.9 * np.exp(-0.5 * (np.log1p(np.maximum(counts["I2"], 0)) - 2.0) ** 2) - 0.45
        places: dict[str, Any] = {}
        for name in dict.fromkeys((*_MAIN_EFFECTS, *(c for pair in _CROSSES for c in pair))):
            size = min(_VALUES[name][0], _FREQUENT)
            # The last row has no effect.
            place = np.where(ranks[name] < size, ranks[name], size + 1)
            places[name] = np.where(nulls[name], size, place) if name in nulls else place
        for name in _MAIN_EFFECTS:
            logit += self.effects[name][places[name]]
        for pair in _CROSSES:
            left, right = (self.effects["/".join((*pair, name))][places[name]] for name in pair)
            logit += np.einsum("ij,ij->i", left, right)
        return logit


def _count(name: str, u: Floats) -> Whole:
    """Draws counts: log-logistic about the median, cut where the real column saturates; I2 also counts down to -2."""
    median, spread, largest, _ = _COUNTS[name]
    value = (median + 1.0) * np.exp(spread * 0.5513 * (np.log(u) - np.log1p(-u))) - 1.0
    value = np.minimum(np.maximum(value, 0.0), largest)
    whole: Whole = value.astype(np.int64)
    if name == "I2":
        whole[u < 0.0975] = -1
        whole[u < 0.0006] = -2
    return whole


def _rank(name: str, u: Floats) -> Whole:
    """Draws ranks: log-uniform over the column's values, bent so that the first has the share that its column is to
    have."""
    values, top = _VALUES[name]
    if top is not None:
        u = u ** (math.log(math.log(2) / math.log(values + 1)) / math.log(top))
    rank: Whole = np.exp(u * math.log(values + 1)).astype(np.int64)
    return np.minimum(rank - 1, values - 1)


@dataclass
class BestAUC:
    """The expected AUC of a model that knows the true probabilities, added up over chunks in whole numbers."""

    clicks: Whole = field(default_factory=lambda: np.zeros(_AUC_BINS, np.int64))
    others: Whole = field(default_factory=lambda: np.zeros(_AUC_BINS, np.int64))

    def add(self, probability: Floats) -> None:
        bin_of = np.minimum((probability * _AUC_BINS).astype(np.int64), _AUC_BINS - 1)
        # Whole numbers below 2**53 have the same sum in any order.
        weight = np.rint(probability * 2**20)
        clicks = np.bincount(bin_of, weight, _AUC_BINS).astype(np.int64)
        self.clicks += clicks
        self.others += np.bincount(bin_of, minlength=_AUC_BINS) * 2**20 - clicks

    @property
    def value(self) -> float:
        clicks, others = self.clicks.astype(np.float64), self.others.astype(np.float64)
        if not clicks.sum() or not others.sum():
            return 0.5
        below = np.cumsum(others) - others
        return float((clicks * (below + 0.5 * others)).sum() / (clicks.sum() * others.sum()))
