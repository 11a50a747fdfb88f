"""Schedules as functions of the step, and clipping."""

import pytest
import torch
from torch import nn

from sluice.dlrm.optim.clip import clip
from sluice.dlrm.optim.schedule import LearningRates, RateSchedule
from tests.product import ConfigError
from tests.raises import MISTAKES, raises

# ---- schedules


def test_a_schedule_rises_stays_falls_and_stays():
    s = RateSchedule(warmup=4, decay_start=6, decay=4, power=2, floor=0.1)
    factors = [s.factor(i) for i in range(12)]
    assert factors == pytest.approx(
        [
            0.25,
            0.5,
            0.75,
            1,
            1,
            1,
            1,
            0.1 + 0.9 * 0.5625,
            0.1 + 0.9 * 0.25,
            0.1 + 0.9 * 0.0625,
            0.1,
            0.1,
        ]
    )


@pytest.mark.parametrize(
    ("text", "facts"),
    MISTAKES["schedule"],
)
def test_a_wrong_schedule_says_what_is_wrong(text, facts):
    with raises(ConfigError, *facts):
        RateSchedule.read(text)


def test_rates_follow_the_step_and_a_loaded_state_changes_no_base():
    def made():
        groups = [
            {"params": [nn.Parameter(torch.ones(1))], "lr": 0.4},
            {"params": [nn.Parameter(torch.ones(1))]},
        ]
        optimiser = torch.optim.SGD(groups, lr=0.2)
        return optimiser, LearningRates([(optimiser, RateSchedule(warmup=4))])

    optimiser, rates = made()
    rates.set_step(0)
    assert [g["lr"] for g in optimiser.param_groups] == pytest.approx([0.1, 0.05])
    other, resumed = made()
    other.load_state_dict(optimiser.state_dict())
    resumed.set_step(3)
    assert [g["lr"] for g in other.param_groups] == pytest.approx([0.4, 0.2])


# ---- clipping


@pytest.mark.parametrize("seed", range(20))
def test_clipping_gives_the_bits_of_a_division_on_the_host(seed):
    """Gradients of very small and very large numbers, of zeros, and of one number."""
    draw = torch.Generator().manual_seed(seed)
    scale = 10.0 ** (seed * 2 - 30) if seed else 0.0
    sizes = [(16,), (16, 13), (1,), ()]
    gradients = [scale * torch.randn(size, generator=draw) for size in sizes]
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for parameter, g in zip(parameters, gradients, strict=True):
        parameter.grad = g.clone()
    length = float(nn.utils.get_total_norm(gradients))
    clip(parameters, 0.3)
    for parameter, g in zip(parameters, gradients, strict=True):
        expected = g.mul(0.3 / length) if length > 0.3 else g
        assert torch.equal(parameter.grad, expected)
