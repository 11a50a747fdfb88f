"""Evaluates during training: logs each result, compares it with the best, and explains a model that learns nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sluice.dlrm.checkpoint.meta import CheckpointMeta, best, latest, mark_best
from sluice.dlrm.config import Config
from sluice.dlrm.evaluation.diagnosis import stuck
from sluice.dlrm.evaluation.split import Findings, evaluate
from sluice.dlrm.training import loaders
from sluice.dlrm.training.input_checks import Guard
from sluice.dlrm.training.synced_batches import Stopped, SyncedBatches
from sluice.etl.table.table import FeatureTable

if TYPE_CHECKING:
    from sluice.dlrm.checkpoint.save_load import Checkpoints
    from sluice.dlrm.ranks import Ranks
    from sluice.dlrm.telemetry.journal import Journal, Silence
    from sluice.dlrm.training.assemble import TrainingParts

_FALLS = 0.002  # of AUC, within an epoch; less is noise


class Validator:
    """Evaluates splits of a table; called by all ranks together."""

    def __init__(self, *, config: Config, table: FeatureTable, parts: TrainingParts, world: Ranks,
                 journal: Journal | Silence,
                 checkpoints: Checkpoints, steps_per_epoch: int, gate: SyncedBatches,
                 on_evaluation: Callable[[], None] = lambda: None) -> None:
        """`on_evaluation()` is called after each evaluation of the validation split."""
        self._config, self._table, self._parts, self._world = config, table, parts, world
        self._journal, self._checkpoints = journal, checkpoints
        self._steps_per_epoch, self._gate, self._looked = steps_per_epoch, gate, on_evaluation
        self._aucs: dict[int, float] = {}
        """Step → AUC on the validation split."""

    def measure(self, split: str, meta: CheckpointMeta) -> Findings:
        """Evaluates a whole split; raises `Stopped` if the ranks are asked to stop meanwhile."""
        config, world = self._config, self._world
        sizes = {t.name: t.rows for t in self._parts.layout.columns}
        epochs = round(meta.epoch + (meta.step - meta.since) % self._steps_per_epoch / self._steps_per_epoch, 2)
        with loaders.evaluation(config, self._table, split, rank=world.rank, local_ranks=world.local_ranks) as batches:
            guard = Guard(sizes, batches.dense_names, f"split {split!r}", missing=config.missing)
            self._journal.milestone("eval_start", epochs)
            found = evaluate(self._parts, batches, guard, world, slices=config.slices, through=self._gate.whole)
        self._journal.metric({"kind": "eval", "epoch": meta.epoch, "step": meta.step, "split": split,
                              **found.quality.to_dict()})
        for column, ids in found.slices.items():
            for number, part in ids.items():
                self._journal.metric({"kind": "slice", "step": meta.step, "split": split, "column": column,
                                      "id": number, **part.to_dict()})
        self._journal.milestone("eval_accuracy", epochs, found.quality.auc)
        self._journal.milestone("eval_stop", epochs)
        self._journal.say(f"{split} after {epochs:g} epoch{'s' * (epochs != 1)}: {found.quality}")
        return found

    def evaluate_and_check(self, meta: CheckpointMeta) -> bool:
        """Evaluates the validation split, if there is one; True if the AUC at which training may end (`stop_auc`) is
        reached."""
        if "validation" not in self._table.splits:
            return False
        try:
            found = self.measure("validation", meta)
        except Stopped:
            return False
        self._looked()
        columns = len(self._parts.layout.columns)
        warning = stuck(found.evidence(meta.step, columns, self._config.optim.lr),
                        after=self._config.stuck_after)
        if warning:
            self._warn(meta, warning)
        auc = found.quality.auc
        if auc is None:
            return False
        before = self._aucs.get(meta.step - self._steps_per_epoch)
        if before is not None and auc < before - _FALLS:
            self._warn(meta, f"validation AUC fell from {before:.5f} to {auc:.5f} in an epoch: the same rows once more "
                             "are learned by heart; take fewer --epochs, a --stop-auc, or more data (`python -m "
                             "dlrm.evaluate --best` takes the best checkpoint)")
        self._aucs[meta.step] = auc
        self._checkpoints.wait()
        folder = self._checkpoints.folder
        so_far = best(folder)
        if self._world.first and (so_far is None or auc > so_far[1]):
            mark_best(self._checkpoints.path or latest(folder)[0], auc, self._checkpoints.files)
        reached = self._config.stop_auc is not None and auc >= self._config.stop_auc
        if reached:
            self._journal.event({"kind": "reached", "step": meta.step, "auc": auc})
            self._journal.say(f"AUC {auc:.5f} is the {self._config.stop_auc} that was asked for: done")
        return reached

    def _warn(self, meta: CheckpointMeta, text: str) -> None:
        self._journal.event({"kind": "warning", "step": meta.step, "text": text})
        self._journal.say(f"warning: {text}")
