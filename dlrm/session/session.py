"""Trains on one version of the table after the other: `TrainingSession`, one on each rank.

All ranks take the same steps in the same order, because they exchange data in many of them."""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from sluice.agent.controller import Controller
from sluice.agent.report import page, run_folder
from sluice.agent.report.story import Story, last_lines
from sluice.agent.runtime.knob_memory import KnobMemory
from sluice.common.lines import say
from sluice.dlrm.checkpoint.checkpoint import Checkpoint
from sluice.dlrm.checkpoint.meta import CheckpointMeta, NotFinite, check, complete_checkpoints
from sluice.dlrm.checkpoint.saving import Checkpoints
from sluice.dlrm.evaluation.validation import Validator
from sluice.dlrm.follow import versions
from sluice.dlrm.follow.transplant import transplant
from sluice.dlrm.footprint import Footprint
from sluice.dlrm.foreign_table import ForeignTable
from sluice.dlrm.liveness import Activity
from sluice.dlrm.options import Config
from sluice.dlrm.ranks import Ranks, machine
from sluice.dlrm.session.check import early_warnings, left_out
from sluice.dlrm.session.run import TrainingRun
from sluice.dlrm.session.trainer import Trainer
from sluice.dlrm.telemetry.journal import Journal
from sluice.dlrm.telemetry.prometheus import Endpoint, served
from sluice.dlrm.training import assemble, loaders
from sluice.dlrm.training.input_checks import BatchChecker
from sluice.dlrm.training.step_figures import StepFigures
from sluice.dlrm.training.synced_batches import Stopped, SyncedBatches
from sluice.dlrm.watchdog import Watchdog
from sluice.etl.table.pins import PinKeeper
from sluice.etl.table.table import LostVersion
from sluice.ingest.knobs import Knobs
from sluice.ingest.loader import BatchLoader
from sluice.ingest.stats import core_s_per_million


@dataclass(kw_only=True)
class TrainingSession:
    """A context that is open during a run. Its end releases the run folder and the table."""

    run: TrainingRun
    """The run on the version that is trained on."""
    ranks: Ranks
    watchdog: Watchdog
    activity: Activity
    _pins: PinKeeper | None = None
    """Keeps versions of the table from being vacuumed. Only the first rank has it."""
    _evaluations: int = 0

    def __enter__(self) -> TrainingSession:
        # Another process with this run folder also has the port, so the folder is checked first.
        if self.ranks.first:
            run_folder.check_unused(self.run.folder)
        self.endpoint = Endpoint(self.ranks.rank)
        self.journal = Journal(self.endpoint)
        with ExitStack() as stack:
            stack.enter_context(
                served(self.endpoint, self.run.config.metrics_port, self.ranks.local_rank)
            )
            if self.ranks.first:
                self._pins = stack.enter_context(PinKeeper(f"train-{self.run.folder.name}", say))
                self.watchdog.ending.cleanup = self._pins.release
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def pin_start(self, open_on: Callable[[int | None], TrainingRun]) -> None:
        """Keeps the first version from being vacuumed. All ranks get the first rank's version. `open_on` returns the
        run on a version, or on the newest. A run that follows takes the newest if its version is gone."""
        while self._pins is not None and not isinstance(self.run.table, ForeignTable):
            try:
                self._pins.take(self.run.table.uri, self.run.table.version)
                break
            except LostVersion:
                if self.run.config.follow != "epochs":
                    raise
                self.run = open_on(None)
        version = self.ranks.gather_objects(self.run.table.version)[0]
        if version != self.run.table.version:
            self.run = open_on(version)

    def train_versions(self) -> dict[str, Any]:
        """Trains on one version of the table after the other, until none follows. Returns the result of the last
        one."""
        while (result := self._train_version()) is None:
            gc.collect()  # The model of the version before is freed before the next one is made.
        return {**result, "ranks": self.ranks.ranks, "run": str(self.run.folder)}

    def report(self, result: dict[str, Any]) -> None:
        """Says how the run went, and writes its page, which `result` then names. The first rank calls this after the
        session's end."""
        for line in last_lines(result["outcome"]):
            say(line)
        written = page.written(self.run.folder, say)
        result["report"] = None if written is None else str(written)

    def _open_folder(self) -> None:
        """Makes the run folder, or goes on with it. Does nothing if it is open."""
        if self.ranks.first and self.journal.looks is None:
            record = {"kind": "train", **self.run.config.to_dict()}
            self.journal.open(
                run_folder.RunFolder.create(
                    self.run.folder, record, resume=self.run.options.goes_on
                )
            )
            self._stack.callback(self.journal.close)

    def _on_evaluation(self) -> None:
        """Called on every rank after each evaluation of the validation split. Stops the run where it should pause."""
        self._evaluations += 1
        if self._evaluations == self.run.options.pause:
            self.watchdog.stop.set()

    def _follow(self, meta: CheckpointMeta) -> bool:
        """Moves the run, whose progress is `meta`, to the next version if there is one. All ranks get the same
        answer."""
        config, ranks = self.run.config, self.ranks
        with ExitStack() as moving:
            version = None
            # The first rank keeps both versions from being vacuumed until all ranks have moved.
            while self._pins and (version := versions.next_version(config, meta)) is not None:
                try:
                    moving.enter_context(self._pins.moving(config.data, version))
                    break
                except LostVersion:
                    if config.follow != "epochs":
                        raise
            version = ranks.gather_objects(version)[0]
            if version is None:
                return False
            self.run = self.run.on_version(version)
            ranks.barrier()  # Until here, some rank reads files of the version before.
            return True

    def _train_version(self) -> dict[str, Any] | None:
        """Trains on the version of the session's run. Returns the result. None: the run has moved to the next
        version."""
        started_at, run, ranks = time.perf_counter(), self.run, self.ranks
        config = replace(run.config, epochs=versions.epochs_of(run.config, run.meta))
        plan = Footprint.of(config, run.table, machine(ranks.ranks, ranks.local_ranks))
        conditions = loaders.conditions(config, run.folder, ranks.rank)
        with ExitStack() as stack:
            loader = stack.enter_context(
                loaders.training(
                    config,
                    run.table,
                    rank=ranks.rank,
                    local_ranks=ranks.local_ranks,
                    conditions=conditions,
                )
            )
            self.watchdog.workers = loader.pipeline.stacks
            self.endpoint.show_loader(loader, run.table.version)
            stack.callback(self.endpoint.show_loader, None, run.table.version)
            self._open_folder()
            journal = self.journal
            needs = f"a rank's loader needs at least {loader.memory_need}"
            for line in (plan.text, run.chosen, left_out(loader.plan), needs):
                if line:
                    journal.say(line)
            knob_memory = KnobMemory(loader, config, say=journal.say, ranks=ranks.local_ranks)
            knobs_known = knob_memory.start()
            trainer = self._make_trainer(loader, plan, config)
            stack.callback(trainer.checkpoints.close)
            self._restore(trainer, knobs_known=knobs_known)
            self._report_start(trainer, plan, time.perf_counter() - started_at)
            # No collection has run since the program began. None will visit what exists now: it lives as long as the
            # model.
            gc.freeze()
            stack.callback(gc.unfreeze)
            gc.enable()
            if config.follow == "parts" and run.changes is not None:
                journal.say("before it is trained on:")
                with suppress(Stopped):
                    trainer.validator.measure("train", run.meta)
            with conditions.inject_faults(loader, journal.event):
                controller = self._train_and_tune(trainer, knob_memory)
            loader.close()  # The evaluation needs its threads and memory.
            ended = trainer.synced_batches.stopped or trainer.good_enough
            if not ended and self._follow(trainer.meta):
                return None
            result = {
                **self._evaluate_at_end(trainer),
                "decisions": controller.decisions if controller else 0,
                "version": run.table.version,
                "bytes_per_step": plan.bytes_per_step,
                "input": conditions.outcome(loader),
            }
            if ranks.first:
                result["outcome"] = Story.read(run.folder, result).summary
            journal.event({"kind": "end", **result})
        return {**result, "plan": {p.name: [p.kind, *p.ranks] for p in plan.placement.places}}

    def _make_trainer(self, loader: BatchLoader, plan: Footprint, config: Config) -> Trainer:
        """Makes the model with its first weights, the parts that a step calls, and the trainer that calls them."""
        run, ranks, journal = self.run, self.ranks, self.journal
        parts = assemble.parts_of(
            config, plan.layout, len(loader.dense_names), plan.placement, ranks
        )
        checkpoints = Checkpoints(
            run.checkpoints, parts, ranks, keep=config.keep, record=journal.event
        )
        batches = SyncedBatches(ranks, self.watchdog.stop.is_set, activity=self.activity)
        self.watchdog.end_wait = batches.end_wait
        validator = Validator(
            config=config,
            table=run.table,
            parts=parts,
            world=ranks,
            journal=journal,
            checkpoints=checkpoints,
            steps_per_epoch=len(loader),
            synced_batches=batches,
            on_evaluation=self._on_evaluation,
        )
        return Trainer(
            config=config,
            meta=run.meta,
            world=ranks,
            parts=parts,
            checker=BatchChecker.of(plan.layout, loader, "train"),
            feed=loader,
            synced_batches=batches,
            checkpoints=checkpoints,
            validator=validator,
            journal=journal,
            figures=StepFigures(ranks, ranks.gather_objects(platform.node())),
        )

    def _restore(self, trainer: Trainer, *, knobs_known: bool) -> None:
        """Loads the run's checkpoint into the model and the loader, if there is one. `knobs_known`: the registry had
        the loader's knobs."""
        run, loader, journal = self.run, trainer.feed, self.journal
        meta, changes = run.meta, run.changes
        if run.seen:
            journal.warn(meta.step, run.seen)
        if run.checkpoint is None:
            return
        newest = list(complete_checkpoints(run.checkpoints))[-1]
        if newest != run.checkpoint.name:
            journal.warn(
                meta.step, f"LATEST names {run.checkpoint.name}, although {newest} was saved later"
            )
        if changes is not None:
            journal.say(changes.text)
            check(run.checkpoint, self.ranks)
            transplant(run.checkpoint, trainer.parts, after=meta, changes=changes)
            loader.load_state_dict({**loader.state_dict(), "epoch": meta.epoch})
        else:
            Checkpoint(run.checkpoint).load(trainer.parts, self.ranks)
            # Without a position, as `sluice forget` leaves it, the epoch begins.
            loader.load_state_dict(meta.loader or {**loader.state_dict(), "epoch": meta.epoch})
            epochs = trainer.config.epochs
            if meta.epoch < epochs:
                journal.say(f"going on from step {meta.step} (epoch {meta.epoch} of {epochs})")
            elif trainer.config.follow == "parts":
                journal.say(f"nothing left to train: version {meta.version} is done")
            else:
                journal.say(f"nothing left to train: --epochs {epochs} are done")
        # The registry scales its knobs to a changed table.
        if meta.knobs and not (trainer.config.knobs if changes is None else knobs_known):
            loader.apply(loader.limits.clamp(Knobs.from_dict(meta.knobs)))
        if differs := meta.other_software():
            journal.say(differs)

    def _report_start(self, trainer: Trainer, plan: Footprint, seconds: float) -> None:
        """Reports what is trained, from where on, and with which plan. `seconds` were needed to begin."""
        run, feed, journal = self.run, trainer.feed, self.journal
        meta, table = run.meta, run.table
        if run.changes is None:
            began = {
                "kind": "start",
                "ranks": self.ranks.ranks,
                "resumed_at": meta.step,
                "data": table.uri,
                "version": table.version,
                "reader": feed.reader,
            }
        else:
            began = {
                "kind": "follow",
                "step": meta.step,
                "epoch": meta.epoch,
                "seconds": round(seconds, 3),
                **run.changes.to_dict(),
            }
        steps = meta.steps_in_all(len(feed), trainer.config.epochs)
        journal.event({**began, "steps": steps, **plan.to_dict()})
        for text in early_warnings(trainer.config, table, feed.plan, feed.huge_group):
            journal.warn(meta.step, text)
        journal.say(trainer.checkpoints.memory().text)

    def _train_and_tune(self, trainer: Trainer, knob_memory: KnobMemory) -> Controller | None:
        """Trains with the agent until the last epoch or an early end. Returns the agent."""
        run, loader = self.run, trainer.feed
        with assemble.tuned(
            trainer.config,
            loader,
            self.ranks.apart(f"version {run.table.version}"),
            knob_memory,
            self.journal,
            agent=run.meta.agent,
        ) as controller:
            trainer.tuning = lambda: {
                "knobs": loader.knobs.to_dict(),
                "agent": assemble.agent_of(controller, knob_memory),
            }
            try:
                self.watchdog.saved.clear()
                trainer.train()
                trainer.checkpoints.wait()
                self.watchdog.saved.set()
            except NotFinite as error:  # on all ranks
                raise trainer.guard.error(str(error)) from None
        return controller

    def _evaluate_at_end(self, trainer: Trainer) -> dict[str, Any]:
        """Evaluates the model on its test split, unless the run was asked to stop. Returns the figures of the run."""
        meta, splits, timed = trainer.meta, self.run.table.splits, trainer.figures
        figures: dict[str, Any] = dict.fromkeys(("auc", "ne", "logloss", "calibration", "rows"))
        split = None
        if not trainer.synced_batches.stopped:
            trainer.validator.conclude(meta)
            split = next((s for s in ("test", "validation") if s in splits), None)
            with suppress(Stopped):
                if split:
                    figures = trainer.validator.measure(split, meta).quality.to_dict()
        stopped = trainer.synced_batches.stopped
        if stopped:
            self.journal.say(
                f"asked to stop: saved at step {meta.step}"
                if meta.step
                else "asked to stop before the first step: there is nothing to save"
            )
        set_aside = trainer.feed.quarantined["rows_set_aside"]
        seen = trainer.feed.snapshot()
        core_s = core_s_per_million(seen.stages, seen.rows)
        own = (timed.peak_bytes, timed.first_batch_s or 0.0, core_s, set_aside)
        peaks_bytes, first_batches_s, cores_s, rows_set_aside = zip(
            *self.ranks.gather_objects(own), strict=True
        )
        return {
            **figures,
            "samples_per_s": round(timed.samples_per_s, 1),
            "stall_fraction": round(timed.stall, 5),
            "first_batch_s": round(max(first_batches_s), 3),
            "core_s_per_million": round(statistics.fmean(cores_s), 3),
            "peak_bytes": sum(peaks_bytes),
            "steps": meta.step,
            "epochs": meta.epoch,
            "rows_trained": meta.rows,
            "batches_skipped": meta.skipped,
            "stopped": stopped,
            "split": split,
            "rows_set_aside": sum(rows_set_aside),
        }
