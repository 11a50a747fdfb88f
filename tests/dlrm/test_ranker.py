"""How a batch's ids become rows of a model's tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

from sluice.dlrm.follow.transplant import columns_of_tables
from sluice.dlrm.model.item_history import draw_other_items, with_item_table
from sluice.dlrm.model.missing import MissingNumbers
from sluice.dlrm.model.ranker import Ranker, TableLayout
from sluice.dlrm.model.table_compression import Compression, codes
from sluice.dlrm.options import ConfigError, ModelConfig, Table
from sluice.etl.spec.spec import Spec
from tests.dlrm.rig import FakeBatch
from tests.raises import raises

CPU = torch.device("cpu")
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


def test_a_history_is_looked_up_place_by_place():
    found = looked_up(ModelConfig(kind="dien", width=8, history="h", target="b", auxiliary=0.0))
    assert found == {
        "a": ([11, 12, 13], [1, 1, 1]),
        "b": ([1, 2, 3], [1, 1, 1]),
        "h@0": ([21, 24], [0, 1, 1]),
        "h@1": ([22], [0, 1, 0]),
        "h@2": ([23], [0, 1, 0]),
        "h@3": ([], [0, 0, 0]),
    }


ITEMS = [replace(t, rows=60) if t.name == "b" else t for t in COLUMNS]


def test_a_history_shares_the_targets_table_with_negative_items():
    config = ModelConfig(
        kind="dien",
        width=8,
        history="h",
        target="b",
        history_table="target",
        compress={"b": "spread"},
    )
    layout = TableLayout(config, ITEMS)
    assert [(t.name, t.lookups, t.longest) for t in layout.tables] == [("a", 1, 1), ("b", 5, 9)]
    past, others = ([f"h@{n}" for n in range(4)], [f"h@not{n}" for n in range(1, 4)])
    assert layout.keys == {"a": ["a"], "b": ["b", *past, *others]}
    _, sparse = layout.features(batch())
    row = {
        i: int(codes(torch.tensor(i), ITEMS[2], Compression(kind="spread"))[0]) for i in range(60)
    }
    assert len(set(row.values())) == 60
    assert sparse["b"].values().tolist() == [row[1], row[2], row[3]]
    assert [sparse[key].values().tolist() for key in past] == [
        [row[21], row[24]],
        [row[22]],
        [row[23]],
        [],
    ]
    assert [sparse[key].lengths().tolist() for key in others] == [[0, 1, 0], [0, 1, 0], [0, 0, 0]]
    with torch.no_grad():
        _, judged = layout.features(batch())
    assert [judged[key].lengths().tolist() for key in others] == [[0, 0, 0]] * 3
    assert judged["h@1"].values().tolist() == [row[22]]


def test_items_that_did_not_come_are_others_spread_evenly_and_depend_on_the_row_alone():
    g = torch.Generator().manual_seed(0)
    places = torch.randint(0, 5, (6, 20_000), generator=g)
    drawn = draw_other_items(places, 5)
    assert drawn.shape == (5, 20_000)
    assert not (drawn == places[1:]).any()
    torch.testing.assert_close(draw_other_items(places[:, 70:75], 5), drawn[:, 70:75])
    wide = draw_other_items(places, 10_000)
    assert int(wide.min()) >= 0
    assert (
        torch.histc(wide.float(), 10, 0, 10_000).sub(10_000).abs().max() < 500
    )  # ± 5 standard deviations
    assert torch.corrcoef(wide.float()).fill_diagonal_(0).abs().max() < 0.04
    assert draw_other_items(places[:1], 5).shape == (0, 20_000)


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


@pytest.mark.parametrize(("compress", "rows"), [({}, 9), ({"b": "quotient:10"}, 60)])
def test_a_table_that_cannot_hold_a_history_is_refused(compress, rows):
    columns = [replace(t, rows=rows) if t.name == "b" else t for t in COLUMNS]
    config = ModelConfig(
        kind="dien", width=8, history="h", target="b", history_table="target", compress=compress
    )
    with raises(ConfigError, "'h'", "60 ids", "'b'", f"{rows} ids"):
        TableLayout(config, columns)


def test_a_wide_part_takes_uncompressed_ids():
    found = looked_up(ModelConfig(kind="deepfm", width=8, compress={"a": "modulo:10"}))
    assert found["a"][0] == [1, 2, 3]
    assert found["a@wide"] == ([11, 12, 13], [1, 1, 1])
    assert found["h@wide"] == found["h"] == ([21, 22, 23, 24], [0, 3, 1])


def test_missing_dense_values_are_masked_and_counted_if_asked():
    layout = TableLayout(ModelConfig(width=8), COLUMNS, MissingNumbers(["d0", "d1"]))
    dense, _ = layout.features(batch())
    assert dense[0].tolist() == [1.0, 0.0]
    assert layout.missing.counts == {"d1": 1}


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"history": "hh", "target": "b"}, ["history", "'hh'", "'h'"]),
        ({"history": "h", "target": "h"}, ["target", "'h'"]),
        ({}, ["--model dien", "--history COLUMN", "--target COLUMN"]),
        ({"history": "h"}, ["--model dien", "--history COLUMN", "--target COLUMN"]),
        ({"kind": "dcn", "history": "h"}, ["--history", "--target", "--model dien", "dcn"]),
    ],
)
def test_a_history_that_cannot_be_is_refused(settings, facts):
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
        ModelConfig(width=8, bags={"h": text}, compress={"a": "quotient:10:add"}), COLUMNS
    )
    _, sparse = layout.features(batch())
    assert sparse["h"].weights().tolist() == pytest.approx(expected)
    assert sparse["a@q"].weights().tolist() == sparse["a@r"].weights().tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("bags", "facts"),
    [
        ({"x": "mean"}, ["column 'x'"]),
        ({"h": "means"}, ["'means'", "'mean'"]),
        ({"h": "mean:2"}, ["write sum"]),
        ({"h": "decay"}, ["write sum"]),
        ({"h": "decay:2"}, ["2.0", "above 0"]),
        ({"h": "decay:x"}, ["'x'", "number"]),
    ],
)
def test_a_weighing_that_cannot_be_is_refused(bags, facts):
    with raises(ConfigError, "bags", *facts):
        TableLayout(ModelConfig(width=8, bags=bags), COLUMNS)


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


@pytest.mark.parametrize(
    ("how", "facts"),
    [
        ({"width": 8, "table_width": 3}, ["3", "width of 8"]),
        ({"width": 8, "table_width": 16}, ["16", "width of 8"]),
        (
            {"width": 8, "table_width": 4, "kind": "dien", "history": "h", "target": "b"},
            ["dien"],
        ),
    ],
)
def test_a_table_width_that_does_not_fit_is_refused(how, facts):
    with raises(ConfigError, *facts):
        ModelConfig(**how)


def test_the_gradient_of_all_pooled_vectors_is_made_once_and_not_for_each_table():
    columns = [Table(name=name, rows=50, width=8) for name in "abc"]
    config = ModelConfig(width=8, dense_layers=(8,), over_layers=(8,))
    layout = TableLayout(config, columns)
    model = Ranker(config, layout, dense=2)
    model.tables.to_empty(device="cpu")
    ids = KeyedJaggedTensor(list("abc"), torch.arange(9), lengths=torch.ones(9, dtype=torch.int32))
    steps = operations(model(torch.ones(3, 2), ids).grad_fn)
    assert steps["SplitWithSizesBackward0"] == 1
    assert steps["SliceBackward0"] == 0


def operations(node: Any) -> Counter[str]:
    """How often each operation is in the graph of a backward pass."""
    seen, waiting = {node}, [node]
    while waiting:
        new = {n for n, _ in waiting.pop().next_functions if n is not None} - seen
        seen |= new
        waiting += new
    return Counter(n.name() for n in seen)
