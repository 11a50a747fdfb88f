"""Causal encodings against a slow twin: for each row, what lies strictly before it, counted by hand."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.etl.ops.base import OperatorError
from sluice.etl.ops.statistics import Count, Group, Target
from sluice.etl.spec.spec import Spec
from tests.etl.tables import column, struct_of, write_spec
from tests.etl.test_operators import learned
from tests.raises import raises

ROWS = st.lists(
    st.tuples(
        st.none() | st.sampled_from(["a", "b", ":", "1:a", ""]),
        st.integers(0, 1),
        st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 1.0, 1e9, 0.1 + 0.2, math.inf]),
        st.none()
        | st.sampled_from([math.nan, math.inf])
        | st.integers(-8000, 8000).map(lambda n: n / 8),
    ),
    max_size=30,
)
STRANGER = ("stranger", 0, None, 1.0)


def moment(at: float, step: float) -> float:
    return math.floor(at / step) * step if step and math.isfinite(at) else at


def applied(op, column_of, rows):
    """Learned from the rows in three batches, put together in two orders; applied to them, to one of each as a server
    sees it, which has no time, and to one that nobody has seen."""
    served = [(*row[:2], None, row[3]) for row in rows]
    batches = [column_of(part) for part in (rows[1::2], rows[::4], rows[2::4])]
    state = learned(op, *batches)
    assert learned(op, *reversed(batches)) == state
    return op.apply(column_of([*rows, *served, STRANGER]), op.prepare(state)).to_pylist(), [
        *rows,
        *served,
        STRANGER,
    ]


def before(rows, row, step):
    return [
        other for other in rows if row[2] is None or moment(other[2], step) < moment(row[2], step)
    ]


def of(rows, *places):
    kinds = (pa.string(), pa.int8(), pa.float64(), pa.float64())
    return [pa.array([row[place] for row in rows], kinds[place]) for place in places]


@settings(max_examples=40)
@given(ROWS, st.sampled_from([0.0, 2.0]), st.booleans())
def test_a_count_is_of_the_rows_before(rows, step, share):
    op = Count(past=True, past_step=step, share=share)
    got, asked = applied(
        op, lambda some: pa.StructArray.from_arrays(of(some, 0, 2), ["value", "time"]), rows
    )
    for value, row in zip(got, asked, strict=True):
        earlier = [other[0] for other in before(rows, row, step) if other[0] is not None]
        count = earlier.count(row[0])
        assert value == (
            None if row[0] is None else count / max(1, len(earlier)) if share else count
        )


@settings(max_examples=40)
@given(ROWS, st.sampled_from([0.0, 2.0]))
def test_a_target_is_of_the_clicks_before(rows, step):
    op = Target(past=True, past_step=step, smoothing=2.0)
    got, asked = applied(
        op,
        lambda some: pa.StructArray.from_arrays(of(some, 0, 1, 2), ["value", "label", "time"]),
        rows,
    )
    for value, row in zip(got, asked, strict=True):
        earlier = before(rows, row, step)
        mine = [other[1] for other in earlier if other[0] == row[0]]
        prior = sum(other[1] for other in earlier) / max(1, len(earlier))
        assert value == (sum(mine) + 2.0 * prior) / (len(mine) + 2.0)


@settings(max_examples=40)
@given(
    ROWS,
    st.sampled_from([0.0, 2.0]),
    st.sampled_from(["mean", "sum", "std", "count", "min", "max"]),
)
def test_a_groups_statistic_is_of_the_numbers_before(rows, step, of_them):
    op = Group(of=of_them, past=True, past_step=step)

    def column(some):
        pair = pa.StructArray.from_arrays(of(some, 0, 3), ["key", "number"])
        return pa.StructArray.from_arrays([pair, *of(some, 2)], ["value", "time"])

    got, asked = applied(op, column, rows)
    exactly = {
        "mean": statistics.mean,
        "sum": sum,
        "std": statistics.pstdev,
        "count": len,
        "min": min,
        "max": max,
    }
    for value, row in zip(got, asked, strict=True):
        mine = [
            Fraction(other[3])
            for other in before(rows, row, step)
            if other[0] == row[0] and other[3] is not None and math.isfinite(other[3])
        ]
        assert (value is None) == (not mine)
        if mine:
            assert value == pytest.approx(float(exactly[of_them](mine)), rel=1e-12, abs=1e-12)


def test_what_is_known_in_the_end_is_what_is_learned_without_past_to_the_last_bit():
    rows = [(f"k{n % 7}", n % 3 % 2, float(n // 5), 1e5 + n * 0.1) for n in range(400)]
    pair = pa.StructArray.from_arrays(of(rows, 0, 3), ["key", "number"])
    none = pa.nulls(len(rows), pa.float64())
    for of_them in ("mean", "sum", "std", "count", "min", "max"):
        plain, past = Group(of=of_them), Group(of=of_them, past=True)
        timed = pa.StructArray.from_arrays([pair, *of(rows, 2)], ["value", "time"])
        served = struct_of(value=pair, time=none)
        assert past.apply(served, past.prepare(learned(past, timed))) == plain.apply(
            pair, plain.prepare(learned(plain, pair))
        )


def test_what_cannot_be_is_refused_when_the_spec_is_read():
    text = write_spec(
        "click:int user:text at:float",
        column("user", "dense", "target, past = true%s"),
        table="\n%s",
    )
    timed = 'split_time = "at"\nsplit = {train = 0, test = 5}'
    assert Spec.parse(text % (timed, ", past_step = 3600")).columns
    with raises(OperatorError, "past_step = 5", "past = true"):
        Count(past_step=5.0)
