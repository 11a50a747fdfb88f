"""Compressed tables: each id has its row, and the result is that of one plain matrix of all ids."""

from __future__ import annotations

import math

import pytest
import torch

from sluice.dlrm.model.table_compression import Compression, Compressor, compressed, rows_of
from sluice.dlrm.options import ConfigError, Table
from tests.raises import raises


def table(rows=1000, width=16, name="C1", lookups=1.0):
    return Table(name=name, rows=rows, width=width, lookups=lookups)


@pytest.mark.parametrize("rows", [1, 2, 6, 1000, 1009, 30_030])
def test_spreading_gives_each_id_a_row_and_each_block_its_part_of_any_first_ids(rows):
    ids = torch.arange(rows, dtype=torch.int32)
    found = rows_of(ids, table(rows), Compression(kind="spread"))
    assert torch.equal(found.sort().values, ids)
    for head in (rows // 10, rows // 2):
        in_blocks = torch.div(found[:head], -(-rows // 4), rounding_mode="floor").bincount(
            minlength=4
        )
        if head >= 100:
            assert int(in_blocks.max()) <= 1.1 * head / 4


def test_ids_beyond_31_bits_keep_their_rows_exact():
    ids, rows = [0, 1, 2**31 - 1, 2**31, 3_650_000_000 - 1], 3_650_000_000
    found = {
        text: rows_of(torch.tensor(ids), table(rows), Compression.read(text)).tolist()
        for text in ("spread", "modulo:1009")
    }
    assert found["modulo:1009"] == [i % 1009 for i in ids]
    stride = found["spread"][1]
    assert math.gcd(stride, rows) == 1
    assert found["spread"] == [i * stride % rows for i in ids]


CHOICES = {
    "full": Compression(),
    "spread": Compression(kind="spread"),
    "modulo": Compression(kind="modulo", rows=7),
}


def test_the_ids_of_bags_become_rows_by_their_columns_choices():
    columns = [table(rows=40, name=name) for name in CHOICES]
    lengths = torch.tensor([0, 2, 1, 0, 3, 1], dtype=torch.int32)  # of two samples in each column
    values = torch.arange(33, 40, dtype=torch.int32)
    expected = map(rows_of, values.split([2, 1, 4]), columns, CHOICES.values())
    assert torch.equal(Compressor(columns, CHOICES).rows(values, lengths), torch.cat([*expected]))


def test_first_weights_make_vectors_as_small_as_the_full_tables():
    compressor = Compressor([table(rows=10_000)], {"C1": Compression(kind="modulo", rows=100)})
    assert compressor.starts == {"C1": 0.01}


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("modulo", ["full, spread or modulo:ROWS"]),
        ("spread:3", ["modulo:ROWS"]),
        ("modulo:many", ["modulo:ROWS"]),
        ("modula:50", ["'modulo'"]),
        ("hash:50", ["'hash'"]),
        ("modulo:1", ["rows is 1"]),
    ],
)
def test_a_wrong_choice_says_what_to_write(text, facts):
    with raises(ConfigError, *facts):
        Compression.read(text)


def test_a_table_that_cannot_be_compressed_so_is_refused():
    with raises(ConfigError, "2000 rows", "1000"):
        compressed(table(), Compression(kind="modulo", rows=2000))
    with raises(ConfigError, "column 'C9'"):
        Compressor([table()], {"C9": Compression()})
