"""Notices a model that learns nothing, that got worse, or whose predictions are bad: `stuck`, `falling` and
`bad_predictions` look at evaluations, and say what is likely wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.dlrm.evaluation.split import Findings

NEAR = 0.01  # an AUC this close to 0.5 is of no use to anyone, however many rows show that it is not chance
FALLS = 0.002  # of AUC, at least; less is noise, however many rows there are
# Predicted over observed positives. Outside this range, bids and thresholds are far off.
CALIBRATED = (0.5, 2.0)
TELLING = 0.98  # the AUC of one column alone, above which it most likely was written with the label
TOO_GOOD = 0.999  # the AUC of a model, from which on its features most likely hold the label
BY_HEART = 1.5  # times the loss on training rows: a larger one on others shows that the former are known by heart
FEW_STEPS = 200  # a model of fewer steps has hardly left its beginning
# The likely cause while no row was trained twice, so that none can be learned by heart
FIRST_EPOCH = (
    "a learning rate that is too large, or a validation split unlike the rows that came last: try a third of "
    "--lr and --dense-lr"
)


def chance(rows: int, positives: int) -> float:
    """Returns how far from 0.5 an AUC of pure chance is found once in some 30,000 evaluations: four standard errors."""
    negatives = rows - positives
    if not positives or not negatives:
        return 0.5
    return 4 * math.sqrt((rows + 1) / (12 * positives * negatives))


def learned_by_heart(
    findings: Findings, *, epochs: float, training_loss: float | None
) -> str | None:
    """Returns what was measured of a model that knows the training rows by heart, with what to do. None: it does not,
    or that is not known. `training_loss` is the newest one."""
    logloss = findings.quality.logloss
    if epochs <= 1 or training_loss is None or logloss is None:
        return None
    if not logloss > BY_HEART * training_loss:
        return None
    return (
        f"the loss is {training_loss:.3f} on training rows and {logloss:.3f} on these after {epochs:.1f} epochs, so "
        "training rows are learned by heart: take fewer --epochs, a --stop-auc, or more data"
    )


def stuck(
    findings: Findings, *, step: int, lr: float, after: int, by_heart: str | None = None
) -> str | None:
    """Returns the text of a warning if the model ranks no better than chance at step `after` or later, else None. `lr`
    is the tables' learning rate, and `by_heart` the text of `learned_by_heart`."""
    if step < after:
        return None
    auc, rows, positives = findings.quality.auc, findings.quality.rows, findings.positives
    if auc is None:
        return (
            f"step {step}: all {rows} rows evaluated have label {int(positives > 0)}, "
            "so nothing can be ranked; look at the label's column and at how the split was made"
        )
    margin = max(NEAR, chance(rows, positives))
    if auc > 0.5 + margin:
        return None
    if auc < 0.5 - margin:
        return (
            f"step {step}: AUC {auc:.4f} on {rows} rows is below chance: labels turned "
            "round, or a split whose labels mean something else"
        )
    causes = _causes(findings, lr, by_heart) or [
        "a learning rate that is too small or too large: try a tenth and ten times of it",
        "labels that do not belong to their rows: look at a few rows with `sluice show`",
    ]
    return f"step {step}: AUC {auc:.4f} on {rows} rows is no better than chance. Likely: {'; '.join(causes)}"


def falling(aucs: Mapping[int, float], steps_per_epoch: int, noise: float) -> str | None:
    """Returns a warning if the newest AUC is below the best one by more than noise, and the best one is at least a
    third of an epoch old; else None. `aucs` are in the order of their steps."""
    steps = list(aucs)
    step, best = steps[-1], max(steps, key=lambda step: aucs[step])
    epochs = (step - best) / steps_per_epoch
    if epochs < 1 / 3 or aucs[step] >= aucs[best] - max(FALLS, noise):
        return None
    causes = (
        "the same rows once more are learned by heart: take fewer --epochs, a --stop-auc, or more data"
        if step > steps_per_epoch
        else FIRST_EPOCH
    )
    return (
        f"step {step}: validation AUC has fallen from {aucs[best]:.5f} at step {best} to {aucs[step]:.5f}. Likely: "
        f"{causes} (`sluice evaluate --best` takes the best checkpoint)"
    )


def bad_predictions(
    findings: Findings,
    *,
    step: int,
    lr: float,
    steps_per_epoch: int,
    by_heart: str | None = None,
) -> list[str]:
    """Returns warnings about the predictions of a trained model: if they are worse than the mean rate, or predict far
    more or far fewer positives than there are. `lr` and `by_heart` are as in `stuck`."""
    warnings = []
    ne, calibration = findings.quality.ne, findings.quality.calibration
    few = ""
    if step < FEW_STEPS:
        few = f"{step} steps are too few: take a smaller --batch-size, or more --epochs"
    if ne is not None and not ne <= 1:
        cause = (
            "training rows are learned by heart, or other than these: take fewer --epochs, a lower --lr and "
            "--dense-lr, or the best checkpoint (`sluice evaluate --best`)"
            if step > steps_per_epoch
            else FIRST_EPOCH
        )
        warnings.append(
            f"NE {ne:.3f} on validation is above 1: always predicting the mean rate would be "
            f"better. Likely: {few or '; '.join(_causes(findings, lr, by_heart)) or cause}"
        )
    if calibration is not None and not CALIBRATED[0] <= calibration <= CALIBRATED[1]:
        other_rate = (
            "positives are rarer or more frequent there than in training, as where negatives are sampled in "
            f"training alone, or days differ; else {by_heart or 'a learning rate that is too large'}"
        )
        warnings.append(
            f"{calibration:.2f} times as many positives are predicted on validation as there are. "
            f"Likely: {few or other_rate}"
        )
    return warnings


def telling_columns(singles: Mapping[str, float], split: str) -> Iterator[str]:
    """Yields the texts of warnings of columns that predict the label by themselves."""
    for name, area in singles.items():
        if area > TELLING:
            yield (
                f"column {name!r} alone predicts the label (AUC {area:.4f} on {split}). Most likely it is written "
                "when the label is known. If rows to be scored lack it, leave it out of the feature spec"
            )


def too_good(auc: float | None, singles: Mapping[str, float]) -> str | None:
    """Returns the text of a warning if a model's AUC is too good to be true, else None. `singles` has the best column
    first."""
    if auc is None or auc < TOO_GOOD:
        return None
    best = next(
        (f": the column {name!r} alone has an AUC of {area:.4f}" for name, area in singles.items()),
        "",
    )
    return (
        f"AUC {auc:.5f} on test is nearly perfect. Most likely a feature holds the label{best}. Check that rows to "
        "be scored have the same features"
    )


def _causes(findings: Findings, lr: float, by_heart: str | None) -> list[str]:
    """Returns the causes that the findings point at, the surest first."""
    causes = []
    ne, constant = findings.quality.ne, findings.constant
    if not all(math.isfinite(x) for x in (ne, findings.spread) if x is not None):
        causes.append(
            "predictions are no longer numbers: lower the learning rate, and fill missing dense features"
        )
    if findings.columns and len(constant) * 2 >= findings.columns:
        causes.append(
            f"{len(constant)} of {findings.columns} sparse columns have one id in all rows "
            f"({', '.join(constant[:3])}{' …' if len(constant) > 3 else ''}): the vocabulary does not fit the data"
        )
    if findings.largest_dense is not None and findings.largest_dense[1] > 1000:
        causes.append(
            f"dense column {findings.largest_dense[0]!r} reaches {findings.largest_dense[1]:g}: "
            'scale it in the feature spec (op "log")'
        )
    if findings.spread < 1e-3:
        causes.append(
            f"all predictions are the same (logits differ by {findings.spread:.1g}): the last layers' ReLUs "
            f"are dead, or the learning rate of {lr:g} is too small"
        )
    if by_heart:
        causes.append(by_heart)
    elif ne is not None and ne > 1.5:
        causes.append(
            f"the model is certain and wrong (NE {ne:.2f}): the learning rate of {lr:g} is too large"
        )
    return causes
