"""Counts against the layers themselves, and against what others have published to the last parameter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sluice.dlrm.model.towers import build, tower_of
from sluice.dlrm.model.towers import cost_of as count
from sluice.dlrm.options import MODELS, ModelConfig

CONFIGS = [dict(kind=k) for k in MODELS] + [
    dict(kind="dcn", cross_rank=8),
    dict(kind="dcn", cross_rank=8, cross_experts=3),
    dict(kind="xdeepfm", cin_layers=(9, 4, 7)),
    dict(kind="autoint", attention_layers=3, attention_heads=3),
]


@pytest.mark.parametrize("settings", CONFIGS, ids=lambda s: "-".join(map(str, s.values())))
def test_parameters_are_the_layers_own(settings):
    config = ModelConfig(width=12, dense_layers=(30, 20), over_layers=(40, 10), **settings)
    tower = build(config, dense=13, columns=7)
    found = count(config, dense=13, columns=7, history=9)
    assert found["total"].parameters == sum(p.numel() for p in tower.parameters())
    assert found["total"].flops == sum(
        part.flops for name, part in found.items() if name != "total"
    )


@pytest.mark.parametrize(
    "settings",
    [s for s in CONFIGS if s["kind"] not in ("dlrm", "deepfm", "dien", "pnn")],
    ids=lambda s: "-".join(map(str, s.values())),
)
def test_flops_are_those_that_torch_counts(settings):
    """Where a model is matrix products alone. (A batched product of all pairs does each twice: see `dots`.)"""
    config = ModelConfig(width=12, dense_layers=(30, 20), over_layers=(40, 10), **settings)
    tower = build(config, dense=13, columns=7)
    shapes = {"dense": (5, 13), "pooled": (5, 7, 12), "wide": (5, 7, 4)}
    with FlopCounterMode(display=False) as counter:
        tower(*(torch.zeros(shapes[n]) for n in tower_of(config.kind).inputs))
    assert counter.get_total_flops() == 5 * count(config, dense=13, columns=7)["total"].flops
