"""Decides what a column is from its name and sampled values: whether numbers are ids or amounts, how amounts are
spread, and whether it is there with one label only (`label_leaks`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.ops.hashing import Flags
from sluice.etl.spec.nested_columns import is_list, is_text
from sluice.ingest.plain.probe import ColumnFacts, elements
from sluice.ingest.plain.recipe import is_number

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_IDS = frozenset(
    _WORDS.findall("""
    ad advertiser album app artist author banner brand browser campaign carrier cat category channel city class
    code cohort connection country creative customer device domain film gender genre geo group hash id ids ip
    item keyword kind lang language location member merchant model movie network os page pid placement platform
    pos position postcode product publisher query region search segment seller session sex shop site sku slot
    song source state status store tag topic type uid user uuid vendor version video visitor website zip zipcode
    zone""")
)
_AMOUNTS = frozenset(
    _WORDS.findall("""
    age amount average avg balance bid budget bytes clicks cnt conversions cost count counts days depth discount
    distance duration elapsed fee freq frequency height hours impressions income installs latency len length
    likes max mean median min minutes num number orders pct percent price probability purchases qty quantity
    rank rate rating ratio revenue salary sales score seconds shares size spend std sum temperature total value
    variance views visits weight width years""")
)
_FEW = 1_000
"""The fewest values from which the distribution of a column is judged."""
_ENOUGH = 20
"""The fewest values in a range from which its density is judged."""
_TO_MIDDLE, _TO_END = 2, 4
"""The density of counts falls by these factors from its peak to the middle of the range, and from there to the end."""
_WIDE, _COMMON = 32, 0.25
"""In a range of so many values or more, a value with this share of the rows is a frequent id and not a count."""
_MANY_ROWS = 10**9
_MOST_FILLED, _FILLED = 200, 0.9
"""In a range of so many values or more, ids that repeat fill this share of it in so many rows. Counts do not."""
_FAR = 8.0
"""A column is skewed if its largest value is this many times as far from the median as the 90th percentile."""
_NEARLY = 0.98
_LEAST_ROWS, _MOST_COMMON = 20, 0.8
"""A column is reported if each half of the sample has this many rows with it, and if at most this share of all rows has
that label."""


def words_of(name: str) -> list[str]:
    """Returns the words of a name in lower case. `userId` and `user_id` have the same words."""
    return [word.lower() for word in _WORDS.findall(name)]


def is_named_id(name: str) -> bool | None:
    """Whether a column's name means ids (True) or amounts (False), by its last known word. None: no word is known."""
    for word in reversed(words_of(name)):
        if word in _IDS or word in _AMOUNTS:
            return word in _IDS
    return None


def is_amount(name: str, facts: ColumnFacts) -> bool:
    """Whether whole numbers are amounts, such as counts, and not ids.

    If the name does not tell, the distribution does. Counts begin near 0, and beyond their most frequent range their
    density falls with each doubling, until most values do not occur. Ids fill their range, or have gaps everywhere."""
    named = is_named_id(name)
    if named is not None:
        return not named
    values = numbers_of(facts)
    if not len(values):
        return False
    lowest = values.min()
    if facts.distinct <= 2:  # a flag
        return bool(lowest >= 0 and values.max() <= 1)
    if len(values) < _FEW or not -_FEW < lowest <= 1:
        return False
    wide = values.max() - lowest + 1
    if wide >= _MOST_FILLED and likely_values(facts, _MANY_ROWS) >= _FILLED * wide:
        return False
    doublings = np.log2(values - lowest + 1).astype(int)
    counts = np.bincount(doublings)
    for number in range(int(np.log2(_WIDE)), len(counts)):
        within = values[doublings == number]
        if len(within) >= _ENOUGH and np.unique(within, return_counts=True)[
            1
        ].max() > _COMMON * len(within):
            return False
    density = (counts / 2.0 ** np.arange(len(counts)))[counts >= _ENOUGH]
    peak, last = int(density.argmax()), len(density) - 1
    middle = (peak + last + 1) // 2
    return bool(
        last >= peak + 2
        and density[peak] >= _TO_MIDDLE * density[middle]
        and density[middle] >= _TO_END * density[last]
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """How the numbers of a column are spread, estimated from a sample."""

    is_skewed: bool
    """Whether a few numbers are far larger than the others, and none is far below 0."""
    low: float
    mean: float
    """The mean, taken after the logarithm if the numbers are skewed."""
    deviation: float
    """The standard deviation, taken after the logarithm if the numbers are skewed."""
    limits: tuple[float, float] | None
    """Where outliers on both sides are clipped. None: no clipping."""


def spread_of(facts: ColumnFacts) -> Spread | None:
    """Estimates the spread. None if there are no numbers, or all are equal."""
    values = numbers_of(facts)
    if not len(values):
        return None
    known = [
        float(end)
        for end in (facts.low, facts.high)
        if isinstance(end, (int, float)) and np.isfinite(end)
    ]
    low, high = min([*known, values.min()]), max([*known, values.max()])
    tenth, median, most = np.quantile(values, [0.1, 0.5, 0.9])
    is_high = high - median > _FAR * max(most - median, 1e-9)
    is_low = median - low > _FAR * max(median - tenth, 1e-9)
    is_skewed = bool(
        is_high
        and low > -max(_FEW, most)
        and high > _FAR
        and not (is_low and low < 0 and -low > most)
    )
    limits = None
    if not is_skewed and (is_high or is_low) and high - low > _FAR:
        ends = np.quantile(values, [0.001, 0.999])
        limits = (float(ends[0]), float(ends[1])) if ends[0] < ends[1] else None
    if is_skewed:
        values = np.log(values - low + 1)
    if limits:
        values = np.clip(values, *limits)
    deviation = float(values.std())
    return (
        Spread(is_skewed, float(low), float(values.mean()), deviation, limits)
        if deviation
        else None
    )


def likely_values(facts: ColumnFacts, rows: int) -> int:
    """Estimates how many different values all rows have.

    It takes the larger of two estimates: Chao's, from values that came once and twice, and capture-recapture, from the
    values that both halves of the sample share. The second also works for files that are sorted by the column."""
    if facts.sampled is None or not facts.values:
        return facts.distinct
    values = elements(facts.sampled).drop_null()
    counts = pc.value_counts(values).field("counts").to_numpy()
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    chao = facts.distinct + once * (once - 1) / (2 * (twice + 1))
    first, second = pc.unique(values[: len(values) // 2]), pc.unique(values[len(values) // 2 :])
    common = pc.sum(pc.is_in(first, second)).as_py() or 0
    again = (len(first) + 1) * (len(second) + 1) / (common + 1) - 1
    most = facts.distinct / facts.values * max(rows, facts.values)
    if isinstance(facts.low, int) and isinstance(facts.high, int):
        most = min(most, facts.high - facts.low + 1)
    return round(max(facts.distinct, min(most, max(chao, again))))


def numbers_of(facts: ColumnFacts) -> npt.NDArray[np.float64]:
    """Returns the finite numbers of a sample."""
    if facts.sampled is None:
        return np.zeros(0)
    values = facts.sampled.drop_null().cast(pa.float64(), safe=False).to_numpy()
    numbers: npt.NDArray[np.float64] = values[np.isfinite(values)]
    return numbers


def label_leaks(
    facts: Mapping[str, ColumnFacts], label: npt.NDArray[np.float64]
) -> Iterator[tuple[str, str]]:
    """Yields columns that are there almost only where the label is 1, or 0, with the reason. They are probably written
    after the label is known, so rows to be scored do not have them. `label` has 0, 1 or NaN
    (missing) for each row of the sample. It must be so in both halves of the rows."""
    known = np.flatnonzero(~np.isnan(label))
    order = np.random.default_rng(0).permutation(known)
    for name, column in facts.items():
        if column.sampled is None or len(column.sampled) != len(label):
            continue
        there = _is_there(column.sampled)
        for which in (1, 0):
            of_class = label == which
            shares = [of_class[half][there[half]] for half in (order[::2], order[1::2])]
            if (
                min(map(len, shares)) >= _LEAST_ROWS
                and min(share.mean() for share in shares) >= _NEARLY
                and of_class[known].mean() <= _MOST_COMMON
            ):
                rows = f"{(there & of_class).sum():,} of {there.sum():,}"
                yield (
                    name,
                    f"is there almost only where the label is {which} ({rows} rows that have it)",
                )
                break


def _is_there(values: pa.Array) -> Flags:
    """Whether each value is neither missing nor empty nor 0."""
    if is_list(values.type):
        there = pc.greater(pc.list_value_length(values), 0)
    elif is_text(values.type):
        there = pc.greater(pc.utf8_length(values), 0)
    elif is_number(values.type):
        numbers = values.cast(pa.float64(), safe=False)
        there = pc.and_(pc.not_equal(numbers, 0.0), pc.is_finite(numbers))
    else:
        there = pc.is_valid(values)
    flags: Flags = there.fill_null(False).to_numpy(zero_copy_only=False)
    return flags
