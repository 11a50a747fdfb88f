"""What runs on every rank in test_ranks.py: `python -m tests.dlrm.ranks FOLDER`. Rank 0 prints what it found."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from dlrm import checkpoint
from dlrm.config import Config, ModelConfig, OptimConfig, Table
from dlrm.guard import Guard
from dlrm.meta import Meta
from dlrm.model import Ranker, features, first_weights, loss_of
from dlrm.optim import dense_optimiser, fuse_tables
from dlrm.quiet import quiet
from dlrm.sharding import place, read_back, shard
from dlrm.trainer import Trainer, evaluate
from dlrm.world import World, world
from tests.dlrm.rig import DENSE, SIZES, FakeFeed, batch

MODEL = ModelConfig(width=8, dense_layers=(16,), over_layers=(16,))
TABLES = [Table(name=n, rows=r, width=8) for n, r in SIZES.items()]
NAMES = list(SIZES)
ROWS, STEPS = 64, 6


def build(here: World, how: str, optimiser: str = "adagrad"):
    config = Config(data="fake", version=0, batch_size=ROWS, ranks=here.ranks, epochs=2, log_every=1, model=MODEL,
                    optim=OptimConfig(dense_optimiser=optimiser, dense_lr=0.01 if optimiser == "adam" else 0.05))
    torch.manual_seed(1)
    plain = Ranker(MODEL, TABLES, len(DENSE))
    fuse_tables(plain.dlrm.sparse_arch, config.optim)
    model = shard(plain, place(TABLES, here.ranks, how), here)
    first_weights(model, 1)
    return config, model, dense_optimiser(model, config.optim)


def whole_weights(model, here: World) -> dict[str, torch.Tensor]:
    """Every parameter in full, on every rank, with tables put together from their shards."""
    found = {}
    for name, value in model.state_dict().items():
        if not hasattr(value, "local_shards"):
            found[name] = value.clone()
            continue
        full = torch.zeros(*value.size())
        for part in value.local_shards():
            (top, left), (height, breadth) = part.metadata.shard_offsets, part.metadata.shard_sizes
            full[top:top + height, left:left + breadth] = part.tensor
        found[name] = here.sum(full)
    return found


def twin(weights: dict[str, torch.Tensor], steps: int, optim: OptimConfig, parts: int) -> tuple[list[float], dict]:
    """The same training written plainly: whole tables, dense gradients, the optimisers' formulas by hand.

    `parts`: pieces that tables are cut into by columns. Each has row-wise Adagrad's state for itself."""
    w = {k: v.clone().requires_grad_() for k, v in weights.items()}
    state = {k: torch.zeros(len(v), parts, 1) if "embedding_bags" in k else torch.zeros_like(v)
             for k, v in weights.items()}
    tables = {n: next(k for k in w if f".{n}.weight" in k) for n in NAMES}
    linear = [k.removesuffix(".weight") for k in w if k.endswith(".weight") and "embedding_bags" not in k]
    towers = {part: sorted(p for p in linear if part in p) for part in ("dense_arch", "over_arch")}
    losses = []
    for step in range(steps):
        b = batch(step, ROWS)
        x = b.dense
        for p in towers["dense_arch"]:
            x = torch.relu(x @ w[f"{p}.weight"].T + w[f"{p}.bias"])
        ids = b.values.view(len(NAMES), ROWS).long()
        vectors = torch.stack([x, *(w[tables[n]][ids[i]] for i, n in enumerate(NAMES))], dim=1)
        dots = torch.einsum("bie,bje->bij", vectors, vectors)
        upper = torch.triu_indices(len(NAMES) + 1, len(NAMES) + 1, offset=1)
        z = torch.cat([x, dots[:, upper[0], upper[1]]], dim=1)
        for i, p in enumerate(towers["over_arch"]):
            z = z @ w[f"{p}.weight"].T + w[f"{p}.bias"]
            z = torch.relu(z) if i < len(towers["over_arch"]) - 1 else z
        loss = torch.nn.functional.binary_cross_entropy_with_logits(z.squeeze(1), b.label)
        losses.append(loss.item())
        grads = torch.autograd.grad(loss, list(w.values()))
        with torch.no_grad():
            for (k, value), g in zip(w.items(), grads, strict=True):
                if "embedding_bags" in k:
                    cut = g.view(len(g), parts, -1)
                    state[k] += (cut * cut).mean(2, keepdim=True)
                    value.sub_((optim.lr * cut / (state[k].sqrt() + 1e-8)).view_as(g))
                else:
                    state[k] += g * g
                    value.sub_(optim.dense_lr * g / (state[k].sqrt() + 1e-10))
    return losses, {k: v.detach() for k, v in w.items()}


def trained(here: World, how: str, folder: Path, optimiser: str = "adagrad", *, stop_at: int | None = None,
            resume: Path | None = None):
    config, model, dense = build(here, how, optimiser)
    losses: list[float] = []
    meta = Meta(config={}, version=0, fingerprint={}, columns=SIZES, dense=tuple(DENSE))
    feed = FakeFeed(STEPS, ROWS, here.rank, here.ranks)
    if resume is not None:
        checkpoint.load(resume, model, dense, here)
        meta = replace(meta, epoch=0, step=stop_at or 0)
        feed.position = {"epoch": 0, "step": stop_at}
        stop_at = None
    trainer = Trainer(config=config, world=here, model=model, dense=dense, guard=Guard(SIZES, DENSE, "fake"),
                      names=NAMES, checkpoints=folder, record=lambda _: None,
                      observe=lambda m: losses.append(m["loss"]),
                      asked_to_stop=lambda: here.rank == here.ranks - 1 and len(losses) + 1 == stop_at)
    outcome = trainer.train(feed, meta, lambda _: None)
    return losses, model, outcome


def main(folder: Path) -> None:
    quiet()
    with world() as here:
        found: dict = {}
        config, model, _ = build(here, "auto")
        found["kinds"] = read_back(model)
        first = whole_weights(model, here)
        found["first"] = {k: v.double().sum().item() for k, v in first.items()}
        for how in ("auto", "row", "column"):
            expected, final = twin(first, STEPS, config.optim, here.ranks if how == "column" else 1)
            _, model, _ = build(here, how)
            found[f"first_{how}"] = max((v - first[k]).abs().max().item()
                                        for k, v in whole_weights(model, here).items())
            losses, model, _ = trained(here, how, folder / f"{how}-{here.ranks}", stop_at=STEPS)
            found[f"losses_{how}"] = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            found[f"weights_{how}"] = max((v - final[k]).abs().max().item()
                                          for k, v in whole_weights(model, here).items())
        for optimiser in ("adagrad", "adam"):
            base = folder / f"{optimiser}-{here.ranks}"
            straight, model, _ = trained(here, "auto", base / "a", optimiser)
            broken, _, outcome = trained(here, "auto", base / "b", optimiser, stop_at=4)
            saved = next((base / "b").glob("step-*"))
            rest, again, _ = trained(here, "auto", base / "c", optimiser, stop_at=4, resume=saved)
            found[f"resume_{optimiser}"] = {"straight": straight, "broken": broken, "rest": rest,
                                            "stopped": outcome.stopped, "at": outcome.meta.loader}
            a, b = whole_weights(model, here), whole_weights(again, here)
            found[f"equal_{optimiser}"] = all(torch.equal(a[k], b[k]) for k in a)
        # What another number of ranks and another sharding make of the two-rank checkpoint.
        other = folder / "adagrad-2" / "b"
        if other.exists():
            rest, model, _ = trained(here, "table", folder / f"other-{here.ranks}", "adagrad", stop_at=4,
                                     resume=next(other.glob("step-*")))
            found["other"] = rest
        found["quality"] = evaluate(
            model, [batch(5000 + i, ROWS, here.rank, here.ranks) for i in range(3)], NAMES,
            Guard(SIZES, DENSE, "fake"), here).to_dict()
        logits = []
        with torch.no_grad():
            for i in range(3):
                b = batch(5000 + i, ROWS, here.rank, here.ranks)
                logits.append(loss_of(model(*features(b, NAMES, here.device)), b.label, b.weight).item())
        found["loss"] = here.sum(torch.tensor(logits, dtype=torch.float64)).mean().item() / here.ranks
        if here.first:
            print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
