"""How a batch's ids become rows of a model's tables."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sluice.dlrm.follow.transplant import columns_of_tables
from sluice.dlrm.model.item_history import with_item_table
from sluice.dlrm.model.ranker import Ranker, TableLayout
from sluice.dlrm.model.table_compression import Compression, rows_of
from sluice.dlrm.options import ConfigError, ModelConfig, Table
from sluice.etl.spec.spec import Spec
from tests.dlrm.rig import FakeBatch
from tests.raises import raises

COLUMNS = [
    Table(name="a", rows=50, width=8),
    Table(name="h", rows=60, width=8, lookups=2, longest=4),
    Table(name="b", rows=9, width=8),
]
LENGTHS = torch.tensor([[1, 1, 1], [0, 3, 1], [1, 1, 1]], dtype=torch.int32)
VALUES = torch.tensor([11, 12, 13, 21, 22, 23, 24, 1, 2, 3], dtype=torch.int32)


def batch() -> FakeBatch:
    dense = torch.tensor([[1.0, float("nan")], [2.0, 3.0], [4.0, 5.0]])
    return FakeBatch(
        dense=dense,
        values=VALUES,
        lengths=LENGTHS.flatten(),
        label=torch.zeros(3),
        weight=torch.ones(3),
        rows=3,
    )


def looked_up(config: ModelConfig) -> dict[str, tuple[list[int], list[int]]]:
    _, sparse = TableLayout(config, COLUMNS).features(batch())
    return {
        key: (sparse[key].values().tolist(), sparse[key].lengths().tolist())
        for key in list(sparse.keys())
    }


def test_a_column_may_have_the_name_of_anything_that_torch_knows():
    """Its table has another one, which leads back to the column."""
    names = [
        "C1",
        *(name for name in dir(nn.ModuleDict()) if not name.startswith("__")),
        "keys",
        "training",
    ]
    columns = [Table(name=name, rows=9, width=4) for name in dict.fromkeys(names)]
    layout = TableLayout(ModelConfig(width=4), columns)
    model = Ranker(ModelConfig(width=4), layout, 1)
    assert {"type@ids", "items@ids", "C1"} <= model.tables.embedding_bags.keys()
    assert list(columns_of_tables(layout).values()) == [column.name for column in columns]


def test_full_tables_take_a_batchs_own_memory():
    dense, sparse = TableLayout(ModelConfig(width=8), COLUMNS).features(given := batch())
    assert sparse.values().data_ptr() == given.values.data_ptr()
    assert dense is given.dense


ITEMS = [replace(t, rows=60) if t.name == "b" else t for t in COLUMNS]


def test_a_history_shares_the_targets_table():
    config = ModelConfig(
        kind="dien",
        width=8,
        history="h",
        target="b",
        history_table="target",
        compress={"b": "spread"},
    )
    layout = TableLayout(config, ITEMS)
    assert [(t.name, t.lookups, t.longest) for t in layout.tables] == [("a", 1, 1), ("b", 3, 5)]
    past = [f"h@{n}" for n in range(4)]
    assert layout.keys == {"a": ["a"], "b": ["b", *past]}
    _, sparse = layout.features(batch())
    row = {
        i: int(rows_of(torch.tensor(i), ITEMS[2], Compression(kind="spread"))) for i in range(60)
    }
    assert len(set(row.values())) == 60
    assert sparse["b"].values().tolist() == [row[1], row[2], row[3]]
    assert [sparse[key].values().tolist() for key in past] == [
        [row[21], row[24]],
        [row[22]],
        [row[23]],
        [],
    ]


@pytest.mark.parametrize(
    ("history", "target", "asked", "chosen"),
    [
        ("clicked", "item", "auto", "target"),
        ("clicked", "item", "target", "target"),
        ("clicked", "item", "own", "own"),
        ("tags", "item", "auto", "own"),
        ("genre_pairs", "user", "auto", "own"),
        ("", "", "auto", "auto"),
    ],
)
def test_a_history_shares_the_targets_table_where_the_spec_gives_the_same_ids(
    repo, history, target, asked, chosen
):
    table = SimpleNamespace(
        record=SimpleNamespace(spec="its text"),
        fields=(),
        spec=lambda: Spec.read(repo / "features/sessions.toml"),
    )
    model = ModelConfig(history=history, target=target, history_table=asked)
    assert with_item_table(model, table).history_table == chosen
    if chosen == "own" and asked == "auto":
        with raises(ConfigError, f"'{history}'", f"'{target}'"):
            with_item_table(replace(model, history_table="target"), table)


def test_a_wide_part_takes_uncompressed_ids():
    found = looked_up(ModelConfig(kind="deepfm", width=8, compress={"a": "modulo:10"}))
    assert found["a"][0] == [1, 2, 3]
    assert found["a@wide"] == ([11, 12, 13], [1, 1, 1])
    assert found["h@wide"] == found["h"] == ([21, 22, 23, 24], [0, 3, 1])


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"history": "hh", "target": "b"}, ["history", "'hh'", "'h'"]),
        ({"history": "h", "target": "h"}, ["target", "'h'"]),
        ({"history": "h", "target": "b", "history_table": "target"}, ["'h'", "60", "'b'", "9 ids"]),
        ({}, ["--model dien", "--history COLUMN", "--target COLUMN"]),
        ({"kind": "dcn", "history": "h"}, ["--history", "--target", "--model dien", "dcn"]),
        ({"kind": "dcn", "bags": {"x": "mean"}}, ["bags", "column 'x'"]),
        ({"kind": "dcn", "bags": {"h": "means"}}, ["bags", "'means'", "'mean'"]),
        ({"kind": "dcn", "bags": {"h": "mean:2"}}, ["bags", "write sum"]),
        ({"kind": "dcn", "bags": {"h": "decay:2"}}, ["bags", "2.0", "above 0"]),
        ({"table_width": 3}, ["3", "width of 8"]),
        ({"table_width": 4, "history": "h", "target": "b"}, ["dien"]),
    ],
)
def test_a_model_that_cannot_be_made_for_these_columns_is_refused(settings, facts):
    with raises(ConfigError, *facts):
        TableLayout(ModelConfig(width=8, **{"kind": "dien", **settings}), COLUMNS)


def test_a_column_with_a_dot_in_its_name_gets_a_name_without():
    columns = [replace(COLUMNS[0], name="device.os"), *COLUMNS[1:]]
    with raises(ConfigError, "'device.os'", "'device_os'"):
        TableLayout(ModelConfig(width=8), columns)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sum", [1, 1, 1, 1]),
        ("mean", [1 / 3, 1 / 3, 1 / 3, 1]),
        ("sqrt", [3**-0.5, 3**-0.5, 3**-0.5, 1]),
        ("decay:0.5", [0.25, 0.5, 1, 1]),
    ],
)
def test_a_bags_ids_are_weighed_as_asked_and_all_others_count_whole(text, expected):
    layout = TableLayout(
        ModelConfig(width=8, bags={"h": text}, compress={"a": "modulo:10"}), COLUMNS
    )
    _, sparse = layout.features(batch())
    assert sparse["h"].weights().tolist() == pytest.approx(expected)
    assert sparse["a"].weights().tolist() == [1, 1, 1]


def test_narrow_vectors_repeated_are_a_wide_tables_and_are_pulled_towards_0_once():
    """The same dense layers, over narrow tables and over wide ones that hold each vector twice."""
    torch.manual_seed(1)
    narrow = {t.name: torch.randn(3, 4, requires_grad=True) for t in COLUMNS}
    dense, found = torch.randn(3, 2), []
    for table_width in (4, 0):
        config = ModelConfig(width=8, table_width=table_width, dense_layers=(8,), over_layers=(8,))
        columns = [replace(t, width=table_width or 8) for t in COLUMNS]
        model = Ranker(
            config, TableLayout(config, columns), dense=2, decay=0.5 if table_width else 0.0
        )
        if found:
            model.tower.load_state_dict(found[0][0].tower.state_dict())
        looked_up = {n: v if table_width else torch.cat([v, v], 1) for n, v in narrow.items()}
        model.tables = Looked(looked_up)
        logits = model(dense, None)
        found.append((model, logits, torch.autograd.grad(logits.sum(), list(narrow.values()))))
    torch.testing.assert_close(found[0][1], found[1][1])
    for pulled, plain, vectors in zip(found[0][2], found[1][2], narrow.values(), strict=True):
        torch.testing.assert_close(pulled - plain, 0.5 / 3 * vectors)


class Looked(torch.nn.Module):
    """Tables that have been looked up."""

    def __init__(self, pooled: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.pooled = pooled

    def forward(self, _sparse: None) -> dict[str, torch.Tensor]:
        return self.pooled
