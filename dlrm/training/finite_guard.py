"""Checks that the loss of every step is finite: `FiniteGuard`. It explains one that is not by the largest inputs and
the learning rates."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sluice.common.errors import UsageError
from sluice.dlrm.options import Config
from sluice.dlrm.ranks import Ranks
from sluice.dlrm.staging import fetch
from sluice.dlrm.training.input_checks import EXTREME, BatchChecker
from sluice.ingest.batch import Batch

_MOST_SKIPS_IN_A_ROW = 10
"""The most batches that are skipped one after the other. More are a sign that the weights are not finite."""
_MOST_COLUMNS = 3


class NotANumber(UsageError):
    """A loss is not finite. The message says why, as far as it is known."""


@dataclass(eq=False)
class FiniteGuard:
    """Checks each loss of its rank. Except `watch`, all ranks must call its methods together."""

    config: Config
    world: Ranks
    checker: BatchChecker
    warn: Callable[[int, str], None]
    """Gets the step and the text of a warning."""

    def __post_init__(self) -> None:
        self.skips = self.config.on_nonfinite == "skip"
        self._watched: deque[tuple[int, tuple[int, int], Tensor, Callable[[], bool]]] = deque()
        """Step, batch, the loss, and whether it has arrived."""
        self._failed: tuple[int, tuple[int, int], str] | None = None
        self._skips_in_a_row = 0

    def watch(self, step: int, batch: Batch, loss: Tensor | None) -> None:
        """Takes the loss of a finished step. A loss on a GPU is copied in the background, so no step waits."""
        if loss is not None:
            self._watched.append((step, (batch.epoch, batch.step), *fetch(loss)))

    def has_failed(self) -> bool:
        """Whether a loss that has arrived on this rank is not finite."""
        while self._failed is None and self._watched and self._watched[0][3]():
            step, batch, loss, _ = self._watched.popleft()
            if not math.isfinite(loss.item()):
                self._failed = step, batch, f"the loss is {loss.item()} at step {step}"
        return self._failed is not None

    def end(self) -> None:
        """Raises NotANumber for the first loss of any rank that is not finite."""
        self.has_failed()  # checks the losses that have arrived since the last call
        _, batch, what = min(
            tuple(failure)
            for failure in self.world.gather_objects(self._failed)
            if failure is not None
        )
        raise self.error(what, batch)

    def admits(self, step: int, batch: tuple[int, int], loss: Tensor) -> bool:
        """Whether the loss of every rank is finite. If not, all ranks skip this step, before a backward pass updates a
        table. The ranks wait for each other here."""
        failed = not math.isfinite(loss.item())
        if self.world.ranks > 1:
            failed = bool(self.world.sum(torch.tensor([int(failed)])))
        self._skips_in_a_row = self._skips_in_a_row + 1 if failed else 0
        if self._skips_in_a_row > _MOST_SKIPS_IN_A_ROW:
            raise self.error(
                f"the loss is no number for {self._skips_in_a_row} batches in a row, up to step {step}",
                batch,
            )
        if failed:
            self.warn(
                step, self._explain(f"step {step} is left out, as its loss is no number", batch)
            )
        return not failed

    def error(self, what: str, batch: Any = None) -> NotANumber:
        """Returns the error that ends training on all ranks, with the likely cause. `batch`: the epoch and step of the
        batch."""
        return NotANumber(
            f"{self._explain(what, batch)}; --resume goes on from the newest checkpoint"
        )

    def _explain(self, what: str, batch: Any) -> str:
        ranks = self.world.gather_objects((self.checker.extremes(), self.checker.largest()))
        optim = self.config.optim
        rates = f"--lr {optim.lr:g} and --dense-lr {optim.dense_lr:g}"
        extremes = [extreme for of_rank, _ in ranks for extreme in of_rank]
        extremes = [
            extreme for extreme in extremes if batch is None or extreme["batch"] == list(batch)
        ] or extremes
        if extremes:
            worst = max(extremes, key=lambda extreme: abs(extreme["value"]))
            skip = "" if self.skips else ", or leave such batches out by --on-nonfinite skip"
            cause = f"column {worst['column']!r} holds {worst['value']:g}"
            return (
                f"{what}. Likely: {cause} ({worst['where']}): clip it or "
                f"take its logarithm in the feature spec, remove the row{skip}; if it is meant so, lower {rates}"
            )
        largest: dict[str, float] = {}
        for _, of_rank in ranks:
            for name, value in of_rank.items():
                largest[name] = max(value, largest.get(name, 0.0))
        shown = sorted(largest.items(), key=lambda pair: -pair[1])[:_MOST_COLUMNS]
        columns = ", ".join(f"{name!r} {value:g}" for name, value in shown)
        return (
            f"{what}. No input is beyond {EXTREME:g}; the largest are {columns}. Likely: a learning rate that is "
            f"too large: try a tenth of {rates}, or a --dense-schedule with a warmup"
        )
