"""Compressed tables: each id has its row, and the result is that of one plain matrix of all ids."""

from __future__ import annotations

import math

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

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


@pytest.mark.parametrize("samples", [1, 5])
def test_lookups_and_gradients_are_those_of_the_plain_matrix(samples):
    columns = [table(rows=40, name=name) for name in CHOICES]
    compressor = Compressor(columns, CHOICES)
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=t.name, feature_names=[t.name], num_embeddings=t.rows, embedding_dim=t.width
            )
            for t in compressor.tables
        ]
    )
    g = torch.Generator().manual_seed(1)
    # Bags of 0, 1, 2 … ids.
    counts = [[(s + c) % 4 for s in range(samples)] for c in range(len(columns))]
    lengths = torch.tensor(counts, dtype=torch.int32).flatten()
    values = torch.randint(40, (int(lengths.sum()),), generator=g, dtype=torch.int32)
    keys = [t.name for t in compressor.tables]
    pooled = collection(
        KeyedJaggedTensor(keys=keys, values=compressor.rows(values, lengths), lengths=lengths)
    )
    fast = torch.stack([pooled[key] for key in keys], 1)
    slow, at = torch.zeros_like(fast), 0
    for c, (column, how) in enumerate(zip(columns, CHOICES.values(), strict=True)):
        weight = collection.embedding_bags[keys[c]].weight
        plain = torch.stack(
            [weight[int(rows_of(torch.tensor(i), column, how))] for i in range(column.rows)]
        )
        for s in range(samples):
            slow[s, c] = plain[values[at : at + counts[c][s]].long()].sum(0)
            at += counts[c][s]
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-6)
    direction = torch.randn(fast.shape, generator=g)
    parameters = list(collection.parameters())
    ours = torch.autograd.grad((fast * direction).sum(), parameters, retain_graph=True)
    theirs = torch.autograd.grad((slow * direction).sum(), parameters)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_nothing_chosen_changes_nothing():
    compressor = Compressor([table(name="C1"), table(name="C2")], {})
    values, lengths = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 1, 1, 1])
    assert [t.name for t in compressor.tables] == ["C1", "C2"]
    assert torch.equal(compressor.rows(values, lengths), values)


def test_first_weights_make_vectors_as_small_as_the_full_tables():
    compressor = Compressor([table(rows=10_000)], {"C1": Compression(kind="modulo", rows=100)})
    assert compressor.starts == {"C1": 0.01}


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("full", Compression()),
        ("spread", Compression(kind="spread")),
        ("modulo:100", Compression(kind="modulo", rows=100)),
    ],
)
def test_a_choice_is_read(text, how):
    assert Compression.read(text) == how


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("modulo", ["full, spread or modulo:ROWS"]),
        ("full:3", ["modulo:ROWS"]),
        ("spread:3", ["modulo:ROWS"]),
        ("modulo:many", ["modulo:ROWS"]),
        ("modulo:10:add", ["modulo:ROWS"]),
        ("modulo:", ["modulo:ROWS"]),
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
