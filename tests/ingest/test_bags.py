"""Bags against what plain Python makes of them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.stages.bags import BagError, shuffle_bags
from sluice.ingest.stages.scatter_kernel import load_compiled
from tests.raises import raises

load_compiled(bags=True)
BAG = st.lists(st.integers(0, 2**31 - 1), max_size=4) | st.none()


def _packed(bag):
    return None if bag is None else np.array(bag, "<i4").tobytes()


KINDS = {
    "bytes": lambda bags: pa.array([_packed(b) for b in bags], pa.binary()),
    "large bytes": lambda bags: pa.array([_packed(b) for b in bags], pa.large_binary()),
    "int32 lists": lambda bags: pa.array(bags, pa.list_(pa.int32())),
    "int64 lists": lambda bags: pa.array(bags, pa.large_list(pa.int64())),
    "a slice": lambda bags: pa.array([b"1234", *[_packed(b) for b in bags], b"5678"], pa.binary())[
        1:-1
    ],
}


@st.composite
def windows(draw):
    """A column's bags in pieces, and an order of all its rows, or of some, or as they lie."""
    length = draw(st.sampled_from([0, 1, 2, 3, 4, 5, 11, 23, 24, 30]))
    bag = draw(
        st.sampled_from([BAG, st.lists(st.integers(0, 9), min_size=length, max_size=length)])
    )
    pieces = draw(st.lists(st.lists(bag, max_size=5), min_size=1, max_size=4))
    arrays = [KINDS[draw(st.sampled_from(sorted(KINDS)))](piece) for piece in pieces]
    bags = [bag or [] for piece in pieces for bag in piece]
    order = draw(st.permutations(range(len(bags))) | st.none())
    return bags, arrays, order if order is None else order[draw(st.integers(0, len(order))) :]


@given(windows())
def test_rows_come_in_order_with_their_ids(window):
    bags, arrays, order = window
    both = shuffle_bags(
        {"x": arrays, "again": arrays},
        None if order is None else np.array(order, np.uint64),
        Buffers(),
    )
    made = both["x"]
    assert np.array_equal(made.values, both["again"].values)
    expected = [bags[row] for row in (range(len(bags)) if order is None else order)]
    rows = len(expected)
    assert made.ids(0, rows).tolist() == [i for bag in expected for i in bag]
    assert np.broadcast_to(made.lengths(0, rows), rows).tolist() == [len(bag) for bag in expected]
    half = rows // 2
    assert made.ids(half, rows).tolist() == [i for bag in expected[half:] for i in bag]
    assert made.count(half, rows) == sum(map(len, expected[half:]))


@pytest.mark.parametrize(
    ("array", "facts"),
    [
        (pa.array([b"1234", b"12345"], pa.binary()), ("5 bytes",)),
        (pa.array([[1], [None]], pa.list_(pa.int32())), ("1 empty",)),
        (pa.array([[1], [2**31]], pa.list_(pa.int64())), ("2147483648", "int32", "hash")),
        (pa.array([[1], [-1]], pa.list_(pa.int64())), ("-1", "int32", "hash")),
        (pa.array([[1], [0.5]], pa.list_(pa.float64())), ("0.5", "int32", "hash")),
        (pa.array(["x", "y"]), ("string",)),
    ],
)
def test_what_is_no_bag_is_refused(array, facts):
    with raises(BagError, *facts) as refused:
        shuffle_bags({"x": [pa.array([[1], [2]]), array]}, np.arange(4, dtype=np.uint64), Buffers())
    assert (refused.value.column, refused.value.piece) == ("x", 1)
