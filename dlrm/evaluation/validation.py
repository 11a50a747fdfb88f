"""Evaluates during training: logs each result, compares it with the best, and explains a model that learns nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sluice.dlrm.checkpoint.meta import (
    CheckpointMeta,
    best,
    is_evaluated,
    latest,
    mark_best,
    mark_evaluated,
)
from sluice.dlrm.checkpoint.saving import Checkpoints
from sluice.dlrm.evaluation.diagnosis import (
    bad_predictions,
    chance,
    falling,
    learned_by_heart,
    stuck,
    telling_columns,
    too_good,
)
from sluice.dlrm.evaluation.split import Findings, SingleColumns, evaluate
from sluice.dlrm.options import Config
from sluice.dlrm.ranks import Ranks
from sluice.dlrm.telemetry.journal import Journal
from sluice.dlrm.training import loaders
from sluice.dlrm.training.assemble import TrainingParts
from sluice.dlrm.training.synced_batches import Stopped, SyncedBatches
from sluice.etl.table.table import FeatureTable


@dataclass(kw_only=True)
class Validator:
    """Evaluates splits of a table. All ranks call it together."""

    config: Config
    table: FeatureTable
    parts: TrainingParts
    world: Ranks
    journal: Journal
    checkpoints: Checkpoints
    steps_per_epoch: int
    synced_batches: SyncedBatches
    on_evaluation: Callable[[], None] = lambda: None
    """Called after each evaluation of the validation split."""
    training_loss: float | None = None
    """The newest loss on training rows."""

    def __post_init__(self) -> None:
        self._aucs: dict[int, float] = {}
        """Step → AUC on the validation split."""
        self._newest: Findings | None = None
        """Those of the newest evaluation of the validation split."""
        self._by_heart: str | None = None
        """A text that shows that training rows are learned by heart."""
        self._singles: Mapping[str, float] | None = None
        """Column → AUC of this column alone. It is None until a split other than training is evaluated."""
        self._fallen_from = -1.0
        """The best AUC before the last fall that was reported."""

    def measure(self, split: str, meta: CheckpointMeta) -> Findings:
        """Evaluates a whole split. Raises `Stopped` if the ranks are asked to stop meanwhile."""
        config, world = self.config, self.world
        began = time.monotonic()
        epochs = round(self._epochs(meta), 2)
        with loaders.evaluation(
            config,
            self.table,
            split,
            rank=world.rank,
            local_ranks=world.local_ranks,
            in_training=True,
        ) as batches:
            singles = SingleColumns(batches.dense_names, batches.sparse_names, world)
            is_first = self._singles is None and split != "train"
            findings = evaluate(
                self.parts,
                batches,
                split,
                world,
                through=self.synced_batches.all_of,
                receive=lambda batch, _: singles.add(batch) if is_first else None,
            )
        seconds = time.monotonic() - began
        if findings.undefined is not None:
            self.journal.warn(meta.step, f"step {meta.step}, split {split!r}: {findings.undefined}")
        self.journal.metric(
            {
                "kind": "eval",
                "epoch": meta.epoch,
                "seconds": round(seconds, 3),
                "step": meta.step,
                "split": split,
                **findings.quality.to_dict(),
            }
        )
        self.journal.say(f"{split} after {epochs:g} epoch{'s' * (epochs != 1)}: {findings.quality}")
        if is_first:
            self._singles = singles.result()
            for text in telling_columns(self._singles, split):
                self.journal.warn(meta.step, text)
        if split == "test" and (warning := too_good(findings.quality.auc, self._singles or {})):
            self.journal.warn(meta.step, warning)
        return findings

    def _epochs(self, meta: CheckpointMeta) -> float:
        """Returns the epochs that were trained."""
        return meta.epoch + (meta.step - meta.since) % self.steps_per_epoch / self.steps_per_epoch

    def evaluate_and_check(self, meta: CheckpointMeta) -> bool:
        """Evaluates the validation split, if there is one. Returns whether the AUC has reached `stop_auc`."""
        if "validation" not in self.table.splits:
            return False
        try:
            findings = self.measure("validation", meta)
        except Stopped:
            return False
        self.on_evaluation()
        self.checkpoints.wait()
        path = self._checkpoint()
        good_enough = findings.undefined is None and self._judge(findings, meta, path)
        if self.world.first:  # only now, so that a run that is killed before does all of it again
            mark_evaluated(path, self.checkpoints.files)
        return good_enough

    def is_behind(self) -> bool:
        """Whether the newest checkpoint lacks its validation. All ranks get the same answer."""
        if "validation" not in self.table.splits:
            return False
        return not self.world.gather_objects(is_evaluated(self._checkpoint()))[0]

    def has_reached(self) -> bool:
        """Whether the newest checkpoint is the best one, and has reached `stop_auc`. All ranks get the same answer."""
        stop_auc, marked = self.config.stop_auc, best(self.checkpoints.folder)
        reached = (
            stop_auc is not None
            and marked is not None
            and marked[0] == self._checkpoint()
            and marked[1] >= stop_auc
        )
        if self.world.gather_objects(reached)[0]:
            self.journal.say(f"the AUC of {stop_auc} that was asked for was reached before: done")
            return True
        return False

    def _checkpoint(self) -> Path:
        return self.checkpoints.path or latest(self.checkpoints.folder)[0]

    def _judge(self, findings: Findings, meta: CheckpointMeta, path: Path) -> bool:
        """Warns of a poor result, and marks the checkpoint if it is the best. Returns whether it is good enough."""
        self._newest = findings
        self._by_heart = learned_by_heart(
            findings, epochs=self._epochs(meta), training_loss=self.training_loss
        )
        if warning := stuck(
            findings,
            step=meta.step,
            lr=self.config.optim.lr,
            after=self.config.stuck_after,
            by_heart=self._by_heart,
        ):
            self.journal.warn(meta.step, warning)
        auc = findings.quality.auc
        if auc is None:
            return False
        self._aucs[meta.step] = auc
        highest = max(self._aucs.values())
        noise = chance(findings.quality.rows, findings.positives) / 4  # a standard error
        if highest != self._fallen_from and (
            warning := falling(self._aucs, self.steps_per_epoch, noise)
        ):
            self._fallen_from = highest
            self.journal.warn(meta.step, warning)
        best_so_far = best(self.checkpoints.folder)
        if self.world.first and (best_so_far is None or auc > best_so_far[1]):
            mark_best(path, auc, self.checkpoints.files)
        good_enough = self.config.stop_auc is not None and auc >= self.config.stop_auc
        if good_enough:
            self.journal.event({"kind": "reached", "step": meta.step, "auc": auc})
            self.journal.say(
                f"AUC {auc:.5f} is the {self.config.stop_auc} that was asked for: done"
            )
        return good_enough

    def conclude(self, meta: CheckpointMeta) -> None:
        """Warns if the trained model's predictions on the validation split are biased."""
        if self._newest is not None:
            for text in bad_predictions(
                self._newest,
                step=meta.step,
                lr=self.config.optim.lr,
                steps_per_epoch=self.steps_per_epoch,
                by_heart=self._by_heart,
            ):
                self.journal.warn(meta.step, text)
