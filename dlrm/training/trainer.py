"""Runs the training loop: `Trainer`. `sluice.dlrm.session.version_run` makes its parts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from sluice.dlrm.checkpoint.meta import CheckpointMeta
from sluice.dlrm.model.ranker import first_bias, loss_of
from sluice.dlrm.optim.clip import clip
from sluice.dlrm.options import Config
from sluice.dlrm.ranks import Ranks
from sluice.dlrm.training.finite_guard import FiniteGuard
from sluice.dlrm.training.input_checks import BatchChecker
from sluice.dlrm.training.model_input import ModelInput
from sluice.dlrm.training.steps import Fetched, FinishedStep
from sluice.dlrm.training.synced_batches import SyncedBatches
from sluice.ingest.gpu import staging_for
from sluice.ingest.machine import core_wait_s

if TYPE_CHECKING:
    from sluice.dlrm.training.assemble import TrainingParts
    from sluice.dlrm.training.overlapped_steps import OverlappedSteps
    from sluice.ingest.batch import Batch
    from sluice.ingest.loader import BatchLoader

_LATE_SHARE = 0.1
"""A rank is late or slow if the others wait for it for more than this share of their time."""


@dataclass(slots=True)
class Timing:
    """How all ranks spent their time."""

    rows: float = 0.0
    wait_s: float = 0.0
    """The time in the loader's `next()` alone."""
    compute_s: float = 0.0
    """The time in steps: forward, backward, the optimisers, and waiting for other ranks."""
    seconds: float = 0.0
    """The time in the loader and in steps, as the mean over ranks."""

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
class TrainingOutcome:
    """The result of a call of `train`."""

    meta: CheckpointMeta
    timing: Timing
    first_batch_s: float
    """The wait for the first batch, while the pipeline fills. The stall does not include it."""
    stopped: bool
    """Whether training ended early because of a stop signal."""
    good_enough: bool
    """Whether training ended because the model was good enough."""
    peak_bytes: int
    """The most memory that this rank was seen to use."""


@dataclass(slots=True)
class _TrainingProgress:
    """The progress of a call of `train`."""

    meta: CheckpointMeta
    saved_at: int
    """The step of the last checkpoint."""
    loss: torch.Tensor
    """The sum of loss times rows since the last report. It stays on its device, so that no step waits for it."""
    rows: int = 0
    """The rows of this rank since the last report."""
    wait_s: float = 0.0
    compute_s: float = 0.0
    others_s: float = 0.0
    """The time that this rank waited for the others before its steps. It is a part of `compute_s`."""
    own_s: float = 0.0
    """The time that this rank computed or waited for a core, without waiting for other ranks."""
    timing: Timing = field(default_factory=Timing)
    first_batch_s: float | None = None
    finished: FinishedStep | None = None
    """The last step of this epoch."""
    good_enough: bool = False
    table_changed: bool = False

    def start_interval(self) -> None:
        """Resets the sums, after a report."""
        self.rows = 0
        self.wait_s = self.compute_s = self.others_s = self.own_s = 0.0
        self.loss.zero_()

    def add(self, finished: FinishedStep, step_s: float, own_s: float, ranks: int) -> None:
        """Counts a step that took `step_s` seconds, with its wait, and `own_s` without waiting for other ranks. The
        wait for the first batch counts neither as waiting nor as computing."""
        wait_s = finished.wait_s
        if self.first_batch_s is None:
            self.first_batch_s = wait_s
            step_s -= wait_s
            wait_s = 0.0
        self.finished = finished
        fetched = finished.fetched
        step = self.meta.step + 1
        if finished.loss is None:
            self.meta = replace(self.meta, step=step, skipped=self.meta.skipped + 1)
        else:
            self.meta = replace(self.meta, step=step, rows=self.meta.rows + fetched.rows)
            self.loss.add_(finished.loss, alpha=fetched.rows / ranks)
            self.rows += fetched.batch.rows
        self.wait_s += wait_s
        self.compute_s += step_s - wait_s
        self.others_s += fetched.others_s
        self.own_s += own_s


@dataclass(kw_only=True)
class Trainer:
    """Trains a sharded model on a feed. Ranks communicate before each step, in the step, and every `log_every` steps to
    sum their counters.

    `save(meta)` writes a checkpoint. `evaluate(meta)` returns whether the model is good enough to stop. `tick()` is
    called after each step. `table_changed(meta)` is asked after each epoch. It returns whether training ends here,
    because the table has a newer version. `warn(step, text)` reports a skipped batch. `ahead`: whether steps overlap
    (`sluice.dlrm.training.overlapped_steps`). The default is to overlap them on a GPU."""

    config: Config
    world: Ranks
    parts: TrainingParts
    checker: BatchChecker
    save: Callable[[CheckpointMeta], None]
    evaluate: Callable[[CheckpointMeta], bool]
    observe: Callable[[dict[str, Any]], None]
    synced_batches: SyncedBatches
    memory_used: Callable[[], int]
    tick: Callable[[], None] = lambda: None
    warn: Callable[[int, str], None] = lambda *_: None
    table_changed: Callable[[CheckpointMeta], bool] = lambda _: False
    hosts: Sequence[str] = ()
    """The name of each rank's host."""
    ahead: bool | None = None
    clock: Callable[[], float] = time.perf_counter
    own_clock: Callable[[], float] = lambda: time.thread_time() + core_wait_s()

    def __post_init__(self) -> None:
        self.guard = FiniteGuard(self.config, self.world, self.checker, self.warn)
        self._peak_bytes = 0
        self._has_first_bias = False
        self._staging = staging_for(self.world.device)
        self._overlapped_steps: OverlappedSteps | None = None
        on_gpu = self.world.device.type == "cuda"
        if on_gpu if self.ahead is None else self.ahead:
            from sluice.dlrm.training.overlapped_steps import OverlappedSteps

            self._overlapped_steps = OverlappedSteps(
                self.parts, self.world, self.guard, self._update
            )

    def train(self, feed: BatchLoader, meta: CheckpointMeta) -> TrainingOutcome:
        """Trains the remaining epochs, with a checkpoint and an evaluation after each."""
        loss = torch.zeros((), dtype=torch.float64, device=self.world.device)
        progress = _TrainingProgress(meta=meta, saved_at=meta.step, loss=loss)
        while progress.meta.epoch < self.config.epochs and not (
            self.synced_batches.stopped or progress.good_enough or progress.table_changed
        ):
            progress.finished = None
            progress.start_interval()
            self._train_epoch(feed, progress)
            self._pause()
            self._end_epoch(feed, progress)
        return TrainingOutcome(
            meta=progress.meta,
            timing=progress.timing,
            first_batch_s=progress.first_batch_s or 0.0,
            stopped=self.synced_batches.stopped,
            good_enough=progress.good_enough,
            peak_bytes=self._peak_bytes,
        )

    def _train_epoch(self, feed: BatchLoader, progress: _TrainingProgress) -> None:
        """Makes the steps of an epoch, until it ends, a stop signal comes, or the model is good enough."""
        config = self.config
        steps = len(feed)
        evaluation_steps = {steps * k // config.evals for k in range(1, config.evals)}
        step = progress.meta.step
        # A model that has trained keeps its bias.
        self._has_first_bias = step > 0
        batches = self.synced_batches.batches(feed, self.guard)
        if self._overlapped_steps is None:
            all_steps = self._steps(batches, step)
        else:
            all_steps = self._overlapped_steps.steps(batches, step, self._check)
        started_at, own_at = self.clock(), self.own_clock()
        for finished in all_steps:
            step_s, own_s = self.clock() - started_at, self.own_clock() - own_at
            progress.add(finished, step_s, own_s, self.world.ranks)
            meta = progress.meta
            self.guard.watch(meta.step, finished)
            self.tick()
            if meta.step % config.log_every == 0:
                self._report(progress)
            evaluation_due = (meta.step - meta.since) % steps in evaluation_steps
            if evaluation_due or (config.save_every and meta.step % config.save_every == 0):
                self._save(progress, finished.fetched.position)
            if evaluation_due and self._evaluate(progress.meta):
                progress.good_enough = True
                return
            started_at, own_at = self.clock(), self.own_clock()

    def _end_epoch(self, feed: BatchLoader, progress: _TrainingProgress) -> None:
        """Makes the last report and the checkpoint of the epoch, then evaluates the model."""
        stopped = self.synced_batches.stopped
        finished = progress.finished
        if finished is not None and not progress.good_enough:
            if progress.meta.step % self.config.log_every:
                self._report(progress)
            if progress.meta.step != progress.saved_at:
                # After a whole epoch, the position is the start of the next one; after a stop, the last step.
                position = finished.fetched.position if stopped else feed.state_dict()
                self._save(progress, position)
        if not (stopped or progress.good_enough):
            progress.good_enough = self._evaluate(progress.meta)
            progress.table_changed = not progress.good_enough and self.table_changed(progress.meta)

    def _steps(self, batches: Iterator[Fetched], step: int) -> Iterator[FinishedStep]:
        """Makes one step after the other, one for each batch."""
        for number, fetched in enumerate(batches, step):
            self._check(fetched.batch)
            yield FinishedStep(fetched, self._step(fetched, number), fetched.wait_s)

    def _check(self, batch: Batch) -> None:
        """Checks a batch before the model gets it. The first batch of a run also sets the model's bias."""
        if not self._has_first_bias:
            self._has_first_bias = True
            self._set_first_bias(batch)
        self.checker.check(batch)

    def _set_first_bias(self, batch: Batch) -> None:
        positive, rows = self.world.sum(
            torch.stack([batch.label.sum(), torch.tensor(float(batch.rows))])
        ).tolist()
        first_bias(self.parts.model, positive / rows)

    def _step(self, fetched: Fetched, step: int) -> torch.Tensor | None:
        """Makes a step and returns the loss. None: the batch was skipped."""
        parts = self.parts
        batch = fetched.batch
        mean_rows = fetched.rows / self.world.ranks
        parts.rates.set_step(step)
        parts.dense.zero_grad()
        sample = ModelInput.of(parts.layout, batch, self._staging, mean_rows).to(self.world.device)
        logits = parts.model(sample.dense, sample.sparse, mean_rows)
        loss = loss_of(logits, sample.label, sample.weight, mean_rows)
        if self.guard.skips and not self.guard.admits(step + 1, (batch.epoch, batch.step), loss):
            return None
        # This also updates the tables.
        torch.autograd.backward(loss)
        self._update()
        return loss.detach()

    def _update(self) -> None:
        if self.config.optim.clip:
            parameters = self.parts.dense_parameters.items()
            self.guard.lengths = clip(parameters, self.config.optim.clip)
        self.parts.update()

    def _evaluate(self, meta: CheckpointMeta) -> bool:
        self._pause()
        return self.evaluate(meta)

    def _pause(self) -> None:
        if self._overlapped_steps is not None:
            self._overlapped_steps.pause()

    def _report(self, progress: _TrainingProgress) -> None:
        """Reports the sums over all ranks since the last report, and resets them."""
        self._peak_bytes = max(self._peak_bytes, self.memory_used())
        own = (
            progress.loss.item(),
            progress.rows,
            progress.wait_s,
            progress.compute_s,
            progress.others_s,
            progress.own_s,
        )
        ranks = self.world.gather(torch.tensor(own, dtype=torch.float64)).view(-1, len(own))
        loss, rows, wait_s, compute_s, *_ = ranks.sum(0).tolist()
        progress.start_interval()
        if not math.isfinite(loss):
            self.guard.end()
        interval = Timing()
        interval.add(rows, wait_s, compute_s, self.world.ranks)
        progress.timing.add(rows, wait_s, compute_s, self.world.ranks)
        # Without rows, all batches were skipped.
        if not rows:
            return
        self.observe(
            {
                "kind": "train",
                "step": progress.meta.step,
                "epoch": progress.meta.epoch,
                "loss": loss / rows,
                "samples_per_s": interval.samples_per_s,
                "stall": interval.stall,
                **late_rank(ranks.T[2:5].tolist(), self.hosts),
                **slow_rank(ranks[:, 5].tolist(), interval.seconds, self.hosts),
            }
        )

    def _save(self, progress: _TrainingProgress, position: dict[str, Any]) -> None:
        """Writes a checkpoint with the position of the next batch. The epoch of that batch is the number of finished
        epochs."""
        progress.meta = replace(progress.meta, loader=position, epoch=position["epoch"])
        progress.saved_at = progress.meta.step
        self.save(progress.meta)


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
