"""How a batch's ids become rows of a model's tables."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sluice.dlrm.follow.transplant import columns_of_tables
from sluice.dlrm.model import ranker
from sluice.dlrm.model.item_history import with_item_table
from tests.dlrm.rig import SMALL, FakeBatch
from tests.product import ConfigError, ModelConfig, Ranker, Spec, Table, TableLayout, spread_rows
from tests.raises import MISTAKES, raises

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
        spread=("b",),
    )
    layout = TableLayout(config, ITEMS)
    assert [(t.name, t.lookups, t.longest) for t in layout.tables] == [("a", 1, 1), ("b", 3, 5)]
    past = [f"h@{n}" for n in range(4)]
    assert layout.keys == {"a": ["a"], "b": ["b", *past]}
    _, sparse = layout.features(batch())
    row = spread_rows(torch.arange(60), 60).tolist()
    assert sorted(row) == [*range(60)]
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


def test_a_wide_part_takes_the_ids_themselves():
    lookups = looked_up(ModelConfig(kind="deepfm", width=8, spread=("a",)))
    assert lookups["a"][0] == spread_rows(torch.tensor([11, 12, 13]), 50).tolist()
    assert lookups["a@wide"] == ([11, 12, 13], [1, 1, 1])
    assert lookups["h@wide"] == lookups["h"] == ([21, 22, 23, 24], [0, 3, 1])


@pytest.mark.parametrize(
    ("settings", "facts"),
    MISTAKES["ranker"],
)
def test_a_model_that_cannot_be_made_for_these_columns_is_refused(settings, facts):
    with raises(ConfigError, *facts):
        TableLayout(ModelConfig(width=8, **{"kind": "dien", **settings}), COLUMNS)


def test_a_column_with_a_dot_in_its_name_gets_a_name_without():
    columns = [replace(COLUMNS[0], name="device.os"), *COLUMNS[1:]]
    with raises(ConfigError, "'device.os'", "'device_os'"):
        TableLayout(ModelConfig(width=8), columns)


def test_looked_up_vectors_are_pulled_towards_0_once():
    torch.manual_seed(1)
    vectors = {t.name: torch.randn(3, 8, requires_grad=True) for t in COLUMNS}
    config = ModelConfig(**SMALL)
    dense, results = torch.randn(3, 2), []
    for decay in (0.5, 0.0):
        torch.manual_seed(2)
        model = Ranker(config, TableLayout(config, COLUMNS), dense=2, decay=decay)
        model.tables = Looked(vectors)
        logits = model(dense, None)
        results.append((logits, torch.autograd.grad(logits.sum(), list(vectors.values()))))
    assert torch.equal(results[0][0], results[1][0])
    for pulled, plain, looked in zip(results[0][1], results[1][1], vectors.values(), strict=True):
        torch.testing.assert_close(pulled - plain, 0.5 / 3 * looked)


class Looked(torch.nn.Module):
    """Tables that have been looked up."""

    def __init__(self, pooled: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.pooled = pooled

    def forward(self, _sparse: None) -> dict[str, torch.Tensor]:
        return self.pooled


def test_a_part_of_a_table_has_the_first_weights_of_the_whole(monkeypatch):
    """Which come in blocks of rows."""
    name = "tower.embedding_bags.a.weight"
    whole, parted = (
        SimpleNamespace(state_dict=lambda w=w: {name: w}) for w in torch.zeros(2, 10, 3)
    )
    monkeypatch.setattr(ranker, "_BLOCK_ROWS", 4)
    ranker.first_weights(whole, 5)
    weight = parted.state_dict()[name]
    places = [(0, 0, 3, 3), (3, 0, 3, 2), (3, 2, 3, 1), (6, 0, 4, 3)]
    parts = [((y, x), weight[y : y + high, x : x + wide]) for y, x, high, wide in places]
    monkeypatch.setattr(ranker, "local_parts", lambda _: parts)
    ranker.first_weights(parted, 5)
    assert torch.equal(weight, whole.state_dict()[name])
    assert 0 < weight.abs().min() < weight.abs().max() <= 10**-0.5
    assert len(weight.unique()) == 30
