"""The training loop: batches in, weights out. All that it works with is handed in; it makes none of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper

from dlrm import checkpoint
from dlrm.config import Config
from dlrm.guard import Guard
from dlrm.meta import Meta
from dlrm.metrics import Quality, quality
from dlrm.model import features, loss_of
from dlrm.world import World

if TYPE_CHECKING:
    from ingest.batch import Batch


class Feed(Protocol):
    """What training needs of a loader."""

    def __iter__(self) -> Any: ...

    def __len__(self) -> int: ...

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is; its "epoch" is the number of epochs that are finished."""


class NotANumber(RuntimeError):
    """The loss is no number any more: going on would only spoil the last checkpoint."""


@dataclass(slots=True)
class Timing:
    """Where the trainer's time went, over all its ranks."""

    rows: float = 0.0
    wait_s: float = 0.0
    """In the loader's raw `next()`, nothing else."""
    compute_s: float = 0.0
    """In the step: forward, backward, both optimisers, and waiting for other ranks."""
    seconds: float = 0.0
    """Mean over ranks of both."""

    def add(self, rows: float, wait_s: float, compute_s: float, ranks: int) -> None:
        self.rows += rows
        self.wait_s += wait_s
        self.compute_s += compute_s
        self.seconds += (wait_s + compute_s) / ranks

    @property
    def stall(self) -> float:
        total = self.wait_s + self.compute_s
        return self.wait_s / total if total else 0.0

    @property
    def samples_per_s(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a call of `train` came to."""

    meta: Meta
    timing: Timing
    first_batch_s: float
    """Wait for the first batch, which the stall leaves out: the pipeline fills then."""
    stopped: bool
    """Ended early, because it was asked to."""


class Trainer:
    """Trains a sharded model on a feed. Ranks meet in each step's collectives and agree every `log_every` steps."""

    def __init__(self, *, config: Config, world: World, model: Any, dense: KeyedOptimizerWrapper, guard: Guard,
                 names: list[str], checkpoints: Path, record: Callable[[dict[str, Any]], None],
                 observe: Callable[[dict[str, Any]], None], asked_to_stop: Callable[[], bool],
                 clock: Callable[[], float] = time.perf_counter) -> None:
        self._config, self._world, self._model, self._dense = config, world, model, dense
        self._guard, self._names, self._checkpoints = guard, names, checkpoints
        self._record, self._observe, self._asked_to_stop, self._clock = record, observe, asked_to_stop, clock

    def train(self, feed: Feed, meta: Meta, after_epoch: Callable[[Meta], None]) -> Outcome:
        """All epochs that `meta` leaves, with a checkpoint after each; `after_epoch` evaluates."""
        timing, stopped, saved_at = Timing(), False, meta.step
        first_batch_s: float | None = None
        while meta.epoch < self._config.epochs and not stopped:
            mine = torch.zeros(5, dtype=torch.float64)  # loss·rows, rows, wait, compute, asked to stop
            loss = torch.zeros((), dtype=torch.float64, device=self._world.device)  # summed where it is: no wait a step
            batches = iter(feed)
            while True:
                before = self._clock()
                batch: Batch | None = next(batches, None)  # the raw next(): what is timed here is only the loader
                got = self._clock()
                if batch is None:
                    break
                if first_batch_s is None:
                    first_batch_s, before = got - before, got
                self._guard.check(batch)
                loss += self._step(batch) * batch.rows
                meta = replace(meta, step=meta.step + 1, rows=meta.rows + self._config.batch_size)
                mine[1] += batch.rows
                mine[2] += got - before
                mine[3] += self._clock() - got
                if meta.step % self._config.log_every == 0:
                    mine[0] = loss.item()
                    stopped = self._agree(mine, meta, timing)
                    mine.zero_()
                    loss.zero_()
                saving = self._config.save_every and meta.step % self._config.save_every == 0
                if stopped or saving:
                    meta = self._save(meta, feed)
                    saved_at = meta.step
                if stopped:
                    return Outcome(meta=meta, timing=timing, first_batch_s=first_batch_s or 0.0, stopped=True)
            if meta.step % self._config.log_every:
                mine[0] = loss.item()
                stopped = self._agree(mine, meta, timing)
            if meta.step != saved_at:
                meta = self._save(meta, feed)
            if not stopped:
                after_epoch(meta)
        return Outcome(meta=meta, timing=timing, first_batch_s=first_batch_s or 0.0, stopped=stopped)

    def _step(self, batch: Batch) -> torch.Tensor:
        device = self._world.device
        dense, sparse = features(batch, self._names, device)
        self._dense.zero_grad()
        loss = loss_of(self._model(dense, sparse), batch.label.to(device), batch.weight.to(device))
        torch.autograd.backward(loss)  # updates the tables on the way
        self._dense.step()
        return loss.detach()

    def _agree(self, mine: torch.Tensor, meta: Meta, timing: Timing) -> bool:
        """Ranks put together what they saw since the last time, and learn whether one of them was asked to stop."""
        mine[4] = float(self._asked_to_stop())
        loss, rows, wait, compute, stop = self._world.sum(mine).tolist()
        if not math.isfinite(loss):
            raise NotANumber(f"the loss is {loss / rows} at step {meta.step}; try a lower --lr or --dense-lr")
        interval = Timing()
        interval.add(rows, wait, compute, self._world.ranks)
        timing.add(rows, wait, compute, self._world.ranks)
        self._observe({"kind": "train", "step": meta.step, "epoch": meta.epoch, "loss": loss / rows,
                       "samples_per_s": interval.samples_per_s, "stall": interval.stall})
        return bool(stop > 0)

    def _save(self, meta: Meta, feed: Feed) -> Meta:
        began, position = self._clock(), feed.state_dict()
        meta = replace(meta, loader=position, epoch=position["epoch"])  # the next batch's: the epochs that are whole
        path = checkpoint.save(self._checkpoints, meta, self._model, self._dense, self._world)
        self._record({"kind": "checkpoint", "step": meta.step, "path": path.name,
                      "seconds": round(self._clock() - began, 3)})
        return meta


@torch.no_grad()
def evaluate(model: Any, feed: Iterable[Batch], names: list[str], guard: Guard, world: World) -> Quality:
    """Over everything the feed brings, on all ranks; rows of weight 0 count nowhere. Every rank gets the result."""
    seen = []
    for batch in feed:
        guard.check(batch)
        logits = model(*features(batch, names, world.device)).cpu()
        # Copies: the loader may use a batch's memory again.
        seen.append(torch.stack([logits, batch.label, batch.weight]).clone())
    mine = torch.cat(seen, dim=1) if seen else torch.zeros(3, 0)
    logits, labels, weights = world.gather(mine.T.contiguous()).numpy().T
    return quality(logits, labels, weights)
