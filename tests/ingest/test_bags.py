"""Bags against what plain Python makes of them."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.ingest.flow.bags import copy_bags, stored_bags
from tests.product import BAGS, COLUMN, PART, Scratch
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
def drawn_bags(draw):
    """A column's bags, and an order of its rows."""
    length = draw(st.sampled_from([0, 1, 2, 3, 4, 5, 11, 23, 24, 30]))
    bag = draw(
        st.sampled_from([BAG, st.lists(st.integers(0, 9), min_size=length, max_size=length)])
    )
    bags = draw(st.lists(bag, min_size=1, max_size=20))
    array = KINDS[draw(st.sampled_from(sorted(KINDS)))](bags)
    return [bag or [] for bag in bags], array, draw(st.permutations(range(len(bags))))


@given(drawn_bags(), st.booleans())
def test_bags_are_copied_with_their_ids_in_any_order(drawn, copies):
    bags, array, order = drawn
    stored, rows = stored_bags(pa.chunked_array([array]), np.int32), len(order)
    assert stored.nbytes >= 4 * sum(map(len, bags))
    lengths, addresses = np.empty(rows, np.int32), np.empty((2, rows), np.uint32)
    places, line = np.argsort(order).astype(np.uint32), np.empty(stored.nbytes // 4 + 1, np.int32)
    described = [
        (
            *(stored.begins.ctypes.data, stored.ends.ctypes.data, stored.begins.itemsize == 8),
            *(stored.unit, stored.ids.ctypes.data, copies * line.ctypes.data, line.nbytes),
            *(0, 0, 4 * rows),
        )
    ]
    moved = Scratch().place(
        np.zeros(0, COLUMN),
        np.array(described, BAGS),
        np.array([(rows, 0, rows, 0, 0, 0, 0, 0, 0, places.ctypes.data)], PART),
        rows=rows,
        each=rows,
        first_step=0,
        targets=np.array([[0, 0, lengths.ctypes.data, addresses.ctypes.data]], np.uint64),
    )
    assert moved.rows.tolist() == [rows]
    assert lengths.tolist() == [len(bags[row]) for row in order]
    into = np.empty(lengths.sum(), np.int32)
    copy_bags(lengths, *addresses, into)
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
        stored_bags(pa.chunked_array([array]), np.int32)
