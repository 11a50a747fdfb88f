"""A spread table: each id has a row of its own, and neighbours are far apart."""

import math

import pytest
import torch

from tests.product import spread_rows


@pytest.mark.parametrize("rows", [1, 2, 6, 1000, 1009, 30_030])
def test_spreading_gives_each_id_a_row_and_each_block_its_part_of_any_first_ids(rows):
    ids = torch.arange(rows, dtype=torch.int32)
    places = spread_rows(ids, rows)
    assert torch.equal(places.sort().values, ids)
    for head in (rows // 10, rows // 2):
        in_blocks = torch.div(places[:head], -(-rows // 4), rounding_mode="floor").bincount(
            minlength=4
        )
        if head >= 100:
            assert int(in_blocks.max()) <= 1.1 * head / 4


def test_ids_beyond_31_bits_keep_their_rows_exact():
    ids, rows = [0, 1, 2**31 - 1, 2**31, 3_650_000_000 - 1], 3_650_000_000
    places = spread_rows(torch.tensor(ids), rows).tolist()
    stride = places[1]
    assert math.gcd(stride, rows) == 1
    assert places == [i * stride % rows for i in ids]
