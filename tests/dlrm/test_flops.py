"""Counts against the layers themselves, and against what others have published to the last parameter."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sluice.dlrm.model.flops import cross, linear, mlp
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


# Totals that BARS (reczoo/BARS) logged for its runs on Criteo. Theirs hold the tables, batch norms (two numbers a
# unit) that ours leave out, and at x1 an embedding of each numeric column by a vector of its own: added here by hand.
X1_IDS, X4_IDS = 2_086_303, 910_747


def test_bars_logistic_regression_x1():
    assert X1_IDS + linear(13, 1).parameters == 2_086_317


def test_bars_dlrm_x1():
    tower = ModelConfig(kind="dlrm", width=10, dense_layers=(400,) * 3, over_layers=(400,) * 3)
    ours = count(tower, dense=13, columns=26)["total"].parameters
    assert X1_IDS * 10 + ours + 2 * 400 * 6 == 21_664_241


def test_bars_cross_network_x1():
    fields = 39 * 10
    assert (X1_IDS + 13) * 10 + cross(fields, 5).parameters + linear(
        fields, 1
    ).parameters == 21_626_001


def test_bars_wide_deep_and_deepfm_x1():
    """The two have the same number: a factorisation machine has no parameters of its own."""
    deep = mlp([39 * 10, 400, 400, 400, 1]).parameters + 2 * 400 * 3
    assert (X1_IDS + 13) * 10 + X1_IDS + linear(13, 1, bias=False).parameters + deep == 23_429_477
    pair = [
        count(ModelConfig(kind=k), dense=13, columns=26)["total"].parameters
        for k in ("wide_deep", "deepfm")
    ]
    assert pair[0] == pair[1]


def test_bars_dcn_v2_x4():
    fields = 39 * 16
    deep = mlp([fields] + [1000] * 5).parameters + 2 * 1000 * 5
    assert (
        X4_IDS * 16 + cross(fields, 3).parameters + deep + linear(fields + 1000, 1).parameters
        == 20_382_577
    )


def test_bars_ipnn_x1():
    """Its numeric columns have vectors of width 10, too."""
    ours = count(ModelConfig(kind="pnn", width=10, over_layers=(400,) * 3), dense=1, columns=39)[
        "total"
    ].parameters
    assert ours == 400 * (1 + 390 + 39 * 38 // 2) + 400 + 2 * (400 * 400 + 400) + 401


def test_mlperf_dlrm_dcn_v2():
    """Sizes of the reference's command line; by hand: 3 × (2 · 3456 · 512 + 3456) in the cross layers alone."""
    tower = ModelConfig(
        kind="dcn",
        width=128,
        dense_layers=(512, 256),
        over_layers=(1024, 1024, 512, 256),
        cross_rank=512,
    )
    found = count(tower, dense=13, columns=26)
    assert found["dense"].parameters == 13 * 512 + 512 + 512 * 256 + 256 + 256 * 128 + 128
    assert found["interaction"].parameters == 3 * (2 * 3456 * 512 + 3456)
    assert (
        found["over"].parameters == (3456 + 1) * 1024 + 1025 * 1024 + 1025 * 512 + 513 * 256 + 257
    )


def test_counting_needs_no_torch(repo):
    code = "import sys, sluice.dlrm.model.flops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=repo, check=False).returncode == 0
