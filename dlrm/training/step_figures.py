"""Counts what steps took, and sums it over all ranks: `StepFigures`. `late_rank` and `slow_rank` name a rank that the
others wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from sluice.dlrm.ranks import Ranks
from sluice.dlrm.training.synced_batches import TrainingStep
from sluice.ingest.machine import Machine

_LATE_SHARE = 0.1
"""A rank is late or slow if the others wait for it for more than this share of their time."""


class StepFigures:
    """The figures of a run's steps, summed over all ranks by each `sum_up`."""

    def __init__(
        self,
        world: Ranks,
        hosts: Sequence[str] = (),
        memory_used: Callable[[], int] | None = None,
    ) -> None:
        """`hosts`: the name of each rank's host. `memory_used` returns the bytes that this rank uses."""
        self._world, self._hosts = world, hosts
        self._memory_used = memory_used or Machine().memory_used
        self.peak_bytes = 0
        """The most memory that this rank was seen to use."""
        self.rows = 0.0
        self.wait_s = 0.0
        """The time in the loader's `next()` alone."""
        self.compute_s = 0.0
        """The time in steps: forward, backward, the optimisers, and waiting for other ranks."""
        self.first_batch_s: float | None = None
        """This rank's wait for the first batch, while the pipeline fills. The stall does not include it."""
        self.begin()

    @property
    def stall(self) -> float:
        return _stall(self.wait_s, self.compute_s)

    @property
    def samples_per_s(self) -> float:
        return self._rate(self.rows, self.wait_s + self.compute_s)

    def begin(self) -> None:
        """Forgets what this rank has counted since the last sum."""
        # The sum of loss times rows. It stays on its device, so that no step waits for it.
        self._loss = torch.zeros((), dtype=torch.float64, device=self._world.device)
        self._own = [0.0] * 5

    def count(self, step: TrainingStep, step_s: float, own_s: float) -> None:
        """Counts a step that took `step_s` seconds, with its wait. In `own_s` of them, this rank computed or waited for
        a core. The wait for the first batch counts neither as waiting nor as computing."""
        wait_s, rows = step.wait_s, 0
        if self.first_batch_s is None:
            self.first_batch_s = wait_s
            step_s -= wait_s
            wait_s = 0.0
        if step.loss is not None:
            self._loss.add_(step.loss, alpha=step.rows / self._world.ranks)
            rows = step.batch.rows
        counted = rows, wait_s, step_s - wait_s, step.others_s, own_s
        self._own = [before + more for before, more in zip(self._own, counted, strict=True)]

    def sum_up(self) -> dict[str, Any]:
        """Returns the loss and the rate of all ranks since the last sum, and the rank that the others wait for. All
        ranks call it. Empty: all batches were skipped. The loss is NaN if one of a rank is."""
        self.peak_bytes = max(self.peak_bytes, self._memory_used())
        ranks = self._world.gather_objects([self._loss.item(), *self._own])
        losses, rows_of, wait, compute, others, own = zip(*ranks, strict=True)
        rows, wait_s, compute_s = sum(rows_of), sum(wait), sum(compute)
        self.begin()
        self.rows += rows
        self.wait_s += wait_s
        self.compute_s += compute_s
        if not rows:
            return {}
        return {
            "loss": sum(losses) / rows,
            "samples_per_s": self._rate(rows, wait_s + compute_s),
            "stall": _stall(wait_s, compute_s),
            **late_rank((wait, compute, others), self._hosts),
            **slow_rank(own, (wait_s + compute_s) / self._world.ranks, self._hosts),
        }

    def _rate(self, rows: float, seconds: float) -> float:
        """Returns rows a second. `seconds` are those of all ranks together."""
        return rows * self._world.ranks / seconds if seconds else 0.0


def _stall(wait_s: float, compute_s: float) -> float:
    total = wait_s + compute_s
    return wait_s / total if total else 0.0


def late_rank(seconds: Sequence[Sequence[float]], hosts: Sequence[str]) -> dict[str, Any]:
    """Returns the rank that the others wait for, with their mean share of waiting and its own share of waiting for
    input. Empty if no rank makes the others wait for long.

    `seconds` holds three lists of each rank's time: for input, in steps, and within steps for other ranks."""
    wait_s, compute_s, others_s = seconds
    totals = [max(wait + compute, 1e-9) for wait, compute in zip(wait_s, compute_s, strict=True)]
    shares = [waited / total for waited, total in zip(others_s, totals, strict=True)]
    rank = min(range(len(shares)), key=shares.__getitem__)
    others = sum(share - shares[rank] for share in shares) / max(1, len(shares) - 1)
    if others <= _LATE_SHARE:
        return {}
    return {
        "late": {
            "rank": rank,
            "host": hosts[rank] if hosts else "",
            "others": others,
            "input": wait_s[rank] / totals[rank],
        }
    }


def slow_rank(own_s: Sequence[float], seconds: float, hosts: Sequence[str]) -> dict[str, Any]:
    """Returns the rank that computes for longest, and how many times as long as the median of the others. Empty if the
    difference is a small share of the `seconds` that the steps took.

    `own_s` has each rank's time without waiting for other ranks."""
    rank = max(range(len(own_s)), key=own_s.__getitem__)
    usual_s = median([*own_s[:rank], *own_s[rank + 1 :]] or own_s)
    if own_s[rank] - usual_s <= _LATE_SHARE * seconds:
        return {}
    times = own_s[rank] / max(usual_s, 1e-9)
    return {"slow": {"rank": rank, "host": hosts[rank] if hosts else "", "times": times}}
