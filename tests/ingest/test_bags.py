"""Bags against what plain Python makes of them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.ingest.memory.buffers import Buffers
from sluice.ingest.stages.bags import (
    bag_rows,
    copy_bags,
    find_pieces,
    stored_bags,
    with_copied_ids,
)
from tests.raises import raises

BAG = st.lists(st.integers(0, 2**31 - 1), max_size=4) | st.none()


def _packed(bag):
    return None if bag is None else np.array(bag, "<i4").tobytes()


KINDS = {
    "bytes": lambda bags: pa.array([_packed(b) for b in bags], pa.binary()),
    "large bytes": lambda bags: pa.array([_packed(b) for b in bags], pa.large_binary()),
    "int32 lists": lambda bags: pa.array(bags, pa.list_(pa.int32())),
    "int64 lists": lambda bags: pa.array(bags, pa.large_list(pa.int64())),
    "views": lambda bags: pa.array([bag or [] for bag in bags], pa.list_view(pa.int32())),
    "a slice": lambda bags: pa.array([b"1234", *[_packed(b) for b in bags], b"5678"], pa.binary())[
        1:-1
    ],
}


@st.composite
def windows(draw):
    """A column's bags in pieces, and an order of some rows."""
    length = draw(st.sampled_from([0, 1, 2, 3, 4, 5, 11, 23, 24, 30]))
    bag = draw(
        st.sampled_from([BAG, st.lists(st.integers(0, 9), min_size=length, max_size=length)])
    )
    pieces = draw(st.lists(st.lists(bag, max_size=5), min_size=1, max_size=4))
    arrays = [KINDS[draw(st.sampled_from(sorted(KINDS)))](piece) for piece in pieces]
    bags = [bag or [] for piece in pieces for bag in piece]
    order = draw(st.permutations(range(len(bags))))
    return bags, arrays, order[draw(st.integers(0, len(order))) :]


@given(windows())
def test_rows_are_copied_with_their_ids_in_any_order(window):
    bags, arrays, order = window
    parts = [stored_bags(pa.chunked_array([array]), np.int32, len(array)) for array in arrays]
    ends = np.cumsum([len(array) for array in arrays])
    pieces, rows = np.empty((2, len(order)), np.uint32)
    find_pieces(np.array(order, np.uint64), ends, pieces, rows)
    made = bag_rows(parts, pieces, rows, Buffers())
    assert made.nbytes >= 4 * sum(map(len, bags))
    assert made.lengths.tolist() == [len(bags[row]) for row in order]
    for there in (made, with_copied_ids(made, Buffers())):
        into = np.empty(there.lengths.sum(), np.int32)
        copy_bags(there.lengths, there.low, there.high, into)
        assert into.tolist() == [i for row in order for i in bags[row]]


@pytest.mark.parametrize(
    ("array", "facts"),
    [
        (pa.array([b"1234", b"12345"], pa.binary()), ("5 bytes",)),
        (pa.array([[1], [None]], pa.list_(pa.int32())), ("1 empty",)),
        (pa.array([[1], [2**31]], pa.list_(pa.int64())), ("2147483648", "int32", "hash")),
        (pa.array([[1], [0.5]], pa.list_(pa.float64())), ("0.5", "int32", "hash")),
        (pa.array(["x", "y"]), ("string",)),
    ],
)
def test_what_is_no_bag_is_refused(array, facts):
    with raises(ValueError, *facts):
        part = stored_bags(pa.chunked_array([array]), np.int32, 2)
        bag_rows([part], *np.array([[0, 0], [0, 1]], np.uint32), Buffers())
