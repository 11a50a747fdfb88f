"""Profiles of parts add up to the same profile in any order of the parts."""

import random

import numpy as np
import pyarrow as pa
import pytest

from sluice.etl.table.profile import drift
from tests.product import Field, Profile

FIELDS = (
    Field(name="item", role="sparse", type="int32", cardinality=1000),
    Field(name="price", role="dense", type="float"),
)


@pytest.mark.parametrize("seed", range(2))
def test_a_profile_does_not_depend_on_the_order_of_files(seed):
    chance = np.random.default_rng(seed)
    parts = []
    for number in range(12):
        own = np.repeat(np.arange(100 + number * 15, 115 + number * 15), 5 + number % 3)
        items = np.concatenate([own, np.repeat(np.arange(2, 10), 4 + number % 4)])
        prices = (10.0 ** chance.integers(-12, 12, len(items))).astype(np.float32)
        rows = pa.table({"item": items.astype(np.int32), "price": prices})
        parts.append(Profile.of(rows, FIELDS, {"item": 1}))
    whole = Profile.joined(parts)
    shuffle = random.Random(seed).shuffle
    for _ in range(10):
        shuffle(parts)
        assert Profile.joined(parts) == whole


def test_a_profile_counts_rows_bags_and_bins():
    tags = Field(name="tags", role="id_list", type="binary", layout="bytes", bag=(0, 1, 3))
    bags = [[9], [3], [], [4, 5, 5], [8]]
    rows = pa.table(
        {
            "item": pa.array([7, 2, 3, 1, 7], pa.int32()),
            "price": pa.array([7, -1, 0, 2.5, 7], pa.float32()),
            "tags": [np.array(ids, "<u4").tobytes() for ids in bags],
        }
    )
    profile = Profile.of(rows.slice(1, 3), (*FIELDS, tags), {"item": 1, "tags": 1})
    assert profile.columns == {
        "item": {"rows": 3, "nulls": 1, "unseen": 1}
        | {"bins": {"octave 0": 1, "null": 1, "unseen": 1}},
        "price": {"rows": 3, "least": -1, "largest": 2.5, "sum": 1.5}
        | {"bins": {"-4": 1, "0": 1, "7": 1}},
        "tags": {"rows": 4, "nulls": 0, "unseen": 0, "bag": [0, 3, 3]}
        | {"bins": {"octave 0": 1, "octave 1": 3}},
    }
    twice = Profile.joined([profile, Profile.of(rows.slice(0, 1), (*FIELDS, tags), {})])
    assert (twice.columns["price"]["least"], twice.columns["price"]["largest"]) == (-1, 7)
    assert twice.bags == {"tags": (0, 5 / 4, 3)}


@pytest.mark.parametrize(
    ("before", "after", "nulls"),
    [({}, {"price": 0.5}, 0), ({"price": 0.5}, {}, 0), ({"price": 0.5}, {"price": 0.125}, -0.375)],
)
def test_values_that_are_lost_count_as_nulls_if_both_versions_tell_their_share(
    before, after, nulls
):
    rows = pa.table({"item": pa.array([2, 3], pa.int32()), "price": pa.array([1.0, 2.0], "float")})
    profile = Profile.of(rows, FIELDS, {"item": 1})
    drifts = drift(profile, profile, (before, after))
    assert drifts["item"] == {"psi": 0, "unseen": 0.5, "nulls": 0}
    assert drifts["price"] == {"psi": 0, "unseen": 0, "nulls": nulls}
