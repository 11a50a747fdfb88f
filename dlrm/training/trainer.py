"""The training loop: it turns batches into weights. All that it works with is handed in; it makes none of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from sluice.dlrm.checkpoint.meta import CheckpointMeta
from sluice.dlrm.model.ranker import first_bias, loss_of
from sluice.dlrm.optim.clip import GradientError, clip
from sluice.dlrm.options import Config
from sluice.dlrm.ranks import Ranks
from sluice.dlrm.training.finite_guard import FiniteGuard
from sluice.dlrm.training.input_checks import BatchChecker
from sluice.dlrm.training.steps import Fetched, FinishedStep, TrainingBatches
from sluice.dlrm.training.synced_batches import SyncedBatches

if TYPE_CHECKING:
    from sluice.dlrm.training.assemble import TrainingParts
    from sluice.dlrm.training.overlapped_steps import OverlappedSteps
    from sluice.ingest.batch import Batch


@dataclass(slots=True)
class Timing:
    """How the trainer spent its time, over all its ranks."""

    rows: float = 0.0
    wait_s: float = 0.0
    """Time spent in the loader's raw `next()`, and nothing else."""
    compute_s: float = 0.0
    """Time spent in steps: forward, backward, both optimisers, and waiting for other ranks."""
    seconds: float = 0.0
    """The mean over ranks of both together."""

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
    """The wait for the first batch, while the pipeline fills; the stall does not count it."""
    stopped: bool
    """Whether training ended early because it was asked to."""
    good_enough: bool
    """Whether training ended because the model was good enough."""
    peak_bytes: int
    """The most memory that this rank was seen to use."""


class Trainer:
    """Trains a sharded model on a feed. Ranks meet before each step, in its collectives, and every `log_every` steps to
    put together what they saw.

    `save(meta)` writes a checkpoint, `evaluate(meta)` says whether the model is good enough to stop; `tick()` is called
    after each step; `table_changed(meta)` says after an epoch whether to end here, as the table has a newer version.
    `warn(step, text)` reports a batch that is left out.
    `ahead` says whether steps look ahead, as in `sluice.dlrm.training.overlapped_steps` (default: on a GPU)."""

    def __init__(
        self,
        *,
        config: Config,
        world: Ranks,
        parts: TrainingParts,
        checker: BatchChecker,
        save: Callable[[CheckpointMeta], None],
        evaluate: Callable[[CheckpointMeta], bool],
        observe: Callable[[dict[str, Any]], None],
        synced_batches: SyncedBatches,
        memory_used: Callable[[], int],
        tick: Callable[[], None] = lambda: None,
        warn: Callable[[int, str], None] = lambda *_: None,
        table_changed: Callable[[CheckpointMeta], bool] = lambda _: False,
        ahead: bool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config = config
        self._world = world
        self._parts = parts
        self._checker = checker
        self._save_to = save
        self._evaluate = evaluate
        self._observe = observe
        self._memory_used = memory_used
        self._tick = tick
        self._clock = clock
        self._table_changed = table_changed
        self._synced_batches = synced_batches
        self.guard = FiniteGuard(config, world, checker, warn)
        self._peak_bytes = 0
        self._bias_set = False
        self._overlapped_steps: OverlappedSteps | None = None
        if ahead if ahead is not None else world.device.type == "cuda":
            from sluice.dlrm.training.overlapped_steps import OverlappedSteps

            self._overlapped_steps = OverlappedSteps(parts, world, self.guard, self._update)

    def train(self, feed: TrainingBatches, meta: CheckpointMeta) -> TrainingOutcome:
        """Trains all epochs that `meta` has left, with a checkpoint and an evaluation after each."""
        timing = Timing()
        synced_batches = self._synced_batches
        saved_at = meta.step
        good_enough = table_changed = False
        first_batch_s: float | None = None
        steps = len(feed)
        evaluation_steps = {steps * k // self._config.evals for k in range(1, self._config.evals)}
        while meta.epoch < self._config.epochs and not (
            synced_batches.stopped or good_enough or table_changed
        ):
            sums = torch.zeros(4, dtype=torch.float64)  # loss·rows, rows, wait, compute
            loss = torch.zeros(
                (), dtype=torch.float64, device=self._world.device
            )  # on its device: no step waits
            self._bias_set = meta.step > 0
            step_began = self._clock()
            finished: FinishedStep | None = None
            batches = synced_batches.batches(feed, self.guard)
            for finished in (
                self._overlapped_steps.steps(batches, meta.step, self._check)
                if self._overlapped_steps
                else self._steps(batches, meta.step)
            ):
                step_s, wait = self._clock() - step_began, finished.wait_s
                if first_batch_s is None:
                    first_batch_s = wait
                    step_s = step_s - wait
                    wait = 0.0
                loss.add_(finished.loss, alpha=finished.rows / self._world.ranks)
                meta = replace(
                    meta,
                    step=meta.step + 1,
                    rows=meta.rows + finished.rows,
                    skipped=meta.skipped + finished.skipped,
                )
                self.guard.watch(meta.step, finished)
                sums[1] += finished.rank_rows
                sums[2] += wait
                sums[3] += step_s - wait
                self._tick()
                if meta.step % self._config.log_every == 0:
                    sums[0] = loss.item()
                    self._report(sums, meta, timing)
                    sums.zero_()
                    loss.zero_()
                evaluation_due = (meta.step - meta.since) % steps in evaluation_steps
                if evaluation_due or (
                    self._config.save_every and meta.step % self._config.save_every == 0
                ):
                    meta = self._save(meta, finished)
                    saved_at = meta.step
                good_enough = evaluation_due and self._judge(meta)
                if good_enough:
                    break
                step_began = self._clock()
            self._pause()
            if finished is not None and not good_enough:
                if meta.step % self._config.log_every:
                    sums[0] = loss.item()
                    self._report(sums, meta, timing)
                if meta.step != saved_at:
                    last = (
                        finished
                        if synced_batches.stopped
                        else replace(finished, position=feed.state_dict())
                    )
                    meta = self._save(meta, last)
                    saved_at = meta.step
            if not (synced_batches.stopped or good_enough):
                good_enough = self._judge(meta)
                table_changed = not good_enough and self._table_changed(meta)
        return TrainingOutcome(
            meta=meta,
            timing=timing,
            first_batch_s=first_batch_s or 0.0,
            stopped=synced_batches.stopped,
            good_enough=good_enough,
            peak_bytes=self._peak_bytes,
        )

    def _steps(self, batches: Iterator[Fetched], step: int) -> Iterator[FinishedStep]:
        """Makes a step of one batch after the other."""
        for number, fetched in enumerate(batches, step):
            self._check(fetched.batch)
            yield FinishedStep.of(fetched, self._step(fetched, number), fetched.wait_s)

    def _check(self, batch: Batch) -> None:
        """Checks each batch before the model gets it."""
        if not self._bias_set:
            self._bias_set = True
            self._set_first_bias(batch)
        self._checker.check(batch)

    def _set_first_bias(self, batch: Batch) -> None:
        positive, rows = self._world.sum(
            torch.stack([batch.label.sum(), torch.tensor(float(batch.rows))])
        ).tolist()
        first_bias(self._parts.model, positive / rows)

    def _step(self, fetched: Fetched, step: int) -> torch.Tensor | None:
        """Returns the loss; None if the batch is left out."""
        device = self._world.device
        parts = self._parts
        batch = fetched.batch
        rows = fetched.rows / self._world.ranks
        parts.rates.begin(step)
        parts.dense.zero_grad()
        logits = parts.model(*parts.layout.features(batch, device), rows)
        loss = loss_of(logits, batch.label.to(device), batch.weight.to(device), rows)
        if self.guard.skips and not self.guard.admits(step + 1, (batch.epoch, batch.step), loss):
            return None
        torch.autograd.backward(loss)  # updates the tables on the way
        self._update()
        return loss.detach()

    def _update(self) -> None:
        if self._config.optim.clip:
            try:
                clip(self._parts.dense_parameters.items(), self._config.optim.clip)
            except GradientError as error:  # on all ranks: they have the same mean gradient
                raise self.guard.error(str(error)) from None
        self._parts.update()

    def _judge(self, meta: CheckpointMeta) -> bool:
        self._pause()
        return self._evaluate(meta)

    def _pause(self) -> None:
        if self._overlapped_steps is not None:
            self._overlapped_steps.pause()

    def _report(self, sums: torch.Tensor, meta: CheckpointMeta, timing: Timing) -> None:
        """Sums up over the ranks what each saw since the last time."""
        self._peak_bytes = max(self._peak_bytes, self._memory_used())
        loss, rows, wait_s, compute_s = self._world.sum(sums).tolist()
        if not math.isfinite(loss):
            self.guard.end()
        interval = Timing()
        interval.add(rows, wait_s, compute_s, self._world.ranks)
        timing.add(rows, wait_s, compute_s, self._world.ranks)
        if not rows:  # all batches were left out
            return
        self._observe(
            {
                "kind": "train",
                "step": meta.step,
                "epoch": meta.epoch,
                "loss": loss / rows,
                "samples_per_s": interval.samples_per_s,
                "stall": interval.stall,
            }
        )

    def _save(self, meta: CheckpointMeta, finished: FinishedStep) -> CheckpointMeta:
        # The position is the next batch's, so its epoch is the number of those that are whole.
        meta = replace(meta, loader=finished.position, epoch=finished.position["epoch"])
        self._save_to(meta)
        return meta
