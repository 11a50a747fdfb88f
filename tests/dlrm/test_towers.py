"""Each model against a twin in numpy that follows its formula sample by sample, and against TorchRec's own layers."""

import itertools

import numpy as np
import pytest
import torch
from torch import fx

from sluice.dlrm.model.towers import build
from tests.product import MODELS, ConfigError, ModelConfig, tower_of
from tests.raises import MISTAKES, raises

SHAPES = [
    (5, 0, 3, 8),
    (1, 1, 1, 4),
    (1, 3, 5, 4),
    (7, 13, 3, 12),
    (16, 2, 26, 8),
]  # samples, dense, columns, width
STEPS = 5


def close(fast, slow):
    assert fast.shape == slow.shape
    np.testing.assert_allclose(fast.detach().numpy(), slow, rtol=1e-6, atol=1e-6)


def randomise(module):
    """Biases too: a twin that forgets one must fail."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=g) / max(1, p.shape[-1]) ** 0.5)
    return module.double()


def inputs(shape):
    samples, dense, columns, width = shape
    g = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=g, dtype=torch.float64)

    return {
        "dense": normal(samples, dense),
        "pooled": normal(samples, columns, width),
        "wide": normal(samples, columns, 4),
        "history": normal(samples, STEPS, width),
        "lengths": torch.tensor([(3 * i) % (STEPS + 1) for i in range(samples)]),
        "target": normal(samples, width),
    }


# ---- the twins: one sample at a time, weights by name


def twin_mlp(w, prefix, x, last_linear=False):
    numbers = sorted({int(n.split(".")[1]) for n in w if n.startswith(prefix + ".")})
    for i in numbers:
        x = w[f"{prefix}.{i}.weight"] @ x + w[f"{prefix}.{i}.bias"]
        if not (last_linear and i == numbers[-1]):
            x = np.where(x > 0, x, 0)
    return x


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def twin_cross(w, x0, config):
    x = x0
    for layer in range(config.cross_layers):
        if not config.cross_rank:
            x = x0 * (w[f"cross.layers.{layer}.weight"] @ x + w[f"cross.layers.{layer}.bias"]) + x
        else:
            x = (
                x0
                * (
                    w[f"cross.up.{layer}.weight"] @ (w[f"cross.down.{layer}.weight"] @ x)
                    + w[f"cross.up.{layer}.bias"]
                )
                + x
            )
    return x


def gates(i, k):
    """The update gate and the candidate of a GRU, from the input's part of the three gates and the state's."""
    (i_reset, i_update, i_new), (k_reset, k_update, k_new) = np.split(i, 3), np.split(k, 3)
    return sigmoid(i_update + k_update), np.tanh(i_new + sigmoid(i_reset + k_reset) * k_new)


def twin_gru(w, steps):
    h, states = np.zeros(len(w["interests.extract.bias_hh_l0"]) // 3), []
    for x in steps:
        i = w["interests.extract.weight_ih_l0"] @ x + w["interests.extract.bias_ih_l0"]
        k = w["interests.extract.weight_hh_l0"] @ h + w["interests.extract.bias_hh_l0"]
        keep, new = gates(i, k)
        h = (1 - keep) * new + keep * h
        states.append(h)
    return states


def twin_interest(w, history, target):
    """Real steps only: no padding, no mask."""
    h = np.zeros(len(target))
    states = twin_gru(w, history)
    if not states:
        return h
    scores = np.array([s @ w["interests.match.weight"] @ target for s in states])
    weights = np.exp(scores) / np.exp(scores).sum()
    for state, a in zip(states, weights, strict=True):
        i = w["interests.enter.weight"] @ state + w["interests.enter.bias"]
        k = w["interests.keep.weight"] @ h + w["interests.keep.bias"]
        update, new = gates(i, k)
        h = (1 - a * update) * h + a * update * new
    return h


def twin_cin(w, vectors):
    """Map by map and pair by pair, as the publication's formula reads."""
    x, sums = vectors, []
    while (name := f"cin.layers.{len(sums)}") in w:
        x = np.array(
            [
                sum(kernel[i, j] * x[i] * vectors[j] for i, j in np.ndindex(kernel.shape))
                for kernel in w[name]
            ]
        )
        sums.append(x.sum(1))
    return np.concatenate(sums)


def twin_attention(w, fields, config):
    """Head by head and feature by feature."""
    width = config.width
    for layer in range(config.attention_layers):
        query, key, value, rest = (
            np.einsum("oi,fi->fo", w[f"attention.{layer}.{name}.weight"], fields)
            for name in ("query", "key", "value", "rest")
        )
        new = rest.copy()
        for head in range(config.attention_heads):
            at = slice(head * width, (head + 1) * width)
            for f in range(len(fields)):
                scores = np.exp([query[f, at] @ key[other, at] for other in range(len(fields))])
                new[f, at] += sum(
                    s / scores.sum() * value[other, at] for other, s in enumerate(scores)
                )
        fields = np.maximum(new, 0)
    return fields.ravel()


def twin(config, module, data):
    w = {name: p.detach().numpy() for name, p in module.named_parameters()}
    data, logits = {name: value.numpy() for name, value in data.items()}, []
    for b in range(len(data["dense"])):
        dense, pooled = data["dense"][b], data["pooled"][b]
        if config.kind == "dlrm":
            low = twin_mlp(w, "dense", dense)
            vectors = [low, *pooled]
            dots = [i @ j for i, j in itertools.combinations(vectors, 2)]
            logit = twin_mlp(w, "over", np.array([*low, *dots]), last_linear=True)[0]
        elif config.kind == "dcn":
            x0 = np.concatenate([twin_mlp(w, "dense", dense), *pooled])
            logit = twin_mlp(w, "over", twin_cross(w, x0, config), last_linear=True)[0]
        elif config.kind == "dien":
            n = data["lengths"][b]
            interest = twin_interest(w, data["history"][b][:n], data["target"][b])
            logit = twin_mlp(
                w,
                "over",
                np.concatenate([dense, *pooled, data["target"][b], interest]),
                last_linear=True,
            )[0]
        elif config.kind == "pnn":
            dots = [i @ j for i, j in itertools.combinations(pooled, 2)]
            logit = twin_mlp(w, "over", np.concatenate([dense, *pooled, dots]), last_linear=True)[0]
        else:
            logit = twin_mlp(w, "over", np.concatenate([dense, *pooled]), last_linear=True)[0]
            if config.kind in ("wide_deep", "deepfm", "xdeepfm"):
                logit += w["linear.weight"][0] @ dense
                logit += sum(weights.mean() for weights in data["wide"][b])
            if config.kind == "deepfm":
                logit += sum(i @ j for i, j in itertools.combinations(pooled, 2))
            elif config.kind == "xdeepfm":
                logit += w["found.weight"][0] @ twin_cin(w, pooled)
            elif config.kind == "autoint":
                fields = np.array(
                    [*(x * v for x, v in zip(dense, w["vectors"], strict=True)), *pooled]
                )
                logit += w["found.weight"][0] @ twin_attention(w, fields, config)
        logits.append(logit)
    return np.array(logits)


CONFIGS = [dict(kind=k) for k in MODELS] + [
    dict(kind="dcn", cross_rank=3, cross_layers=2),
    dict(kind="xdeepfm", cin_layers=(3, 2, 4)),
    dict(kind="autoint", attention_layers=3, attention_heads=3),
]
each_config = pytest.mark.parametrize(
    "settings", CONFIGS, ids=lambda s: "-".join(map(str, s.values()))
)


@pytest.mark.parametrize("shape", SHAPES)
@each_config
def test_a_model_is_its_formula(settings, shape):
    _, dense, columns, width = shape
    config = ModelConfig(width=width, dense_layers=(9, 6), over_layers=(11, 5), **settings)
    tower = randomise(build(config, dense=dense, columns=columns))
    data = inputs(shape)
    out = tower(*(data[name] for name in tower_of(config.kind).inputs))
    close(out, twin(config, tower, data))


@each_config
def test_a_model_can_be_traced(settings):
    """TorchRec's pipeline traces a model down to what holds no sharded table; what is above must be traceable."""
    config = ModelConfig(width=8, **settings)
    tower = build(config, dense=3, columns=4)
    data = {n: v.float() if v.is_floating_point() else v for n, v in inputs((6, 3, 4, 8)).items()}
    args = [data[name] for name in tower_of(config.kind).inputs]
    traced = fx.symbolic_trace(tower)
    torch.testing.assert_close(traced(*args), tower(*args))


@pytest.mark.parametrize("steps", [0, 1])
def test_histories_that_are_all_empty_train(steps):
    config = ModelConfig(kind="dien", width=4)
    tower = build(config, dense=2, columns=1)
    history = torch.zeros(3, steps, 4, requires_grad=True)
    logits = tower(
        torch.zeros(3, 2),
        torch.zeros(3, 1, 4),
        history,
        torch.zeros(3, dtype=torch.long),
        torch.ones(3, 4),
    )
    logits.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in tower.parameters() if p.grad is not None)


@pytest.mark.parametrize(("settings", "facts"), MISTAKES["model"])
def test_a_wrong_model_is_named(settings, facts):
    with raises(ConfigError, *facts):
        ModelConfig(**settings)
