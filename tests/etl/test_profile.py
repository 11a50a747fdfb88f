"""Profiles of parts add up to the same profile in any order of the parts."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest

from sluice.etl.schema import Field
from sluice.etl.table.profile import Profile

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
