"""The training loop, from an epoch's first batch to its evaluation: `Trainer`.

`train` repeats `_train_epoch`, which shows the order of things: a step (`_step`), its figures (`_count`), a line of the
log (`_report`), a checkpoint (`_save`), an evaluation (`_evaluate`). The parts that it calls have names:
`synced_batches`, `checker`, `guard`, `parts` (model and optimisers), `checkpoints`, `validator` and `journal`.
`sluice.dlrm.session.version` makes them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from sluice.dlrm.checkpoint.meta import CheckpointMeta
from sluice.dlrm.follow import versions
from sluice.dlrm.model.ranker import first_bias, loss_of
from sluice.dlrm.optim.clip import clip
from sluice.dlrm.options import Config
from sluice.dlrm.ranks import Ranks
from sluice.dlrm.training.finite_guard import FiniteGuard
from sluice.dlrm.training.input_checks import BatchChecker
from sluice.dlrm.training.model_input import ModelInput
from sluice.dlrm.training.synced_batches import SyncedBatches, TrainingStep
from sluice.ingest.gpu import staging_for
from sluice.ingest.machine import Machine, core_wait_s

if TYPE_CHECKING:
    from sluice.dlrm.checkpoint.saving import Checkpoints
    from sluice.dlrm.evaluation.validation import Validator
    from sluice.dlrm.telemetry.journal import Journal
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


@dataclass(slots=True)
class Interval:
    """What this rank did since the last report."""

    loss: torch.Tensor
    """The sum of loss times rows. It stays on its device, so that no step waits for it."""
    rows: int = 0
    wait_s: float = 0.0
    compute_s: float = 0.0
    others_s: float = 0.0
    """The time that this rank waited for the others before its steps. It is a part of `compute_s`."""
    own_s: float = 0.0
    """The time that this rank computed or waited for a core, without waiting for other ranks."""


@dataclass(slots=True)
class TrainingOutcome:
    """How far a call of `train` has come. It returns this."""

    meta: CheckpointMeta
    saved_at: int
    """The step of the last checkpoint."""
    timing: Timing = field(default_factory=Timing)
    first_batch_s: float | None = None
    """The wait for the first batch, while the pipeline fills. The stall does not include it."""
    stopped: bool = False
    """Whether training ended early because of a stop signal."""
    good_enough: bool = False
    """Whether training ended because the model was good enough."""
    table_changed: bool = False
    peak_bytes: int = 0
    """The most memory that this rank was seen to use."""


@dataclass(kw_only=True)
class Trainer:
    """Trains a sharded model on a loader's batches, the `feed`. Ranks communicate before each step, in the step, and
    every `log_every` steps to sum their counters."""

    config: Config
    world: Ranks
    parts: TrainingParts
    feed: BatchLoader
    checker: BatchChecker
    synced_batches: SyncedBatches
    checkpoints: Checkpoints
    validator: Validator
    journal: Journal
    tuning: Callable[[], dict[str, Any]] = dict
    """Returns the agent's fields of a checkpoint's meta."""
    memory_used: Callable[[], int] = field(default_factory=lambda: Machine().memory_used)
    hosts: Sequence[str] = ()
    """The name of each rank's host."""
    ahead: bool | None = None
    """Whether steps overlap (`sluice.dlrm.training.overlapped_steps`). None: on a GPU."""
    clock: Callable[[], float] = time.perf_counter
    own_clock: Callable[[], float] = lambda: time.thread_time() + core_wait_s()

    def __post_init__(self) -> None:
        self.guard = FiniteGuard(self.config, self.world, self.checker, self.journal.warn)
        self._has_first_bias = False
        self._staging = staging_for(self.world.device)
        self._overlapped_steps: OverlappedSteps | None = None
        on_gpu = self.world.device.type == "cuda"
        if on_gpu if self.ahead is None else self.ahead:
            from sluice.dlrm.training.overlapped_steps import OverlappedSteps

            self._overlapped_steps = OverlappedSteps(
                self.parts, self.world, self.guard, self._update
            )

    def train(self, meta: CheckpointMeta) -> TrainingOutcome:
        """Trains the remaining epochs, with a checkpoint and an evaluation after each."""
        self._outcome = outcome = TrainingOutcome(meta, saved_at=meta.step)
        while outcome.meta.epoch < self.config.epochs:
            self._train_epoch()
            if outcome.stopped or outcome.good_enough or outcome.table_changed:
                break
        return outcome

    def _train_epoch(self) -> None:
        """Makes the steps of an epoch, until it ends, a stop signal comes, or the model is good enough. Reports, saves
        and evaluates on the way, and at the end of the epoch."""
        config, feed, outcome = self.config, self.feed, self._outcome
        steps = len(feed)
        evaluation_steps = {steps * k // config.evals for k in range(1, config.evals)}
        # A model that has trained keeps its bias.
        self._has_first_bias = outcome.meta.step > 0
        step = None
        self._begin_interval()
        started_at, own_at = self.clock(), self.own_clock()
        for step in self._steps(self.synced_batches.batches(feed, self.guard)):
            self._count(step, self.clock() - started_at, self.own_clock() - own_at)
            meta = outcome.meta
            self.guard.watch(meta.step, step.batch, step.loss)
            if meta.step % config.log_every == 0:
                self._report()
            evaluation_due = (meta.step - meta.since) % steps in evaluation_steps
            if evaluation_due or (config.save_every and meta.step % config.save_every == 0):
                self._save(step.position)
            if evaluation_due:
                self._evaluate()
                if outcome.good_enough:
                    return
            started_at, own_at = self.clock(), self.own_clock()
        outcome.stopped = self.synced_batches.stopped
        if step is not None:
            if outcome.meta.step % config.log_every:
                self._report()
            if outcome.meta.step != outcome.saved_at:
                # After a whole epoch, the position is the start of the next one; after a stop, the last step.
                self._save(step.position if outcome.stopped else feed.state_dict())
        if not outcome.stopped:
            self._evaluate()
            outcome.table_changed = not outcome.good_enough and self._has_new_version()

    def _steps(self, batches: Iterator[TrainingStep]) -> Iterator[TrainingStep]:
        """Makes one step after the other, one for each batch. On a GPU they overlap."""
        first = self._outcome.meta.step
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
        parts = self.parts
        batch = step.batch
        mean_rows = step.rows / self.world.ranks
        parts.rates.set_step(number)
        parts.dense.zero_grad()
        sample = ModelInput.of(parts.layout, batch, self._staging, mean_rows).to(self.world.device)
        logits = parts.model(sample.dense, sample.sparse, mean_rows)
        loss = loss_of(logits, sample.label, sample.weight, mean_rows)
        if self.guard.skips and not self.guard.admits(number + 1, (batch.epoch, batch.step), loss):
            return None
        # This also updates the tables.
        torch.autograd.backward(loss)
        self._update()
        return loss.detach()

    def _update(self) -> None:
        if self.config.optim.clip:
            clip(self.parts.dense_parameters.values(), self.config.optim.clip)
        self.parts.update()

    def _count(self, step: TrainingStep, step_s: float, own_s: float) -> None:
        """Counts a step that took `step_s` seconds, with its wait, and `own_s` without waiting for other ranks. The
        wait for the first batch counts neither as waiting nor as computing."""
        outcome, interval, wait_s = self._outcome, self._interval, step.wait_s
        if outcome.first_batch_s is None:
            outcome.first_batch_s = wait_s
            step_s -= wait_s
            wait_s = 0.0
        meta = outcome.meta
        if step.loss is None:
            outcome.meta = replace(meta, step=meta.step + 1, skipped=meta.skipped + 1)
        else:
            outcome.meta = replace(meta, step=meta.step + 1, rows=meta.rows + step.rows)
            interval.loss.add_(step.loss, alpha=step.rows / self.world.ranks)
            interval.rows += step.batch.rows
        interval.wait_s += wait_s
        interval.compute_s += step_s - wait_s
        interval.others_s += step.others_s
        interval.own_s += own_s

    def _begin_interval(self) -> None:
        self._interval = Interval(torch.zeros((), dtype=torch.float64, device=self.world.device))

    def _report(self) -> None:
        """Reports the sums over all ranks since the last report, and resets them."""
        outcome, own = self._outcome, self._interval
        outcome.peak_bytes = max(outcome.peak_bytes, self.memory_used())
        figures = [own.loss.item(), own.rows, own.wait_s, own.compute_s, own.others_s, own.own_s]
        ranks = self.world.gather(torch.tensor(figures, dtype=torch.float64)).view(-1, len(figures))
        loss, rows, wait_s, compute_s, *_ = ranks.sum(0).tolist()
        self._begin_interval()
        if not math.isfinite(loss):
            self.guard.end()
        interval = Timing()
        for timing in (interval, outcome.timing):
            timing.add(rows, wait_s, compute_s, self.world.ranks)
        # Without rows, all batches were skipped.
        if not rows:
            return
        self.journal.metric(
            {
                "kind": "train",
                "step": outcome.meta.step,
                "epoch": outcome.meta.epoch,
                "loss": loss / rows,
                "samples_per_s": interval.samples_per_s,
                "stall": interval.stall,
                **late_rank(ranks.T[2:5].tolist(), self.hosts),
                **slow_rank(ranks[:, 5].tolist(), interval.seconds, self.hosts),
            }
        )

    def _save(self, position: dict[str, Any]) -> None:
        """Writes a checkpoint with the position of the next batch. The epoch of that batch is the number of finished
        epochs."""
        outcome = self._outcome
        outcome.meta = meta = replace(outcome.meta, loader=position, epoch=position["epoch"])
        outcome.saved_at = meta.step
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
        outcome = self._outcome
        with self.synced_batches.activity.apart("evaluated"), self.feed.resting():
            outcome.good_enough = self.validator.evaluate_and_check(outcome.meta)
        outcome.stopped = self.synced_batches.stopped

    def _has_new_version(self) -> bool:
        """Whether training ends here, because the table has a newer version. The first rank decides for all."""
        if not self.config.follow:
            return False
        first = self.world.first
        version = versions.next_version(self.config, self._outcome.meta) if first else None
        return self.world.gather_objects(version)[0] is not None


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
