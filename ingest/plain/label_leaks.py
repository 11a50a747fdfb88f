"""Finds columns that are there with one label only: `label_leaks`. Such a column is probably written after the label is
known, so rows to be scored do not have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.spec.input_values import is_text
from sluice.ingest.plain.probe import ColumnFacts, is_list

_NEARLY = 0.98
_LEAST_ROWS, _MOST_COMMON = 20, 0.8
"""A column is reported if each half of the sample has this many rows with it, and if at most this share of all rows has
that label."""


def label_leaks(
    facts: Mapping[str, ColumnFacts], label: npt.NDArray[np.float64]
) -> Iterator[tuple[str, str]]:
    """Yields columns that are there almost only where the label is 1, or 0, with the reason. `label` has 0, 1 or NaN
    (missing) for each row of the sample. It must be so in both halves of the rows."""
    known = np.flatnonzero(~np.isnan(label))
    order = np.random.default_rng(0).permutation(known)
    for name, one in facts.items():
        if one.sampled is None or len(one.sampled) != len(label):
            continue
        there = _is_there(one.sampled)
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
