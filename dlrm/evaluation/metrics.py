"""Measures how good predictions are: AUC with ties, logloss, normalised entropy, calibration. Rows may have weights.

All are over the whole split, in float64, from logits: a sigmoid rounds many large logits to one value.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_BINS, _EDGE = 2**18, 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What an evaluation found. A value that the rows do not define is None; all are, if a prediction is no number."""

    auc: float | None
    """The chance that a positive row is ranked above a negative one, ties counted half. 0.5: no better than chance; 1:
    a perfect order. None: only one class was there."""
    ne: float | None
    """The logloss over that of always predicting the mean rate. 1: nothing learned; near 0: certain and right."""
    logloss: float | None
    """The mean −log of the probability given to what happened, in nats. ln 2: as a coin; 0: certain and right."""
    calibration: float | None
    """Predicted over observed positives. 1: right on average; more: too many positives were expected."""
    rows: int
    """Rows with a weight above 0."""

    def to_dict(self) -> dict[str, float | int | None]:
        return asdict(self)

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.5f}"
            for name, value in self.to_dict().items()
            if value is not None
        )


def auc(logits: Array, labels: Array, weights: Array) -> float | None:
    """Area under the curve of true over false positives: one sort; rows with equal logits form one step."""
    order = np.argsort(-logits, kind="stable")
    logits, positive = logits[order], (weights * labels)[order]
    negative = weights[order] - positive
    last = (
        np.flatnonzero(np.append(logits[1:] != logits[:-1], True))
        if len(logits)
        else np.zeros(0, np.int64)
    )
    tp, fp = np.cumsum(positive)[last], np.cumsum(negative)[last]
    if not len(last) or tp[-1] <= 0 or fp[-1] <= 0:
        return None
    tp, fp = np.append(0.0, tp), np.append(0.0, fp)
    return float(np.sum(np.diff(fp) * (tp[1:] + tp[:-1])) / 2 / tp[-1] / fp[-1])


def quality(logits: Array, labels: Array, weights: Array) -> Quality:
    """Returns all measures for one split. Rows of weight 0 (padding) count nowhere."""
    real = weights > 0
    logits, labels, weights = logits[real], labels[real], weights[real]
    return _quality(auc(logits, labels, weights), _sums(logits, labels, weights))


class Binned:
    """Does what `quality` does, but keeps no rows: sums are exact, the AUC is that of logits rounded to bins.

    Bins are 1.5e-4 wide from -20 to 20; two rows in one bin count as a tie."""

    def __init__(self, numbers: Array | None = None) -> None:
        """`numbers` are the sum of those of several ranks."""
        self.numbers: Array = np.zeros(2 * _BINS + 5) if numbers is None else numbers
        """The weights of negative rows and then of positive rows in each bin, and the sums over all rows."""

    def add(self, logits: Array, labels: Array, weights: Array) -> None:
        within = np.nan_to_num(np.clip(logits, -_EDGE, _EDGE))
        place = np.minimum((within + _EDGE) * (_BINS / (2 * _EDGE)), _BINS - 1).astype(np.int64)
        self.numbers[:_BINS] += np.bincount(place, weights * (1 - labels), _BINS)
        self.numbers[_BINS:-5] += np.bincount(place, weights * labels, _BINS)
        self.numbers[-5:] += _sums(logits, labels, weights)

    @property
    def quality(self) -> Quality:
        bins = np.arange(_BINS, dtype=np.float64)
        area = auc(np.concatenate([bins, bins]), np.repeat([0.0, 1.0], _BINS), self.numbers[:-5])
        return _quality(area, self.numbers[-5:])


def _sums(logits: Array, labels: Array, weights: Array) -> Array:
    """Returns the sums of loss, expected positives, positives, weights, and rows."""
    # −log p(label), stable for large logits: log(1 + e^z) − y·z.
    # A logit that is not a number makes the sums NaN, as it should.
    with np.errstate(invalid="ignore"):
        loss = (weights * (np.logaddexp(0, logits) - labels * logits)).sum()
        expected = (weights * np.exp(-np.logaddexp(0, -logits))).sum()
    return np.array([loss, expected, (weights * labels).sum(), weights.sum(), (weights > 0).sum()])


def _quality(area: float | None, sums: Array) -> Quality:
    loss, expected, positives, total, rows = sums.tolist()
    if not total:
        raise ValueError("an evaluation over no rows")
    logloss, rate = loss / total, positives / total
    if not math.isfinite(logloss):
        return Quality(auc=None, ne=None, logloss=None, calibration=None, rows=int(rows))
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate)) if 0 < rate < 1 else 0.0
    return Quality(
        auc=area,
        ne=logloss / entropy if entropy else None,
        logloss=logloss,
        calibration=expected / positives if positives else None,
        rows=int(rows),
    )
