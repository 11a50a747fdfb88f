"""A student that learns from a larger model, and a model that moves to another shop, as TLK has it.

    python examples/transfer.py
    python examples/transfer.py --rows 400000 --seeds 5

*Distilled*: the student has half of the teacher's width and layers. Alone it learns from clicks; beside the teacher it
learns, in equal parts, from clicks and from the chances that the teacher gives the same rows. Its rows, order and first
weights are the same both times. Aims, fixed beforehand: within .005 AUC of the teacher, and .002 or more above itself
alone. *Moved*: a checkpoint of the teacher goes on at another shop, whose ids mean nearly the same (a tenth of their
vectors' variance is new) and which has a twentieth of the rows, beside a model that begins there anew, and beside the
checkpoint as it is. All learning rates are looked for on rows of their own. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from clicks import Batch, Loss, Model, batches_of, judged, planted_clicks, trained
from torch.nn.functional import binary_cross_entropy_with_logits

WIDTH, LAYERS = 8, (128, 64)
RATES = (0.003, 0.01, 0.03)


def fresh(seed: int, part: int = 1) -> Model:
    """A model with a part of the teacher's width and layers."""
    torch.manual_seed(seed)
    return Model("dots", WIDTH // part, [size // part for size in LAYERS])


def taught_by(teacher: Model) -> Loss:
    """Half of it the clicks' cross-entropy, half the teacher's chances'."""

    def loss(
        logits: torch.Tensor, clicks: torch.Tensor, dense: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        with torch.no_grad():
            chances = torch.sigmoid(teacher(dense, ids))
        return binary_cross_entropy_with_logits(logits, (clicks + chances) / 2)

    return loss


def best(make: Callable[[float], Model], held_out: Sequence[Batch]) -> Model:
    """The model of the rate that ranks rows best that it has not seen."""
    return max(map(make, RATES), key=lambda model: judged(model, held_out))


def distilled(data: Mapping[str, Sequence[Batch]], seed: int, checkpoint: Path) -> dict[str, float]:
    """Test AUCs of the teacher, which is kept, the student alone and the student beside the teacher."""

    def model(part: int, loss: Loss | None = None) -> Model:
        return best(
            lambda rate: trained(fresh(seed, part), data["train"], rate=rate, loss=loss),
            data["held out"],
        )

    teacher, alone = model(1), model(2)
    torch.save(teacher.state_dict(), checkpoint)
    return {
        name: judged(one, data["test"])
        for name, one in (
            ("teacher", teacher),
            ("student alone", alone),
            ("student beside the teacher", model(2, taught_by(teacher))),
        )
    }


def moved(data: Mapping[str, Sequence[Batch]], seed: int, checkpoint: Path) -> dict[str, float]:
    """Test AUCs at the other shop: the checkpoint as it is, after it went on there, and a model that begins there."""

    def kept() -> Model:
        model = fresh(seed)
        model.load_state_dict(torch.load(checkpoint, weights_only=True))
        return model

    def on_from(start: Callable[[], Model]) -> Model:
        return best(lambda rate: trained(start(), data["train"], rate=rate), data["held out"])

    return {
        name: judged(one, data["test"])
        for name, one in (
            ("as it is", kept()),
            ("moved", on_from(kept)),
            ("anew", on_from(lambda: fresh(seed))),
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
        few, true, runs = given.rows // 20, [], []
        shops: list[dict[str, list[Batch]]] = []
        for shop, (rows, drift) in enumerate(((given.rows, 0.0), (few, 0.1))):
            shops.append({})
            for number, (name, count) in enumerate(
                (("train", rows), ("held out", 4 * few), ("test", 8 * few))
            ):
                folder = Path(made, f"{shop} {name}")
                true.append(
                    planted_clicks(folder, count, seed=10 * shop + number, shop=shop, drift=drift)
                )
                shops[-1][name] = batches_of(folder, 256 if name == "train" else 8192)
        for seed in range(given.seeds):
            checkpoint = Path(made, f"teacher-{seed}.pt")
            runs.append(
                {**distilled(shops[0], seed, checkpoint), **moved(shops[1], seed, checkpoint)}
            )
            print("  ".join(f"{name} {auc:.4f}" for name, auc in runs[-1].items()), flush=True)
    found = {name: round(statistics.mean(run[name] for run in runs), 4) for name in runs[0]}
    beside = found["student beside the teacher"]
    found |= {
        "below the teacher": round(found["teacher"] - beside, 4),
        "above itself alone": round(beside - found["student alone"], 4),
        "moved above anew": round(found["moved"] - found["anew"], 4),
        "true chances": round(true[2], 4),
        "true chances, other shop": round(true[5], 4),
    }
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
