"""What a tower is said to cost, against figures by hand."""

from __future__ import annotations

import pytest

from sluice.dlrm.model.towers import cost_of
from sluice.dlrm.options import ModelConfig


@pytest.mark.parametrize(
    ("kind", "parameters", "products"),
    [
        # Of the products of pairs, the fused product makes both triangles.
        ("dlrm", 13 * 12 + 12 + 40 * 10 + 10 + 11, 13 * 12 + 8 * 8 * 12 + 40 * 10 + 10),
        # Two GRUs and the attention take a step more than the history has items.
        (
            "dien",
            2 * (6 * 144 + 72) + 144 + 121 * 10 + 10 + 11,
            5 * 2 * 6 * 144 + 144 + 5 * 12 + 121 * 10 + 10,
        ),
    ],
)
def test_each_weight_that_a_sample_uses_is_two_operations(kind, parameters, products):
    config = ModelConfig(kind=kind, width=12, dense_layers=(), over_layers=(10,))
    cost = cost_of(config, dense=13, columns=7, history=4)
    assert (cost.parameters, cost.flops) == (parameters, 2 * products)
