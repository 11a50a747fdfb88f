"""What TorchRec's fused kernels do to a table, held against the formula: V += ‖g‖² / d, w −= lr · g / (√V + eps)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad

from sluice.dlrm.optim.schedule import RateSchedule, Scheduled

LR, EPS = 0.1, 1e-8


def fused(rows, width, kind=RowWiseAdagrad, settings=None):
    tables = [
        EmbeddingBagConfig(name="t", feature_names=["t"], num_embeddings=rows, embedding_dim=width)
    ]
    found = FusedEmbeddingBagCollection(
        tables, kind, settings or {"lr": LR, "eps": EPS}, device=torch.device("cpu")
    )
    with torch.no_grad():
        found.state_dict()["embedding_bags.t.weight"].copy_(
            torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
        )
    return found


def weights(module):
    return module.state_dict()["embedding_bags.t.weight"].detach().clone()


def state(module):
    return (
        module.fused_optimizer()
        .state_dict()["state"]["t.weight"]["t.weight.momentum_1"]
        .detach()
        .clone()
    )


def step(module, bags, direction):
    """One backward pass, with a gradient that is given: that of each bag's pooled vector."""
    keyed = KeyedJaggedTensor(
        keys=["t"],
        values=torch.tensor([i for bag in bags for i in bag], dtype=torch.int32),
        lengths=torch.tensor([len(bag) for bag in bags], dtype=torch.int32),
    )
    (module(keyed)["t"] * direction).sum().backward()


def twin(w, v, bags, direction, lr=LR):
    """Every row's gradient is the sum over the bags that it was in, then one update."""
    gradients = np.zeros_like(w)
    for bag, g in zip(bags, direction, strict=True):
        for i in bag:
            gradients[i] += g
    for i in {i for bag in bags for i in bag}:
        v[i] += (gradients[i] ** 2).sum() / w.shape[1]
        w[i] -= lr * gradients[i] / (np.sqrt(v[i]) + EPS)
    return w, v


BAGS = [[[0, 1], [2]], [[1, 1, 3], []], [[4], [4]], [[0], [1, 2]]]


@pytest.mark.parametrize("width", [4, 12])
def test_the_fused_update_is_the_formula(width):
    module = fused(5, width)
    w, v = weights(module).double().numpy(), np.zeros(5)
    g = torch.Generator().manual_seed(1)
    for bags in BAGS:
        direction = torch.randn(2, width, generator=g)
        step(module, bags, direction)
        w, v = twin(w, v, bags, direction.double().numpy())
    np.testing.assert_allclose(weights(module).numpy(), w, rtol=0, atol=1e-6)
    np.testing.assert_allclose(state(module).numpy().ravel(), v, rtol=0, atol=1e-6)


def test_the_fused_update_takes_the_schedules_rate():
    module = fused(3, 4)
    scheduled = Scheduled(
        module.fused_optimizer(), RateSchedule(warmup=4), steps_per_epoch=1, fused=True
    )
    w, v = weights(module).double().numpy(), np.zeros(3)
    for number in range(6):
        rate = scheduled.set_step(number)
        assert rate == pytest.approx(LR * min(1, (number + 1) / 4))
        step(module, [[0, number % 3]], torch.ones(1, 4))
        w, v = twin(w, v, [[0, number % 3]], np.ones((1, 4)), lr=rate)
    np.testing.assert_allclose(weights(module).numpy(), w, rtol=0, atol=1e-6)
