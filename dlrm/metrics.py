"""How good predictions are, exactly: AUC with ties, logloss, normalised entropy, calibration. Rows may have weights.

All are over the whole split, in float64, from logits: a sigmoid rounds many large logits to one value.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What an evaluation found. A value that the rows do not define is None."""

    auc: float | None
    """Chance that a positive row is ranked above a negative one, ties counted half. 0.5: no better than chance; 1: a
    perfect order. None: only one class was there."""
    ne: float | None
    """Logloss over that of always predicting the mean rate. 1: nothing learned; near 0: certain and right."""
    logloss: float
    """Mean −log of the probability given to what happened, in nats. ln 2: a coin; 0: certain and right."""
    calibration: float | None
    """Predicted over observed positives. 1: right on average; above: too many expected."""
    rows: int
    """Rows with a weight above 0."""

    def to_dict(self) -> dict[str, float | int | None]:
        return asdict(self)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.5f}"
                         for name, value in self.to_dict().items() if value is not None)


def auc(logits: Array, labels: Array, weights: Array) -> float | None:
    """Area under the curve of true over false positives: one sort; rows with equal logits form one step."""
    order = np.argsort(-logits, kind="stable")
    logits, positive = logits[order], (weights * labels)[order]
    negative = weights[order] - positive
    last = np.flatnonzero(np.append(logits[1:] != logits[:-1], True)) if len(logits) else np.zeros(0, np.int64)
    tp, fp = np.cumsum(positive)[last], np.cumsum(negative)[last]
    if not len(last) or tp[-1] <= 0 or fp[-1] <= 0:
        return None
    tp, fp = np.append(0.0, tp), np.append(0.0, fp)
    return float(np.sum(np.diff(fp) * (tp[1:] + tp[:-1])) / 2 / tp[-1] / fp[-1])


def quality(logits: npt.ArrayLike, labels: npt.ArrayLike, weights: npt.ArrayLike) -> Quality:
    """All of it for one split. Rows of weight 0 (padding) count nowhere."""
    logits, labels, weights = (np.asarray(a, dtype=np.float64) for a in (logits, labels, weights))
    kept = weights > 0
    logits, labels, weights = logits[kept], labels[kept], weights[kept]
    total = weights.sum()
    if not total:
        raise ValueError("an evaluation over no rows")
    # −log p(label), stable for large logits: log(1 + e^z) − y·z.
    logloss = float((weights * (np.logaddexp(0, logits) - labels * logits)).sum() / total)
    positives = float((weights * labels).sum())
    rate = positives / total
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)) if 0 < rate < 1 else 0.0
    expected = float((weights * np.exp(-np.logaddexp(0, -logits))).sum())
    return Quality(auc=auc(logits, labels, weights), ne=logloss / float(entropy) if entropy else None, logloss=logloss,
                   calibration=expected / positives if positives else None, rows=int(kept.sum()))
