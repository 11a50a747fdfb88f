"""Finds columns that reveal the label: `label_leaks`. Such a column is probably written after the label is known, so
rows to be scored do not have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.spec.input_values import is_text
from sluice.ingest.plain.probe import ColumnFacts, is_list

_NEARLY = 0.98
_LEAST_CLASS = 5
"""Nothing is reported unless each half of the sample has this many rows of both labels."""
_LEAST_ROWS, _MOST_COMMON = 20, 0.8
"""A column that is present with only one label is reported if this many rows in each half have it, and if at most this
share of all rows has that label."""
_BINS = 100
_Floats = npt.NDArray[np.float64]
_Rows = npt.NDArray[np.int64]


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
        there = _is_there(one.sampled)
        for which in (1, 0):
            of_class = label == which
            shares = [of_class[half][there[half]] for half in halves]
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
        else:
            found = _auc_of_values(one.sampled, label, *halves)
            if found >= _NEARLY:
                rows = f"{len(halves[1]):,} rows"
                yield name, f"its values alone tell the label (AUC {found:.3f} on {rows})"


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


def _is_there(values: pa.Array) -> npt.NDArray[np.bool_]:
    """Whether each value is neither missing nor empty nor 0."""
    if is_list(values.type):
        there = pc.greater(pc.list_value_length(values), 0)
    elif is_text(values.type):
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


def _auc_of_values(values: pa.Array, label: _Floats, learned: _Rows, judged: _Rows) -> float:
    """Returns the AUC of a column's values on the judged rows, if each scores the mean label that it has in the learned
    rows."""
    if is_list(values.type):
        values = pc.list_value_length(values)
    if is_text(values.type):
        codes = values.dictionary_encode().indices.cast(pa.int64()).fill_null(-1).to_numpy() + 1
    else:  # if there are many numbers, neighbours share a code; missing ones have 0
        if pa.types.is_temporal(values.type):
            values = values.cast(pa.int32() if values.type.bit_width == 32 else pa.int64())
        numbers = values.cast(pa.float64(), safe=False).fill_null(np.nan)
        numbers = numbers.to_numpy(zero_copy_only=False)
        there = np.isfinite(numbers)
        ends = np.unique(numbers[there])
        if len(ends) > _BINS * 10:
            ends = np.unique(np.quantile(numbers[there], np.linspace(0, 1, _BINS)))
        codes = np.where(there, np.searchsorted(ends, np.where(there, numbers, 0), "right"), 0)
    counts = np.bincount(codes[learned], minlength=codes.max() + 1)
    positives = np.bincount(codes[learned], label[learned], minlength=codes.max() + 1)
    # A value that is not in the learned rows gets the mean rate.
    scores = (positives + label[learned].mean()) / (counts + 1)
    return auc(scores[codes[judged]], label[judged])
