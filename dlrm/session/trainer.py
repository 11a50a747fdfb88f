"""The training loop, from an epoch's first batch to its evaluation: `Trainer`.

`train` repeats `_train_epoch`, which shows the order of things: a step (`_step`), its count (`_count`), a line of the
log (`_report`), a checkpoint (`_save`), an evaluation (`_evaluate`). The fields of `Trainer` are the parts that it
calls. `sluice.dlrm.session.session` makes them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from sluice.dlrm.checkpoint.meta import CheckpointMeta
from sluice.dlrm.follow import versions
from sluice.dlrm.model.ranker import first_bias, loss_of
from sluice.dlrm.optim.clip import clip
from sluice.dlrm.options import Config
from sluice.dlrm.ranks import Ranks
from sluice.dlrm.staging import staging_for
from sluice.dlrm.training.finite_guard import FiniteGuard
from sluice.dlrm.training.input_checks import BatchChecker
from sluice.dlrm.training.model_input import ModelInput
from sluice.dlrm.training.synced_batches import SyncedBatches, TrainingStep
from sluice.ingest.machine import core_wait_s

if TYPE_CHECKING:
    from sluice.dlrm.checkpoint.saving import Checkpoints
    from sluice.dlrm.evaluation.validation import Validator
    from sluice.dlrm.telemetry.journal import Journal
    from sluice.dlrm.training.assemble import TrainingParts
    from sluice.dlrm.training.overlapped_steps import OverlappedSteps
    from sluice.dlrm.training.step_figures import StepFigures
    from sluice.ingest.batch import Batch
    from sluice.ingest.loader import BatchLoader


@dataclass(kw_only=True)
class Trainer:
    """Trains a sharded model on a loader's batches, the `feed`. Ranks communicate before each step, in the step, and
    every `log_every` steps to sum their counters."""

    config: Config
    meta: CheckpointMeta
    """The progress of the run."""
    world: Ranks
    parts: TrainingParts
    feed: BatchLoader
    checker: BatchChecker
    synced_batches: SyncedBatches
    checkpoints: Checkpoints
    validator: Validator
    journal: Journal
    figures: StepFigures
    tuning: Callable[[], dict[str, Any]] = dict
    """Returns the agent's fields of a checkpoint's meta."""
    ahead: bool | None = None
    """Whether steps overlap (`sluice.dlrm.training.overlapped_steps`). None: on a GPU."""
    clock: Callable[[], float] = time.perf_counter
    own_clock: Callable[[], float] = lambda: time.thread_time() + core_wait_s()

    def __post_init__(self) -> None:
        self.guard = FiniteGuard(self.config, self.world, self.checker, self.journal.warn)
        self.good_enough = False
        """Whether training ended because the model was good enough."""
        self._saved_at = self.meta.step
        self._has_first_bias = False
        self._staging = staging_for(self.world.device)
        self._overlapped_steps: OverlappedSteps | None = None
        on_gpu = self.world.device.type == "cuda"
        if on_gpu if self.ahead is None else self.ahead:
            from sluice.dlrm.training.overlapped_steps import OverlappedSteps

            self._overlapped_steps = OverlappedSteps(
                self.parts, self.world, self._compute_loss, self._update
            )

    def train(self) -> None:
        """Trains the remaining epochs, with a checkpoint and an evaluation after each. An evaluation that a killed run
        did not finish comes first."""
        if self._catch_up():
            while self.meta.epoch < self.config.epochs and self._train_epoch():
                pass

    def _catch_up(self) -> bool:
        """Evaluates the checkpoint that the run goes on from, if that is due. Returns whether training goes on."""
        step = self.meta.loader.get("step")
        if step is None or (step and step not in self._evaluation_steps):
            return True
        if self.validator.is_behind():
            self.journal.say(
                f"step {self.meta.step} was saved and not evaluated; this is made up now"
            )
            self._evaluate()
        else:
            self.good_enough = self.validator.has_reached()
        return not (self.good_enough or self._has_new_version())

    @property
    def _evaluation_steps(self) -> set[int]:
        """The steps of an epoch after which it is evaluated, without its last."""
        return {len(self.feed) * k // self.config.evals for k in range(1, self.config.evals)}

    def _train_epoch(self) -> bool:
        """Makes the steps of an epoch, until it ends, a stop signal comes, or the model is good enough. Reports, saves
        and evaluates on the way, and at the end of the epoch. Returns whether another epoch may follow."""
        config, feed = self.config, self.feed
        steps = len(feed)
        evaluation_steps = self._evaluation_steps
        # A model that has trained keeps its bias.
        self._has_first_bias = self.meta.step > 0
        step = None
        self.figures.begin()
        started_at, own_at = self.clock(), self.own_clock()
        for step in self._steps(self.synced_batches.batches(feed, self.guard)):
            self._count(step, self.clock() - started_at, self.own_clock() - own_at)
            meta = self.meta
            self.guard.watch(meta.step, step.batch, step.loss)
            if meta.step % config.log_every == 0:
                self._report()
            evaluation_due = (meta.step - meta.since) % steps in evaluation_steps
            if evaluation_due or (config.save_every and meta.step % config.save_every == 0):
                self._save(step.position)
            if evaluation_due:
                self._evaluate()
                if self.good_enough:
                    return False
            started_at, own_at = self.clock(), self.own_clock()
        stopped = self.synced_batches.stopped
        if step is not None:
            if self.meta.step % config.log_every:
                self._report()
            if self.meta.step != self._saved_at:
                # After a whole epoch, the position is the start of the next one; after a stop, the last step.
                self._save(step.position if stopped else feed.state_dict())
        if not stopped:
            self._evaluate()
        return not (self.synced_batches.stopped or self.good_enough or self._has_new_version())

    def _steps(self, batches: Iterator[TrainingStep]) -> Iterator[TrainingStep]:
        """Makes one step after the other, one for each batch. On a GPU they overlap."""
        first = self.meta.step
        if self._overlapped_steps is not None:
            yield from self._overlapped_steps.steps(batches, first, self._check)
            return
        for number, step in enumerate(batches, first):
            self._check(step.batch)
            step.loss = self._step(step, number)
            yield step

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

    def _step(self, step: TrainingStep, number: int) -> torch.Tensor | None:
        """Makes a step and returns the loss. None: the batch was skipped."""
        parts, batch = self.parts, step.batch
        parts.dense.zero_grad()
        mean_rows = step.rows / self.world.ranks
        sample = ModelInput.of(parts.layout, batch, self._staging, mean_rows)
        loss = self._compute_loss(sample.to(self.world.device), number, batch)
        if loss is None:
            return None
        # This also updates the tables.
        torch.autograd.backward(loss)
        self._update()
        return loss.detach()

    def _compute_loss(self, sample: ModelInput, number: int, batch: Batch) -> torch.Tensor | None:
        """Returns the loss of a batch, as step `number` has it. None: the batch is to be skipped."""
        self.parts.rates.set_step(number)
        logits = self.parts.model(sample.dense, sample.sparse, sample.rows)
        loss = loss_of(logits, sample.label, sample.weight, sample.rows)
        if self.guard.skips and not self.guard.admits(number + 1, (batch.epoch, batch.step), loss):
            return None
        return loss

    def _update(self) -> None:
        if self.config.optim.clip:
            clip(self.parts.dense_parameters.values(), self.config.optim.clip)
        self.parts.update()

    def _count(self, step: TrainingStep, step_s: float, own_s: float) -> None:
        """Counts a step that took `step_s` seconds, with its wait, and `own_s` without waiting for other ranks."""
        self.figures.count(step, step_s, own_s)
        meta = self.meta
        self.meta = (
            replace(meta, step=meta.step + 1, skipped=meta.skipped + 1)
            if step.loss is None
            else replace(meta, step=meta.step + 1, rows=meta.rows + step.rows)
        )

    def _report(self) -> None:
        """Writes a line of the log: the figures of all ranks since the last one."""
        figures, meta = self.figures.sum_up(), self.meta
        if not math.isfinite(figures.get("loss", 0.0)):
            self.guard.end()
        if figures:
            self.validator.training_loss = figures["loss"]
            self.journal.metric(
                {"kind": "train", "step": meta.step, "epoch": meta.epoch, **figures}
            )

    def _save(self, position: dict[str, Any]) -> None:
        """Writes a checkpoint with the position of the next batch. The epoch of that batch is the number of finished
        epochs."""
        self.meta = meta = replace(self.meta, loader=position, epoch=position["epoch"])
        self._saved_at = meta.step
        with self.synced_batches.activity.apart("saved a checkpoint"), self.feed.resting():
            self.checkpoints.save(replace(meta, **self.tuning()))
        if not position["step"]:
            self.journal.event(
                {
                    "kind": "epoch",
                    "epoch": meta.epoch,
                    "step": meta.step,
                    "rows": meta.rows,
                    "order_hash": self.feed.order_hash,
                }
            )

    def _evaluate(self) -> None:
        if self._overlapped_steps is not None:
            self._overlapped_steps.pause()
        with self.synced_batches.activity.apart("evaluated"), self.feed.resting():
            self.good_enough = self.validator.evaluate_and_check(self.meta)

    def _has_new_version(self) -> bool:
        """Whether training ends here, because the table has a newer version. The first rank decides for all."""
        if not self.config.follow:
            return False
        first = self.world.first
        version = versions.next_version(self.config, self.meta) if first else None
        return self.world.gather_objects(version)[0] is not None
