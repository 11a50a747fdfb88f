"""Weights the ids of a bag in its column's vector: `BagWeighting` makes weights from the bags' lengths."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.dlrm.options import ConfigError
from sluice.ingest.knobs import nearest

KINDS = ("sum", "mean", "sqrt", "decay")


@dataclass(frozen=True, slots=True, kw_only=True)
class BagWeighting:
    """How the ids of a bag are weighted. `sum`: 1 each. `mean`: each of n ids gets 1 / n. `sqrt`: 1 / √n, which keeps
    the length of the sum of n different vectors. `decay`: the last id gets 1, the one before it `rate`, then rate², …,
    for bags whose newest id comes last."""

    kind: str
    rate: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"bags: {self.kind!r}{nearest(self.kind, KINDS)}")
        if not 0 < self.rate <= 1:
            raise ConfigError(f"bags: a decay of {self.rate!r} is not above 0 and at most 1")

    @classmethod
    def read(cls, text: str) -> BagWeighting:
        """Reads `sum`, `mean`, `sqrt`, or `decay:RATE`."""
        kind, _, rate = text.partition(":")
        if bool(rate) != (kind == "decay"):
            raise ConfigError(f"bags: {text!r}: write sum, mean, sqrt or decay:RATE")
        try:
            return cls(kind=kind, rate=float(rate or 1))
        except ValueError as error:
            raise (
                error
                if isinstance(error, ConfigError)
                else ConfigError(f"bags: {text!r}: {rate!r} is no number")
            ) from None

    def weights(self, lengths: Tensor) -> Tensor:
        """Returns the weight of each id, for bags of these lengths, one after the other."""
        count = int(lengths.sum())
        lengths = lengths.long()
        if self.kind == "sum":
            return torch.ones(count)
        if self.kind == "decay":
            ends = lengths.cumsum(0)
            age = torch.repeat_interleave(ends - 1, lengths, output_size=count) - torch.arange(
                count
            )
            return torch.pow(torch.tensor(self.rate), age)
        each = 1 / lengths.clamp(min=1).float()
        return torch.repeat_interleave(
            each if self.kind == "mean" else each.sqrt(), lengths, output_size=count
        )
