"""A model looked at over a whole split: how good it is, also by slices, and what would explain it if it is no good."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from dlrm.guard import Guard
from dlrm.metrics import Quality, quality
from dlrm.symptoms import Evidence
from dlrm.world import World

if TYPE_CHECKING:
    from dlrm.build import Parts

SLICES = 8  # the most frequent ids of a column get a figure of their own


class Feed(Protocol):
    """What an evaluation needs of a loader."""

    def __iter__(self) -> Any: ...

    @property
    def dense_names(self) -> Sequence[str]: ...

    @property
    def sparse_names(self) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Of one split, the same on every rank."""

    quality: Quality
    slices: Mapping[str, Mapping[int, Quality]]
    """Column → id → its rows alone, for the column's most frequent ids, the most frequent first."""
    positives: int
    spread: float
    """Standard deviation of the logits."""
    largest_dense: tuple[str, float]
    constant: tuple[str, ...]
    """Sparse columns with one id in all rows."""

    def evidence(self, step: int, columns: int, lr: float) -> Evidence:
        return Evidence(step=step, rows=self.quality.rows, positives=self.positives, auc=self.quality.auc,
                        ne=self.quality.ne, spread=self.spread, largest_dense=self.largest_dense,
                        constant=self.constant, columns=columns, lr=lr)


@torch.no_grad()
def evaluate(parts: Parts, feed: Feed, guard: Guard, world: World, *, slices: Sequence[str] = ()) -> Findings:
    """Over everything the feed brings, on all ranks; rows of weight 0 count nowhere."""
    names = list(feed.sparse_names)
    places = [names.index(name) for name in slices]
    seen = []
    largest = torch.zeros(len(feed.dense_names))
    low, high = torch.full((len(names),), 2**31 - 1), torch.full((len(names),), -1)
    for batch in feed:
        guard.check(batch)
        logits = parts.model(*parts.layout.features(batch, world.device)).cpu()
        kept = batch.weight > 0
        if not bool(kept.any()):
            continue
        largest = torch.maximum(largest, batch.dense[kept].nan_to_num(0, 0, 0).abs().amax(0))
        counts = batch.lengths.view(len(names), -1).sum(1, dtype=torch.int64).tolist()
        ids = [part[kept] if len(part) == len(kept) else part for part in torch.split(batch.values, counts)]
        for i, part in enumerate(ids):
            if len(part):
                low[i], high[i] = torch.minimum(low[i], part.min()), torch.maximum(high[i], part.max())
        # Copies: the loader may use a batch's memory again. float64 holds any id.
        seen.append(torch.stack([t.double() for t in (logits[kept], batch.label[kept], batch.weight[kept],
                                                      *(ids[i] for i in places))]))
    mine = torch.cat(seen, dim=1) if seen else torch.zeros(3 + len(places), 0, dtype=torch.float64)
    table = np.concatenate(world.gather_objects(mine.numpy()), axis=1)
    extremes = world.gather_objects((largest, low, high))
    largest = torch.stack([e[0] for e in extremes]).amax(0)
    low, high = torch.stack([e[1] for e in extremes]).amin(0), torch.stack([e[2] for e in extremes]).amax(0)
    top = int(largest.argmax())
    return Findings(
        quality=quality(*table[:3]), slices={name: _by_id(table, 3 + i) for i, name in enumerate(slices)},
        positives=int(table[1].sum()), spread=float(table[0].std()),
        largest_dense=(feed.dense_names[top], float(largest[top])),
        constant=tuple(n for n, a, b in zip(names, low.tolist(), high.tolist(), strict=True) if a == b))


def _by_id(table: Any, row: int) -> dict[int, Quality]:
    ids, counts = np.unique(table[row], return_counts=True)
    frequent = ids[np.argsort(-counts, kind="stable")][:SLICES]
    return {int(i): quality(*table[:3, table[row] == i]) for i in frequent}
