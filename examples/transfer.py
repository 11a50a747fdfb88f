"""Trains a small model with the help of a larger one, and moves a model to another shop, as Intel's TLK does.

    python examples/transfer.py
    python examples/transfer.py --rows 400000 --seeds 5

*Distillation*: the student has half of the teacher's width and layers. It is trained twice, with the same rows, order
and initial weights: from clicks alone, and half from clicks and half from the teacher's predictions. The aims were
fixed before the measurement: an AUC within 0.005 of the teacher's, and at least 0.002 above the student from clicks
alone.

*Transfer*: another shop has a twentieth of the rows. Its ids mean nearly the same: a tenth of the variance of their
vectors is new. The program compares the teacher's checkpoint after more training there, the unchanged checkpoint, and a
new model.

The learning rates are chosen on separate rows. The last line is JSON, with the mean AUCs on the test rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from clicks import Batch, Loss, Model, compute_auc, load_batches, train_model, write_clicks
from torch.nn.functional import binary_cross_entropy_with_logits

WIDTH, LAYERS = 8, (128, 64)
RATES = (0.003, 0.01, 0.03)


def new_model(seed: int, part: int = 1) -> Model:
    """Returns a new model, with the teacher's width and layers divided by `part`."""
    torch.manual_seed(seed)
    return Model(WIDTH // part, [size // part for size in LAYERS])


def distillation_loss(teacher: Model) -> Loss:
    """Returns a loss: the mean of the cross-entropies with the clicks and with the teacher's predictions."""

    def loss(
        logits: torch.Tensor, clicks: torch.Tensor, dense: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        with torch.no_grad():
            chances = torch.sigmoid(teacher(dense, ids))
        return binary_cross_entropy_with_logits(logits, (clicks + chances) / 2)

    return loss


def best(make: Callable[[float], Model], held_out: Sequence[Batch]) -> Model:
    """Returns the model of the learning rate with the best AUC on the held-out rows."""
    return max(map(make, RATES), key=lambda model: compute_auc(model, held_out))


def compare_students(
    data: Mapping[str, Sequence[Batch]], seed: int, checkpoint: Path
) -> dict[str, float]:
    """Returns the test AUCs of the teacher, the student alone, and the student with the teacher's predictions. Saves
    the teacher to `checkpoint`."""

    def model(part: int, loss: Loss | None = None) -> Model:
        return best(
            lambda rate: train_model(new_model(seed, part), data["train"], rate=rate, loss=loss),
            data["held out"],
        )

    teacher, alone = model(1), model(2)
    torch.save(teacher.state_dict(), checkpoint)
    return {
        name: compute_auc(model, data["test"])
        for name, model in (
            ("teacher", teacher),
            ("student alone", alone),
            ("student beside the teacher", model(2, distillation_loss(teacher))),
        )
    }


def compare_transfers(
    data: Mapping[str, Sequence[Batch]], seed: int, checkpoint: Path
) -> dict[str, float]:
    """Returns the test AUCs at the other shop: of the unchanged checkpoint, after more training, and of a new model."""

    def kept() -> Model:
        model = new_model(seed)
        model.load_state_dict(torch.load(checkpoint, weights_only=True))
        return model

    def on_from(start: Callable[[], Model]) -> Model:
        return best(lambda rate: train_model(start(), data["train"], rate=rate), data["held out"])

    return {
        name: compute_auc(model, data["test"])
        for name, model in (
            ("as it is", kept()),
            ("moved", on_from(kept)),
            ("anew", on_from(lambda: new_model(seed))),
        )
    }


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, number, what in (
        ("--rows", 100_000, "that are trained on"),
        ("--seeds", 3, "of the first weights"),
    ):
        parser.add_argument(name, type=int, default=number, help=f"{what} (default %(default)s)")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        few = given.rows // 20
        true = []
        runs = []
        shops: list[dict[str, list[Batch]]] = []
        for shop, (rows, drift) in enumerate(((given.rows, 0.0), (few, 0.1))):
            shops.append({})
            for number, (name, count) in enumerate(
                (("train", rows), ("held out", 4 * few), ("test", 8 * few))
            ):
                folder = Path(made, f"{shop} {name}")
                true.append(
                    write_clicks(folder, count, seed=10 * shop + number, shop=shop, drift=drift)
                )
                shops[-1][name] = load_batches(folder, 256 if name == "train" else 8192)
        for seed in range(given.seeds):
            checkpoint = Path(made, f"teacher-{seed}.pt")
            runs.append(
                {
                    **compare_students(shops[0], seed, checkpoint),
                    **compare_transfers(shops[1], seed, checkpoint),
                }
            )
            print("  ".join(f"{name} {auc:.4f}" for name, auc in runs[-1].items()), flush=True)
    scores = {name: round(statistics.mean(run[name] for run in runs), 4) for name in runs[0]}
    beside = scores["student beside the teacher"]
    scores |= {
        "below the teacher": round(scores["teacher"] - beside, 4),
        "above itself alone": round(beside - scores["student alone"], 4),
        "moved above anew": round(scores["moved"] - scores["anew"], 4),
        "true chances": round(true[2], 4),
        "true chances, other shop": round(true[5], 4),
    }
    print(json.dumps(scores))
    return scores


if __name__ == "__main__":
    main()
