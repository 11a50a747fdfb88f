"""A model at chance is noticed and explained; one that learns is left alone."""

import itertools
import math
import statistics
from types import SimpleNamespace

import pytest
import torch

from sluice.dlrm.evaluation.diagnosis import (
    bad_predictions,
    chance,
    falling,
    learned_by_heart,
    stuck,
)
from sluice.dlrm.evaluation.split import Findings
from sluice.dlrm.model.ranker import first_bias
from tests.product import Quality
from tests.raises import assert_names


def judged(*, rows=100_000, auc=0.5003, ne=None, calibration=None, **change) -> Findings:
    """Of a model at chance."""
    logloss = None if ne is None else 0.5 * ne
    quality = Quality(auc=auc, ne=ne, logloss=logloss, calibration=calibration, rows=rows)
    others = {"positives": 25_000, "spread": 1.0, "largest_dense": None, "columns": 6}
    return Findings(quality=quality, **{"constant": (), **others, **change})


def said(*, step=1000, after=0, lr=0.05, **change) -> str | None:
    return stuck(judged(**change), step=step, lr=lr, after=after)


def test_chance_is_four_standard_deviations_of_the_auc_over_all_orders():
    places = itertools.combinations(range(5), 2)  # of two positives among three negatives
    aucs = [(sum(ranks) - 1) / (2 * 3) for ranks in places]
    assert chance(5, 2) == pytest.approx(4 * statistics.pstdev(aucs))
    assert chance(5, 0) == chance(5, 5) == 0.5


def test_a_model_that_learns_gets_no_warning():
    assert said(auc=0.78) is None


def test_no_warning_before_the_model_could_have_learned():
    assert said(step=999, after=1000) is None
    assert said(after=1000) is not None


def test_few_rows_are_no_proof_of_learning():
    """100 rows with 5 positives: an AUC of 0.6 is well within chance."""
    assert "chance" in said(rows=100, positives=5, auc=0.6)
    assert said(rows=100_000, positives=5_000, auc=0.6) is None


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"auc": None, "positives": 0}, [100000, "label 0"]),
        ({"auc": None, "positives": 100_000}, ["label 1"]),
        ({"auc": 0.31}, ["below chance"]),
        ({"ne": math.nan}, ["no longer numbers"]),
        (
            {"constant": ("C1", "C2", "C3", "C4")},
            ["4 of 6 sparse columns", "C1, C2, C3 …"],
        ),
        ({"largest_dense": ("I3", 65535.0)}, ["'I3'", 65535]),
        ({"spread": 0.0, "lr": 1e-6}, ["the same", "1e-06", "too small"]),
        ({"ne": 4.2, "lr": 15.0}, ["NE 4.20", "15 is too large"]),
        ({}, ["a tenth and ten times"]),
    ],
)
def test_the_likely_cause_is_named(change, facts):
    text = said(**change)
    assert text is not None
    assert_names(text, *facts)


def warned(*, step=1000, steps_per_epoch=999, **change) -> list[str]:
    good = {"auc": 0.78, "ne": 0.9, "calibration": 1.02, **change}
    return bad_predictions(judged(**good), step=step, lr=0.05, steps_per_epoch=steps_per_epoch)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"ne": 1.0, "calibration": 0.5}, []),
        ({"calibration": 2.0}, []),
        ({"ne": 1.01}, [["NE 1.010", "validation", "learned by heart"]]),
        ({"ne": 1.01, "step": 199}, [["199 steps", "--batch-size"]]),
        ({"ne": math.nan}, [["no longer numbers"]]),
        ({"ne": 1.2, "largest_dense": ("I3", 65535.0)}, [["'I3'", 65535]]),
        ({"calibration": 0.49}, [["0.49 times", "negatives are sampled"]]),
        ({"ne": 1.7, "calibration": 2.01, "step": 3}, [["3 steps"], ["2.01 times", "3 steps"]]),
    ],
)
def test_predictions_that_are_off_are_named_with_a_likely_cause(change, expected):
    for text, facts in zip(warned(**change), expected, strict=True):
        assert_names(text, *facts)


def test_no_advice_on_epochs_when_no_row_was_trained_twice():
    (text,) = warned(ne=1.01, steps_per_epoch=1000)
    assert_names(text, "a third of --lr")
    assert "by heart" not in text
    assert "--epochs" not in text


@pytest.mark.parametrize(
    ("epochs", "training_loss", "is_told"),
    [(36.0, 0.04, True), (36.0, 1.0, False), (1.0, 0.04, False), (36.0, None, False)],
)
def test_rows_that_are_learned_by_heart_are_told_by_the_losses(epochs, training_loss, is_told):
    """Not by the learning rate, which the same figures would blame within the first epoch."""
    findings = judged(ne=2.4, calibration=2.5)
    text = learned_by_heart(findings, epochs=epochs, training_loss=training_loss)
    assert bool(text) == is_told
    useless = stuck(findings, step=1000, lr=0.05, after=0, by_heart=text)
    trained = bad_predictions(findings, step=1000, lr=0.05, steps_per_epoch=30, by_heart=text)
    for warning in (useless, *trained):
        assert warning is not None
        if is_told:
            assert_names(warning, "0.040 on training rows", "1.200 on these", "36.0 epochs")
        assert ("learning rate" in warning) is not is_told


@pytest.mark.parametrize(
    ("aucs", "noise", "falls"),
    [
        ({5: 0.7}, 0, False),
        ({5: 0.7, 10: 0.69}, 0, True),
        ({6: 0.7, 10: 0.69}, 0, False),
        ({5: 0.7, 10: 0.71}, 0, False),
        ({5: 0.7, 10: 0.699}, 0, False),
        ({5: 0.7, 10: 0.69}, 0.02, False),
    ],
)
def test_a_third_of_an_epoch_below_the_best_by_more_than_noise_is_a_fall(aucs, noise, falls):
    assert bool(falling(aucs, 15, noise)) == falls


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_first_batch_of_one_label_gives_a_finite_bias(rate):
    bias = torch.zeros(1)
    first_bias(SimpleNamespace(named_parameters=lambda: [("tower.over.1.bias", bias)]), rate)
    assert bias.isfinite()
