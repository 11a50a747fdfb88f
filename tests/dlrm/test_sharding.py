import json
from types import SimpleNamespace

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from sluice.dlrm.sharding.apply import asked, describe, torchrecs_plan
from tests.product import Config, ConfigError, Table, TrainingMachine, place, placed
from tests.raises import MISTAKES, raises

TABLES = [
    Table(name=f"C{i}", rows=n, width=16) for i, n in enumerate([300, 500, 20_000, 6000, 100], 1)
]


def config(**settings) -> Config:
    return Config(data="t", version=0, **settings)


def machine(ranks: int) -> TrainingMachine:
    return TrainingMachine(ranks=ranks, memory_bytes=10**9)


def test_a_file_decides_for_the_tables_it_names(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"C3": "table", "C5": "row", "C1": "column"}))
    kinds = {p.name: p.kind for p in placed(config(sharding=str(file)), TABLES, machine(2)).places}
    assert (kinds["C3"], kinds["C5"], kinds["C1"]) == ("table", "row", "column")
    assert {p.kind for p in placed(config(sharding=str(file)), TABLES, machine(1)).places} == {
        "table"
    }


@pytest.mark.parametrize(
    ("text", "facts"),
    MISTAKES["sharding"],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path, text, facts):
    file = tmp_path / "plan.json"
    file.write_text(text)
    with raises(ConfigError, "plan.json", *facts):
        asked(str(file), TABLES, 2)


def test_a_kind_that_there_is_not_is_refused_by_name():
    with raises(ConfigError, "'rowwise'", "auto"):
        asked("rowwise", TABLES, 2)


def test_kinds_and_kernels_for_gpus_reach_torchrec(tmp_path):
    """On a described machine of two hosts: no GPU is needed to plan for one."""
    names = {
        "copied": "data",
        "spilled": "row:uvm",
        "cached": "table:uvm_caching",
        "columns": "column",
        "plain": "row",
    }
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(names))
    tables = [Table(name=n, rows=1000, width=16) for n in names]
    described = TrainingMachine(ranks=4, memory_bytes=10**9, host_memory_bytes=10**9)
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
    planned = {n: (plan[n].sharding_type, plan[n].compute_kernel) for n in names}
    assert planned == {
        "copied": ("data_parallel", "dense"),
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
