"""The bytes that a rank sends to others for one global batch: `step_traffic`. It needs sizes alone, and no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sluice.dlrm.options import Table
from sluice.dlrm.sharding.shard_sizes import ModelPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """The bytes that the busiest rank sends for a batch, forwards and backwards."""

    pooled: float
    """The pooled vectors that it sends, forwards."""
    all_to_all: float
    """Ids to where their tables are, pooled vectors back, and their gradients the same way as the ids."""
    all_reduce: float
    """Its part in the mean of the gradients of dense layers and of tables with a copy on each rank."""

    @property
    def total(self) -> int:
        return round(self.all_to_all + self.all_reduce)


def step_traffic(
    placement: ModelPlacement,
    tables: Sequence[Table],
    *,
    batch: int,
    wire: str = "fp32",
    dense_parameters: int = 0,
    vectors: Mapping[str, int] | None = None,
) -> StepTraffic:
    """Returns what the busiest rank sends. `vectors` is the number of pooled vectors that a sample takes from each
    table, if it is not 1."""
    ranks = placement.ranks
    if ranks == 1:
        return StepTraffic(pooled=0.0, all_to_all=0.0, all_reduce=0.0)
    mine, away = batch / ranks, batch * (ranks - 1) / ranks
    element = 2 if wire == "fp16" else 4
    pooled = [0.0] * ranks
    gradients = 0.0
    ids = 0.0
    for place, table in zip(placement.places, tables, strict=True):
        if place.kind == "data":  # only its gradients travel, as those of the dense layers do
            dense_parameters += table.rows * table.width
            continue
        holders = [part for part in place.parts if part.rows]
        count = vectors[place.name] if vectors else 1
        for part in holders:
            pooled[part.rank] += away * count * part.width * element
        # Each id and each length has four bytes; by columns, each holder gets all of them.
        copies = len(holders) if place.kind == "column" else 1
        ids += mine * (ranks - 1) / ranks * 4 * (table.lookups * copies + count * len(holders))
        gradients += (
            sum(mine * count * part.width * element for part in holders) * (ranks - 1) / ranks
        )
    return StepTraffic(
        pooled=max(pooled),
        all_to_all=max(pooled) + gradients + ids,
        all_reduce=2 * dense_parameters * 4 * (ranks - 1) / ranks,
    )
