"""Trains on one version of the table, from its first batch to its last evaluation."""

from __future__ import annotations

import platform
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from sluice.agent.controller import Controller
from sluice.agent.report.narrative import summary
from sluice.agent.report.run_folder import Run
from sluice.agent.runtime.knob_memory import KnobMemory
from sluice.dlrm import run_plan
from sluice.dlrm.checkpoint.checkpoint import Checkpoint
from sluice.dlrm.checkpoint.meta import NotFinite, check
from sluice.dlrm.checkpoint.saving import Checkpoints
from sluice.dlrm.evaluation.validation import Validator
from sluice.dlrm.follow import versions
from sluice.dlrm.follow.transplant import transplant
from sluice.dlrm.ranks import machine
from sluice.dlrm.session.early_warnings import early_warnings, left_out
from sluice.dlrm.session.run import TrainingRun
from sluice.dlrm.session.session import TrainingSession
from sluice.dlrm.session.trainer import Trainer, TrainingOutcome
from sluice.dlrm.training import assemble, loaders
from sluice.dlrm.training.input_checks import BatchChecker, check_files
from sluice.dlrm.training.profiler import traced
from sluice.dlrm.training.synced_batches import Stopped, SyncedBatches
from sluice.ingest.knobs import Knobs


class VersionRun:
    """The part of a run on one version. All ranks take the same steps in the same order, because they exchange data
    in many of them."""

    def __init__(self, session: TrainingSession, run: TrainingRun) -> None:
        self._started_at = time.perf_counter()
        self._session = session
        self._run = run
        self._ranks = session.ranks
        self._config = replace(run.config, epochs=versions.epochs_of(run.config, run.meta))
        self._table = run.table
        ranks = self._ranks
        self._planned = run_plan.plan_run(
            self._config, self._table, machine(ranks.ranks, ranks.local_ranks)
        )
        check_files(self._table, ranks.rank, ranks.ranks)
        self._conditions = loaders.conditions(
            self._config, run.folder, ranks.rank, ranks.local_ranks
        )

    def train(self) -> tuple[dict[str, Any], TrainingRun | None]:
        """Trains and evaluates. Returns the result, or the run on the next version if there is one."""
        with ExitStack() as stack:
            self._open_loader(stack)
            self._prepare_model()
            self._prepare_evaluation(stack)
            if self._config.follow == "parts" and self._run.changes is not None:
                self._journal.say("before it is trained on:")
                with suppress(Stopped):
                    self._validator.measure("train", self._run.meta)
            outcome, controller = self._train_and_tune()
            self._loader.close()  # The evaluation needs its threads and memory.
            if not (outcome.stopped or outcome.good_enough):
                following = self._session.following(self._run, outcome.meta)
                if following is not None:
                    return {}, following
            set_aside = self._ranks.gather_objects(self._loader.quarantined["rows_set_aside"])
            result = {
                **self._evaluate_at_end(outcome),
                "decisions": controller.decisions if controller else 0,
                "opening": controller.opening if controller else None,
                "version": self._table.version,
                "bytes_per_step": self._planned.bytes_per_step,
                "masked": run_plan.masked(self._planned.layout, self._ranks),
                "rows_set_aside": sum(set_aside),
                "input": self._conditions.outcome(self._loader),
            }
            if self._ranks.first:
                result["outcome"] = summary(Run.read(self._run.folder), result)
            self._journal.event({"kind": "end", **result})
        plan = {p.name: [p.kind, *p.ranks] for p in self._planned.placement.places}
        return {**result, "plan": plan}, None

    def _open_loader(self, stack: ExitStack) -> None:
        """Opens the loader, reports the plan of the training, and shows its progress at the endpoint."""
        self._loader = loader = stack.enter_context(
            loaders.training(
                self._config,
                self._table,
                rank=self._ranks.rank,
                local_ranks=self._ranks.local_ranks,
                conditions=self._conditions,
            )
        )
        self._session.signals.workers = loader.stacks
        cleanups = self._session.ending.cleanups
        cleanups.append(self._conditions.give_back)
        stack.callback(cleanups.remove, self._conditions.give_back)
        endpoint = self._session.endpoint
        self._journal = self._session.journal()
        self._journal.expect(self._run.meta.steps_in_all(len(loader), self._config.epochs))
        endpoint.show_loader(loader, self._table.version)
        stack.callback(endpoint.show_loader, None, self._table.version)
        self._journal.say(self._planned.text)
        for line in (self._run.chosen, left_out(loader.plan)):
            if line:
                self._journal.say(line)
        self._journal.say(f"a rank's loader needs at least {loader.memory_need}")

    def _prepare_model(self) -> None:
        loader = self._loader
        self._knob_memory = KnobMemory(
            loader, self._config, say=self._journal.say, ranks=self._ranks.local_ranks
        )
        knobs_known = self._knob_memory.start()
        self._parts = assemble.parts_of(
            self._config,
            self._planned.layout,
            len(loader.dense_names),
            self._planned.placement,
            self._ranks,
            steps_per_epoch=len(loader),
        )
        self._restore(knobs_known=knobs_known)
        run = self._run
        progress = (
            {
                "kind": "start",
                "ranks": self._ranks.ranks,
                "steps": run.meta.steps_in_all(len(loader), self._config.epochs),
                "resumed_at": run.meta.step,
                "data": self._table.uri,
                "version": self._table.version,
                "reader": loader.reader,
            }
            if run.changes is None
            else {
                "kind": "follow",
                "step": run.meta.step,
                "epoch": run.meta.epoch,
                "seconds": round(time.perf_counter() - self._started_at, 3),
                **run.changes.to_dict(),
            }
        )
        self._journal.event({**progress, **self._planned.to_dict()})
        for text in early_warnings(self._config, self._table, loader.plan):
            self._journal.warn(run.meta.step, text)

    def _prepare_evaluation(self, stack: ExitStack) -> None:
        session = self._session
        self._checkpoints = Checkpoints(
            self._run.folder / "checkpoints",
            self._parts,
            self._ranks,
            keep=self._config.keep,
            record=self._journal.event,
        )
        stack.callback(self._checkpoints.close)
        self._journal.say(self._checkpoints.memory().text)
        self._batches = SyncedBatches(
            self._ranks, session.signals.stop.is_set, activity=session.activity
        )
        session.signals.end_wait = self._batches.end_wait
        self._validator = Validator(
            config=self._config,
            table=self._table,
            parts=self._parts,
            world=self._ranks,
            journal=self._journal,
            checkpoints=self._checkpoints,
            steps_per_epoch=len(self._loader),
            synced_batches=self._batches,
            on_evaluation=session.on_evaluation,
        )

    def _restore(self, *, knobs_known: bool) -> None:
        """Loads the checkpoint into the model and the loader, if there is one. `knobs_known`: the registry had the
        loader's knobs."""
        run = self._run
        journal = self._journal
        loader = self._loader
        if run.seen:
            journal.warn(run.meta.step, run.seen)
        if run.checkpoint is None:
            return
        if run.changes is not None:
            journal.say(run.changes.text)
            check(run.checkpoint, self._ranks)
            transplant(run.checkpoint, self._parts, after=run.meta, changes=run.changes)
            loader.load_state_dict({**loader.state_dict(), "epoch": run.meta.epoch})
        else:
            Checkpoint(run.checkpoint).load(self._parts, self._ranks)
            loader.load_state_dict(run.meta.loader)
            meta, config = run.meta, self._config
            if meta.epoch < config.epochs:
                journal.say(
                    f"going on from step {meta.step} (epoch {meta.epoch} of {config.epochs})"
                )
            elif config.follow == "parts":
                journal.say(f"nothing left to train: version {meta.version} is done")
            else:
                journal.say(f"nothing left to train: --epochs {config.epochs} are done")
        # The registry scales its knobs to a changed table.
        if run.meta.knobs and (
            not knobs_known if run.changes is not None else not self._config.knobs
        ):
            loader.apply(loader.limits.clamp(Knobs.from_dict(run.meta.knobs)))
        if differs := run.meta.other_software():
            journal.say(differs)

    def _train_and_tune(self) -> tuple[TrainingOutcome, Controller | None]:
        """Trains with the agent until the last epoch or an early end. Returns the outcome and the agent."""
        config = self._config
        journal = self._journal
        loader = self._loader
        with (
            self._conditions.inject_faults(loader, journal.event),
            assemble.tuned(
                config,
                loader,
                self._ranks.apart(f"version {self._table.version}"),
                self._knob_memory,
                journal,
                say=self._session.say,
                agent=self._run.meta.agent,
            ) as controller,
            traced(config.profile if self._ranks.first else 0, self._run.folder) as tick,
        ):
            trainer = Trainer(
                config=config,
                world=self._ranks,
                parts=self._parts,
                checker=BatchChecker.of(self._planned.layout, loader, "train", config.missing),
                feed=loader,
                synced_batches=self._batches,
                checkpoints=self._checkpoints,
                validator=self._validator,
                journal=journal,
                tuning=lambda: {
                    "knobs": loader.knobs.to_dict(),
                    "agent": assemble.agent_of(controller, self._knob_memory),
                },
                tick=tick,
                hosts=self._ranks.gather_objects(platform.node()),
            )
            try:
                self._session.signals.saved.clear()
                outcome = trainer.train(self._run.meta)
                self._checkpoints.wait()
                self._session.signals.saved.set()
            except NotFinite as error:  # on all ranks
                raise trainer.guard.error(str(error)) from None
        return outcome, controller

    def _evaluate_at_end(self, outcome: TrainingOutcome) -> dict[str, Any]:
        """Evaluates the model on its test split, unless the run was asked to stop. Returns the metrics of the run."""
        if not outcome.stopped:
            self._validator.conclude(outcome.meta)
        split = (
            None
            if outcome.stopped
            else next((s for s in ("test", "validation") if s in self._table.splits), None)
        )
        quality = None
        try:
            quality = self._validator.measure(split, outcome.meta).quality if split else None
        except Stopped:
            outcome = replace(outcome, stopped=True)
        if outcome.stopped:
            self._journal.say(
                f"asked to stop: saved at step {outcome.meta.step}"
                if outcome.meta.step
                else "asked to stop before the first step: there is nothing to save"
            )
        peaks_bytes = self._ranks.gather_objects(outcome.peak_bytes)
        first_batches_s = self._ranks.gather_objects(outcome.first_batch_s or 0.0)
        figures = (
            dict.fromkeys(("auc", "ne", "logloss", "calibration", "rows"))
            if quality is None
            else quality.to_dict()
        )
        return {
            **figures,
            "samples_per_s": round(outcome.timing.samples_per_s, 1),
            "stall_fraction": round(outcome.timing.stall, 5),
            "first_batch_s": round(max(first_batches_s), 3),
            "peak_bytes": sum(peaks_bytes),
            "steps": outcome.meta.step,
            "epochs": outcome.meta.epoch,
            "rows_trained": outcome.meta.rows,
            "batches_skipped": outcome.meta.skipped,
            "stopped": outcome.stopped,
            "split": split,
        }
