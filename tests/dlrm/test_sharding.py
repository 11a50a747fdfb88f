from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from sluice.dlrm.model.ranker import TableLayout
from sluice.dlrm.model.table_compression import ConfigError
from sluice.dlrm.options import Config, ModelConfig, Table
from sluice.dlrm.run_plan import traffic_of
from sluice.dlrm.sharding.apply import asked, describe, placed, summary, torchrecs_plan
from sluice.dlrm.sharding.machine import TrainingMachine
from sluice.dlrm.sharding.placement import place
from tests.raises import raises

CRITEO = [
    Table(name=f"C{i}", rows=n, width=16)
    for i, n in enumerate(
        [
            300,
            500,
            20_000,
            6000,
            100,
            7,
            9000,
            200,
            3,
            6000,
            4000,
            18_000,
            2500,
            26,
            5000,
            15_000,
            10,
            2000,
            400,
            3,
        ],
        1,
    )
]


def config(**settings) -> Config:
    return Config(data="t", version=0, **settings)


def machine(ranks: int) -> TrainingMachine:
    return TrainingMachine(ranks=ranks, memory_bytes=10**9)


def test_auto_asks_for_nothing():
    assert asked("auto", CRITEO, 4) == {}


@pytest.mark.parametrize("how", ["row", "table", "column"])
def test_what_is_asked_for_is_done(how):
    assert {p.kind for p in placed(config(sharding=how), CRITEO[:4], machine(2)).places} == {how}


def test_a_table_too_small_to_be_cut_stays_whole():
    kinds = {p.name: p.kind for p in placed(config(sharding="row"), CRITEO, machine(4)).places}
    assert (kinds["C9"], kinds["C3"]) == ("table", "row")


def test_a_file_decides_for_the_tables_it_names(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"C3": "table", "C5": "row", "C1": "column"}))
    kinds = {p.name: p.kind for p in placed(config(sharding=str(file)), CRITEO, machine(2)).places}
    assert (kinds["C3"], kinds["C5"], kinds["C1"]) == ("table", "row", "column")
    assert {p.kind for p in placed(config(sharding=str(file)), CRITEO, machine(1)).places} == {
        "table"
    }


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ('{"C33": "row"}', ["'C33'", "'C3'"]),
        ('{"C3": "rows"}', ["'C3'", "'rows'", "'row'"]),
        ("[1]", ["object"]),
        ("{", ["JSON"]),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path, text, facts):
    file = tmp_path / "plan.json"
    file.write_text(text)
    with raises(ConfigError, "plan.json", *facts):
        asked(str(file), CRITEO, 2)


def test_a_kind_that_there_is_not_is_refused_by_name():
    with raises(ConfigError, "'rowwise'", "auto"):
        asked("rowwise", CRITEO, 2)


def test_the_printed_plan_and_the_stored_one_name_every_table():
    placement = placed(config(), CRITEO, machine(2))
    text = describe(placement, CRITEO, machine(2))
    assert all(f"\n{t.name} " in text for t in CRITEO)
    kept = summary(placement, CRITEO)
    assert [(p["name"], p["rows"]) for p in kept] == [(t.name, t.rows) for t in CRITEO]
    assert sum(p["bytes"] for p in kept) == sum(placement.bytes_on(r) for r in range(2))


def test_kinds_and_kernels_for_gpus_reach_torchrec(tmp_path):
    """On a described machine of two hosts: no GPU is needed to plan for one."""
    names = {
        "copied": "data",
        "host": "table_row",
        "spilled": "row:uvm",
        "cached": "table:uvm_caching",
        "columns": "column",
        "plain": "row",
    }
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(names))
    tables = [Table(name=n, rows=1000, width=16) for n in names]
    described = TrainingMachine(
        ranks=4, ranks_per_host=2, memory_bytes=10**9, host_memory_bytes=10**9
    )
    placement = place(tables, described, asked=asked(str(file), tables, 4))
    collection = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=t.name, feature_names=[t.name], num_embeddings=t.rows, embedding_dim=t.width
            )
            for t in tables
        ],
    )
    world = SimpleNamespace(ranks=4, local_ranks=2, device=torch.device("cuda"))
    plan = torchrecs_plan(collection, placement, world)
    found = {n: (plan[n].sharding_type, plan[n].compute_kernel) for n in names}
    assert found == {
        "copied": ("data_parallel", "dense"),
        "host": ("table_row_wise", "fused"),
        "spilled": ("row_wise", "fused_uvm"),
        "cached": ("table_wise", "fused_uvm_caching"),
        "columns": ("column_wise", "fused"),
        "plain": ("row_wise", "fused"),
    }
    for p in placement.places:
        assert tuple(plan[p.name].ranks) == p.ranks
        if p.kind != "data":
            assert [s.shard_sizes for s in plan[p.name].sharding_spec.shards] == [
                [q.rows, q.width] for q in p.parts
            ]
    text = describe(placement, tables, described)
    assert "row:uvm " in text
    assert "table:uvm_caching" in text


TWO = [Table(name="a", rows=100, width=8), Table(name="b", rows=100, width=8, lookups=3.0)]


@pytest.mark.parametrize(
    ("how", "vectors", "ids"),
    [
        # Two ranks, 64 rows: a rank has 32 of them, and the other 32 are elsewhere.
        (
            "table",
            32 * 8 + 32 * 16 / 2,
            32 * (4 + 2) / 2,
        ),  # a table each: 8 columns out; half of 16 gradients out
        (
            "row",
            32 * 16 + 32 * 16 * 2 / 2,
            32 * (4 + 4) / 2,
        ),  # a partial sum of every table out; gradients to both parts
        ("column", 32 * 8 + 32 * 16 / 2, 32 * (8 + 4) / 2),
    ],
)  # half of each vector out; all ids to both halves
@pytest.mark.parametrize(("wire", "element"), [("fp32", 4), ("fp16", 2)])
def test_bytes_per_step_are_counted_as_they_are_sent(how, vectors, ids, wire, element):
    settings = config(sharding=how, wire=wire, batch_size=64, ranks=2, model=ModelConfig(width=8))
    layout = TableLayout(settings.model, TWO)
    sent = traffic_of(placed(settings, TWO, machine(2)), layout, 1000, settings).total
    assert sent == vectors * element + ids * 4 + 1000 * 4
    alone = replace(settings, ranks=1)
    assert traffic_of(placed(alone, TWO, machine(1)), layout, 1000, alone).total == 0
