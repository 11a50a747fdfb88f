"""Evaluates during training: logs each result, compares it with the best, and explains a model that learns nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sluice.dlrm.checkpoint.meta import CheckpointMeta, best, latest, mark_best
from sluice.dlrm.checkpoint.saving import Checkpoints
from sluice.dlrm.evaluation.diagnosis import (
    bad_predictions,
    chance,
    falling,
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

    def __post_init__(self) -> None:
        self._aucs: dict[int, float] = {}
        """Step → AUC on the validation split."""
        self._newest: Findings | None = None
        """Those of the newest evaluation of the validation split."""
        self._singles: Mapping[str, float] | None = None
        """Column → AUC of this column alone. It is None until a split other than training is evaluated."""
        self._fallen_from = -1.0
        """The best AUC before the last fall that was reported."""

    def measure(self, split: str, meta: CheckpointMeta) -> Findings:
        """Evaluates a whole split. Raises `Stopped` if the ranks are asked to stop meanwhile."""
        config, world = self.config, self.world
        began = time.monotonic()
        epochs = round(
            meta.epoch + (meta.step - meta.since) % self.steps_per_epoch / self.steps_per_epoch, 2
        )
        with loaders.evaluation(
            config, self.table, split, rank=world.rank, local_ranks=world.local_ranks
        ) as batches:
            singles = SingleColumns(batches.dense_names, batches.sparse_names, world)
            is_first = self._singles is None and split != "train"
            findings = evaluate(
                self.parts,
                batches,
                split,
                world,
                singles=singles if is_first else None,
                through=self.synced_batches.all_of,
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

    def evaluate_and_check(self, meta: CheckpointMeta) -> bool:
        """Evaluates the validation split, if there is one. Returns whether the AUC has reached `stop_auc`."""
        if "validation" not in self.table.splits:
            return False
        try:
            findings = self.measure("validation", meta)
        except Stopped:
            return False
        self.on_evaluation()
        if findings.undefined is not None:
            return False
        self._newest = findings
        lr, after = self.config.optim.lr, self.config.stuck_after
        if warning := stuck(findings, step=meta.step, lr=lr, after=after):
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
        self.checkpoints.wait()
        folder = self.checkpoints.folder
        best_so_far = best(folder)
        if self.world.first and (best_so_far is None or auc > best_so_far[1]):
            mark_best(self.checkpoints.path or latest(folder)[0], auc, self.checkpoints.files)
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
            ):
                self.journal.warn(meta.step, text)
