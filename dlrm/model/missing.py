"""Masks dense features that are not finite numbers, and counts them by column: `MissingNumbers`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class MissingNumbers:
    """Replaces values that are not finite by 0, the mean of a normalised column. Counts them over a run."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = tuple(columns)
        self._counts = torch.zeros(len(self._columns), dtype=torch.int64)

    def mask(self, dense: Tensor) -> Tensor:
        """Returns the batch [B, D] with these values masked, or the batch itself if it has none."""
        # One fast pass. A sum of finite numbers may overflow, so the values are checked if it is not finite.
        if torch.isfinite(dense.sum()):
            return dense
        wrong = ~torch.isfinite(dense)
        self._counts += wrong.sum(0).cpu()
        return dense.masked_fill(wrong, 0.0)

    @property
    def counts(self) -> dict[str, int]:
        """The number of masked values so far, for each column that had any."""
        return {name: n for name, n in zip(self._columns, self._counts.tolist(), strict=True) if n}
