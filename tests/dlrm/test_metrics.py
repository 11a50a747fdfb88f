import math
from dataclasses import replace

import numpy as np
import pytest

from sluice.dlrm.evaluation.metrics import Binned, Quality, auc, quality
from tests.raises import raises


def plain_auc(logits, labels, weights):
    """Every pair of a positive and a negative row."""
    won = total = 0.0
    for z, y, w in zip(logits, labels, weights, strict=True):
        for other, label, weight in zip(logits, labels, weights, strict=True):
            if y == 1 and label == 0:
                total += w * weight
                won += w * weight * (1.0 if z > other else 0.5 if z == other else 0.0)
    return won / total if total else None


@pytest.mark.parametrize("seed", range(20))
def test_auc_equals_all_pairs_also_with_ties_and_weights(seed):
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(2, 60))
    logits = rng.integers(0, rng.integers(2, 12), rows).astype(float)
    labels = rng.integers(0, 2, rows).astype(float)
    weights = rng.integers(0, 3, rows).astype(float) if seed % 2 else np.ones(rows)
    expected = plain_auc(logits, labels, weights)
    area = auc(logits, labels, weights)
    assert area == (None if expected is None else pytest.approx(expected, abs=1e-12))


def test_auc_tells_logits_apart_that_a_sigmoid_rounds_to_one():
    assert auc(np.array([50.0, 60.0]), np.array([0.0, 1.0]), np.ones(2)) == 1.0


def test_logloss_ne_and_calibration_against_their_definitions():
    rng = np.random.default_rng(1)
    logits, labels, weights = (
        rng.normal(size=200),
        rng.integers(0, 2, 200).astype(float),
        rng.random(200),
    )
    p = [1 / (1 + math.exp(-z)) for z in logits]
    total = sum(weights)
    given = [q if y else 1 - q for q, y in zip(p, labels, strict=True)]
    logloss = -sum(w * math.log(q) for w, q in zip(weights, given, strict=True)) / total
    rate = sum(w * y for w, y in zip(weights, labels, strict=True)) / total
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    judged = quality(logits, labels, weights)
    assert judged.logloss == pytest.approx(logloss)
    assert judged.ne == pytest.approx(logloss / entropy)
    assert judged.calibration == pytest.approx(
        sum(w * q for w, q in zip(weights, p, strict=True)) / (rate * total)
    )
    assert judged.rows == 200


def test_one_class_has_no_auc_and_no_ne_and_large_logits_stay_finite():
    judged = quality(np.array([-800.0, 800.0]), np.zeros(2), np.ones(2))
    assert (judged.auc, judged.ne, judged.calibration) == (None, None, None)
    assert judged.logloss == pytest.approx(400)


def test_no_rows_is_an_error():
    with raises(ValueError, "no rows"):
        quality(np.ones(1), np.ones(1), np.zeros(1))


def test_bins_of_parts_are_those_of_the_whole_and_near_the_exact_figures():
    rng = np.random.default_rng(2)
    logits, weights = rng.normal(0, 3, 20_000), rng.random(20_000)
    labels = (rng.random(20_000) < 1 / (1 + np.exp(-logits))).astype(float)
    logits[:2] = 500.0, -500.0
    whole, left, right = Binned(), Binned(), Binned()
    whole.add(logits, labels, weights)
    left.add(logits[:7000], labels[:7000], weights[:7000])
    right.add(logits[7000:], labels[7000:], weights[7000:])
    exact, rough = quality(logits, labels, weights), whole.quality
    assert rough.auc == pytest.approx(exact.auc, abs=1e-5)
    assert replace(rough, auc=exact.auc) == exact
    both = Binned(left.numbers + right.numbers).quality
    assert (both.auc, both.logloss) == pytest.approx((rough.auc, rough.logloss), rel=1e-12)


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_nothing_is_known_of_predictions_of_which_one_is_no_number(logit, label):
    rows = np.array([0.5, logit, -1.0]), np.array([1.0, label, 0.0]), np.ones(3)
    binned = Binned()
    binned.add(*rows)
    for judged in (quality(*rows), binned.quality):
        assert judged == Quality(auc=None, ne=None, logloss=None, calibration=None, rows=3)
    ignored = quality(rows[0], rows[1], np.array([1.0, 0.0, 1.0]))
    assert ignored.auc == 1.0
