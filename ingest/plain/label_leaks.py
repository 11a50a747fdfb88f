"""Finds columns that reveal the label: `label_leaks`. Such a column is probably written after the label is known, so
rows to be scored do not have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.ingest.plain.probe import ColumnFacts, is_list

_NEARLY = 0.98
_LEAST_CLASS = 5
"""Nothing is reported unless each half of the sample has this many rows of both labels."""
_LEAST_ROWS, _MOST_COMMON = 20, 0.8
"""A column that is present with only one label is reported if this many rows in each half have it, and if at most this
share of all rows has that label."""
_BINS = 100
_Floats = npt.NDArray[np.float64]


def label_leaks(facts: Mapping[str, ColumnFacts], label: _Floats) -> Iterator[tuple[str, str]]:
    """Yields columns that nearly determine the label, with the reason. `label` has 0, 1 or NaN (missing) for each row
    of the sample.

    Scores are learned on one half of the rows and tested on the other. So a column whose values all differ, such as a
    row id, is not reported."""
    known = np.flatnonzero(~np.isnan(label))
    order = np.random.default_rng(0).permutation(known)
    halves = order[::2], order[1::2]
    if any(
        min(np.bincount(label[half].astype(int), minlength=2)) < _LEAST_CLASS for half in halves
    ):
        return
    for name, one in facts.items():
        if one.sampled is None or len(one.sampled) != len(label):
            continue
        if (why := _is_there_with_one_label(one.sampled, label, halves)) or (
            why := _values_tell(one.sampled, label, halves)
        ):
            yield name, why


def auc(scores: npt.NDArray[np.float64], labels: _Floats) -> float:
    """Returns the probability that a positive row scores higher than a negative one. A tie counts half."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    positives = labels.sum()
    return float(
        (ranks[labels > 0].sum() - positives * (positives + 1) / 2)
        / positives
        / (len(labels) - positives)
    )


def _is_there_with_one_label(
    values: pa.Array, label: _Floats, halves: tuple[npt.NDArray[np.int64], ...]
) -> str:
    there = _is_there(values)
    for which in (1, 0):
        shares = [
            (label[half][there[half]] == which).mean() if there[half].sum() >= _LEAST_ROWS else 0.0
            for half in halves
        ]
        common = (label[np.concatenate(halves)] == which).mean()
        if min(shares) >= _NEARLY and common <= _MOST_COMMON:
            rows = int((there & (label == which)).sum())
            return (
                f"is there almost only where the label is {which} ({rows:,} of {int(there.sum()):,} rows that have "
                "it)"
            )
    return ""


def _is_there(values: pa.Array) -> npt.NDArray[np.bool_]:
    """Whether each value is neither missing nor empty nor 0."""
    if is_list(values.type):
        there = pc.greater(pc.list_value_length(values), 0)
    elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        there = pc.greater(pc.utf8_length(values), 0)
    elif (
        pa.types.is_integer(values.type)
        or pa.types.is_floating(values.type)
        or pa.types.is_boolean(values.type)
    ):
        numbers = values.cast(pa.float64(), safe=False)
        there = pc.and_(pc.not_equal(numbers, 0.0), pc.is_finite(numbers))
    else:
        there = pc.is_valid(values)
    found: npt.NDArray[np.bool_] = there.fill_null(False).to_numpy(zero_copy_only=False)
    return found


def _values_tell(
    values: pa.Array, label: _Floats, halves: tuple[npt.NDArray[np.int64], ...]
) -> str:
    codes = _codes(values)
    learned, judged = halves
    counts = np.bincount(codes[learned], minlength=codes.max() + 1)
    positives = np.bincount(codes[learned], label[learned], minlength=codes.max() + 1)
    rate = label[learned].mean()
    # A value that is not in the first half gets the mean rate.
    scores = (positives + rate) / (counts + 1)
    found = auc(scores[codes[judged]], label[judged])
    return (
        f"its values alone tell the label (AUC {found:.3f} on {len(judged):,} rows)"
        if found >= _NEARLY
        else ""
    )


def _codes(values: pa.Array) -> npt.NDArray[np.int64]:
    """Maps each value to a small code. If there are many numbers, neighbours share a code. Missing values get 0."""
    if is_list(values.type):
        values = pc.list_value_length(values)
    if not pa.types.is_string(values.type) and not pa.types.is_large_string(values.type):
        kind = pa.int64() if pa.types.is_temporal(values.type) else pa.float64()
        if pa.types.is_temporal(values.type) and values.type.bit_width == 32:
            values = values.cast(pa.int32())
        numbers = values.cast(kind, safe=False).cast(pa.float64(), safe=False)
        found = numbers.fill_null(np.nan).to_numpy(zero_copy_only=False)
        there = np.isfinite(found)
        ends = np.unique(found[there])
        if len(ends) > _BINS * 10:
            ends = np.unique(np.quantile(found[there], np.linspace(0, 1, _BINS)))
        places: npt.NDArray[np.int64] = np.where(
            there, np.searchsorted(ends, np.where(there, found, 0), "right"), 0
        )
        return places
    known: npt.NDArray[np.int64] = (
        values.dictionary_encode().indices.cast(pa.int64()).fill_null(-1).to_numpy() + 1
    )
    return known
