"""Counts dense features that are not finite numbers, by column, and masks them, if a run is set to do so."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class MissingNumbers:
    """Counts over a run. A value that is not a finite number becomes 0, which is the middle of a normalised column."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = tuple(columns)
        self._counts = torch.zeros(len(self._columns), dtype=torch.int64)

    def mask(self, dense: Tensor) -> Tensor:
        """The batch [B, D] with those values masked; the batch itself if it has none."""
        if bool(
            torch.isfinite(dense.sum())
        ):  # one fast pass; a sum of finite numbers may overflow, so look then
            return dense
        wrong = ~torch.isfinite(dense)
        self._counts += wrong.sum(0).cpu()
        return dense.masked_fill(wrong, 0.0)

    @property
    def counts(self) -> dict[str, int]:
        """Column → values masked so far, for columns that had any."""
        return {name: n for name, n in zip(self._columns, self._counts.tolist(), strict=True) if n}
