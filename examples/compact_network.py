"""Finds a compact network with a score that needs no training, as DE-NAS does. All candidates are then trained to
check the score.

    python examples/compact_network.py
    python examples/compact_network.py --rows 400000 --seed 1

The score has four parts. They are computed from one batch with the initial weights:

* complexity: the logarithm of the number of parameters;
* expressivity: how different the rows' gradients are, the log-determinant of their normalised kernel;
* saliency: how much the loss would change without each weight, |weight × gradient|, as a logarithm;
* fit: how well the kernel of the gradients agrees with the clicks, after their mean is subtracted.

The score of a candidate is its mean rank in the four parts. The last line is JSON. It has Kendall's τ between the AUC
after training and the score, and each part (aim: 0.5). It also has the difference between the best AUC and that of the
candidate with the best score.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from clicks import Model, compute_auc, load_batches, train_model, write_clicks
from torch.nn.functional import binary_cross_entropy_with_logits

KINDS, WIDTHS = ("layers", "dots", "cross"), (2, 4, 8, 16)
LAYERS = ((), (16,), (64,), (64, 32), (256, 64), (128, 128, 64))
PARTS = ("complexity", "expressivity", "saliency", "fit")


class Candidate(NamedTuple):
    kind: str
    width: int
    layers: tuple[int, ...]

    def model(self, seed: int) -> Model:
        torch.manual_seed(seed)
        return Model(self.kind, self.width, self.layers)


def draw_candidates(count: int, seed: int) -> list[Candidate]:
    """Returns `count` different candidates, drawn at random."""
    every = list(itertools.starmap(Candidate, itertools.product(KINDS, WIDTHS, LAYERS)))
    return random.Random(seed).sample(every, count)


def compute_parts(
    model: Model, dense: torch.Tensor, ids: torch.Tensor, clicks: torch.Tensor
) -> dict[str, float]:
    """Returns the four parts of a model's score, from one batch."""
    weights = list(model.parameters())

    def gradient(row: int) -> torch.Tensor:
        found = torch.autograd.grad(model(dense[row : row + 1], ids[:, row : row + 1])[0], weights)
        return torch.cat([part.flatten() for part in found])

    rows = torch.stack([gradient(row) for row in range(len(clicks))])
    kernel = (rows @ rows.T).double()
    scale = kernel.diagonal().clamp_min(1e-12).sqrt()
    alike = kernel / scale.outer(scale)
    beyond = (clicks - clicks.mean()).double()
    centre = torch.eye(len(clicks), dtype=torch.float64) - 1 / len(clicks)
    kernel = centre @ kernel @ centre
    loss = binary_cross_entropy_with_logits(model(dense, ids), clicks)
    gradients = torch.autograd.grad(loss, weights)
    salient = sum(
        float((w * g).detach().abs().sum()) for w, g in zip(weights, gradients, strict=True)
    )
    return {
        "complexity": float(torch.tensor(sum(w.numel() for w in weights)).log()),
        "expressivity": float(torch.logdet(alike + 1e-3 * torch.eye(len(alike)))),
        "saliency": float(torch.tensor(salient).log()),
        "fit": float(beyond @ kernel @ beyond / (kernel.norm() * beyond @ beyond)),
    }


def ranks(values: Sequence[float]) -> list[int]:
    """Returns for each value the number of smaller values."""
    return [sum(other < value for other in values) for value in values]


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns Kendall's τ: the share of pairs in the same order, minus the share in the opposite order."""
    signs = [
        (one[a] - one[b]) * (other[a] - other[b])
        for a, b in itertools.combinations(range(len(one)), 2)
    ]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs)


def compute_scores(parts: Sequence[dict[str, float]]) -> list[float]:
    """Returns the mean rank of each candidate in the four parts."""
    each = [ranks([found[name] for found in parts]) for name in PARTS]
    return [sum(one) / len(PARTS) for one in zip(*each, strict=True)]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, number, what in (
        ("--rows", 100_000, "of the trainings"),
        ("--candidates", 30, "that are compared"),
        ("--batch", 128, "rows that a score looks at"),
        ("--seed", 0, ""),
    ):
        parser.add_argument(name, type=int, default=number, help=f"{what} (default %(default)s)")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        write_clicks(Path(made, "train"), given.rows, seed=given.seed + 1)
        best = write_clicks(Path(made, "test"), 40_000, seed=given.seed + 2)
        train, test = (
            load_batches(Path(made, "train")),
            load_batches(Path(made, "test"), 8192, shuffle=False),
        )
        some = train[0][0][: given.batch], train[0][1][:, : given.batch], train[0][2][: given.batch]
        all_of_them = draw_candidates(given.candidates, given.seed)
        began = time.process_time()
        parts = [compute_parts(one.model(given.seed), *some) for one in all_of_them]
        scoring_s, scores = time.process_time() - began, compute_scores(parts)
        began, aucs = time.process_time(), []
        print("| candidate | parameters | score | AUC |\n|---|---|---|---|")
        for candidate, score in zip(all_of_them, scores, strict=True):
            model = train_model(candidate.model(given.seed), train)
            aucs.append(compute_auc(model, test))
            name = f"{candidate.kind}, {candidate.width} wide, {'-'.join(map(str, candidate.layers)) or 'no layers'}"
            size = sum(parameter.numel() for parameter in model.parameters())
            print(f"| {name} | {size:,} | {score:.1f} | {aucs[-1]:.4f} |", flush=True)
        first = max(range(len(scores)), key=scores.__getitem__)
        found = {
            "kendall": round(kendall(scores, aucs), 3),
            "kendall_of_parts": {
                name: round(kendall([p[name] for p in parts], aucs), 3) for name in PARTS
            },
            "first_below_best": round(max(aucs) - aucs[first], 4),
            "best_auc": round(max(aucs), 4),
            "auc_of_true_chances": round(best, 4),
            "scoring_cpu_s": round(scoring_s, 1),
            "training_cpu_s": round(time.process_time() - began, 1),
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main()
