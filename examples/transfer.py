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
from collections.abc import Callable
from pathlib import Path

import torch
from clicks import Loss, Model, judged, planted_clicks, trained
from torch.nn.functional import binary_cross_entropy_with_logits

WIDTH, LAYERS = 8, (128, 64)
RATES = (0.001, 0.003, 0.01, 0.03)


def fresh(seed: int, part: int = 1) -> Model:
    """A model with a part of the teacher's width and layers."""
    torch.manual_seed(seed)
    return Model("dots", WIDTH // part, [size // part for size in LAYERS])


def taught_by(teacher: Model) -> Loss:
    """Half of it the clicks' cross-entropy, half the teacher's chances'."""
    def loss(logits: torch.Tensor, clicks: torch.Tensor, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            chances = torch.sigmoid(teacher(dense, ids))
        return binary_cross_entropy_with_logits(logits, (clicks + chances) / 2)

    return loss


def best(make: Callable[[float], Model], held_out: Path) -> Model:
    """The model of the rate that ranks rows best that it has not seen."""
    return max(map(make, RATES), key=lambda model: judged(model, held_out))


def distilled(folder: Path, seed: int, epochs: int) -> dict[str, float]:
    """Test AUCs of the teacher, the student alone and the student beside the teacher."""
    train, held_out, test = (folder / name for name in ("train", "held out", "test"))
    teacher = best(lambda rate: trained(fresh(seed), train, epochs=epochs, rate=rate), held_out)
    alone = best(lambda rate: trained(fresh(seed, 2), train, epochs=epochs, rate=rate), held_out)
    student = best(lambda rate: trained(fresh(seed, 2), train, epochs=epochs, rate=rate, loss=taught_by(teacher)),
                   held_out)
    torch.save(teacher.state_dict(), folder / f"teacher-{seed}.pt")
    return {"teacher": judged(teacher, test), "student alone": judged(alone, test),
            "student beside the teacher": judged(student, test)}


def moved(folder: Path, seed: int, epochs: int) -> dict[str, float]:
    """Test AUCs at the other shop: the checkpoint as it is, after it went on there, and a model that begins there."""
    other, held_out, test = (folder / name for name in ("other", "other held out", "other test"))

    def checkpoint() -> Model:
        model = fresh(seed)
        model.load_state_dict(torch.load(folder / f"teacher-{seed}.pt", weights_only=True))
        return model

    def on_from(start: Callable[[], Model]) -> float:
        return judged(best(lambda rate: trained(start(), other, epochs=epochs, rate=rate), held_out), test)

    return {"as it is": judged(checkpoint(), test), "moved": on_from(checkpoint), "anew": on_from(lambda: fresh(seed))}


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number, what in (("--rows", 200_000, "that are trained on"), ("--seeds", 3, "of the first weights"),
                               ("--epochs", 1, "of each training")):
        parser.add_argument(name, type=int, default=number, help=f"{what} (default %(default)s)")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        folder, few = Path(made), max(1000, given.rows // 20)
        for number, (name, rows) in enumerate((("train", given.rows), ("held out", 2 * few), ("test", 4 * few))):
            true = planted_clicks(folder / name, rows, seed=10 + number)
        for number, (name, rows) in enumerate((("other", few), ("other held out", 2 * few), ("other test", 4 * few))):
            true_other = planted_clicks(folder / name, rows, seed=20 + number, shop=1, drift=0.1)
        runs = []
        for seed in range(given.seeds):
            runs.append({**distilled(folder, seed, given.epochs), **moved(folder, seed, given.epochs)})
            print("  ".join(f"{name} {auc:.4f}" for name, auc in runs[-1].items()), flush=True)
    found = {name: round(statistics.mean(run[name] for run in runs), 4) for name in runs[0]}
    beside = found["student beside the teacher"]
    found |= {"below the teacher": round(found["teacher"] - beside, 4),
              "above itself alone": round(beside - found["student alone"], 4),
              "moved above anew": round(found["moved"] - found["anew"], 4),
              "true chances": round(true, 4), "true chances, other shop": round(true_other, 4)}
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
