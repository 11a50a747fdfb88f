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
        self._ranks = ranks = session.ranks
        self._config = config = replace(run.config, epochs=versions.epochs_of(run.config, run.meta))
        self._planned = run_plan.plan_run(
            config, run.table, machine(ranks.ranks, ranks.local_ranks)
        )
        check_files(run.table, ranks.rank, ranks.ranks)
        self._conditions = loaders.conditions(config, run.folder, ranks.rank)

    def train(self) -> tuple[dict[str, Any], TrainingRun | None]:
        """Trains and evaluates. Returns the result, or the run on the next version if there is one."""
        run, planned = self._run, self._planned
        with ExitStack() as stack:
            self._open_loader(stack)
            self._make_model(stack)
            if self._config.follow == "parts" and run.changes is not None:
                self._journal.say("before it is trained on:")
                with suppress(Stopped):
                    self._validator.measure("train", run.meta)
            outcome, controller = self._train_and_tune()
            self._loader.close()  # The evaluation needs its threads and memory.
            if not (outcome.stopped or outcome.good_enough):
                following = self._session.following(run, outcome.meta)
                if following is not None:
                    return {}, following
            result = {
                **self._evaluate_at_end(outcome),
                "decisions": controller.decisions if controller else 0,
                "opening": controller.opening if controller else None,
                "version": run.table.version,
                "bytes_per_step": planned.bytes_per_step,
                "masked": run_plan.masked(planned.layout, self._ranks),
                "input": self._conditions.outcome(self._loader),
            }
            if self._ranks.first:
                result["outcome"] = summary(Run.read(run.folder), result)
            self._journal.event({"kind": "end", **result})
        plan = {p.name: [p.kind, *p.ranks] for p in planned.placement.places}
        return {**result, "plan": plan}, None

    def _open_loader(self, stack: ExitStack) -> None:
        """Opens the loader, reports the plan of the training, and shows its progress at the endpoint."""
        session, run, config, ranks = self._session, self._run, self._config, self._ranks
        self._loader = loader = stack.enter_context(
            loaders.training(
                config,
                run.table,
                rank=ranks.rank,
                local_ranks=ranks.local_ranks,
                conditions=self._conditions,
            )
        )
        session.signals.workers = loader.stacks
        self._journal = journal = session.journal()
        self._steps = run.meta.steps_in_all(len(loader), config.epochs)
        journal.expect(self._steps)
        session.endpoint.show_loader(loader, run.table.version)
        stack.callback(session.endpoint.show_loader, None, run.table.version)
        needs = f"a rank's loader needs at least {loader.memory_need}"
        for line in (self._planned.text, run.chosen, left_out(loader.plan), needs):
            if line:
                journal.say(line)

    def _make_model(self, stack: ExitStack) -> None:
        """Makes the model, as it was saved if it was, and what saves and judges it."""
        session, run, config, ranks = self._session, self._run, self._config, self._ranks
        loader, planned, journal = self._loader, self._planned, self._journal
        self._knob_memory = KnobMemory(loader, config, say=journal.say, ranks=ranks.local_ranks)
        knobs_known = self._knob_memory.start()
        self._parts = parts = assemble.parts_of(
            config,
            planned.layout,
            len(loader.dense_names),
            planned.placement,
            ranks,
            steps_per_epoch=len(loader),
        )
        self._restore(knobs_known=knobs_known)
        journal.event({**self._describe_start(), **planned.to_dict()})
        for text in early_warnings(config, run.table, loader.plan):
            journal.warn(run.meta.step, text)
        self._checkpoints = Checkpoints(
            run.folder / "checkpoints", parts, ranks, keep=config.keep, record=journal.event
        )
        stack.callback(self._checkpoints.close)
        journal.say(self._checkpoints.memory().text)
        self._batches = SyncedBatches(ranks, session.signals.stop.is_set, activity=session.activity)
        session.signals.end_wait = self._batches.end_wait
        self._validator = Validator(
            config=config,
            table=run.table,
            parts=parts,
            world=ranks,
            journal=journal,
            checkpoints=self._checkpoints,
            steps_per_epoch=len(loader),
            synced_batches=self._batches,
            on_evaluation=session.on_evaluation,
        )

    def _describe_start(self) -> dict[str, Any]:
        """Returns the event with which training on this version begins."""
        run = self._run
        if run.changes is None:
            return {
                "kind": "start",
                "ranks": self._ranks.ranks,
                "steps": self._steps,
                "resumed_at": run.meta.step,
                "data": run.table.uri,
                "version": run.table.version,
                "reader": self._loader.reader,
            }
        return {
            "kind": "follow",
            "step": run.meta.step,
            "epoch": run.meta.epoch,
            "seconds": round(time.perf_counter() - self._started_at, 3),
            **run.changes.to_dict(),
        }

    def _restore(self, *, knobs_known: bool) -> None:
        """Loads the checkpoint into the model and the loader, if there is one. `knobs_known`: the registry had the
        loader's knobs."""
        run, config, journal, loader = self._run, self._config, self._journal, self._loader
        meta, changes = run.meta, run.changes
        if run.seen:
            journal.warn(meta.step, run.seen)
        if run.checkpoint is None:
            return
        if changes is not None:
            journal.say(changes.text)
            check(run.checkpoint, self._ranks)
            transplant(run.checkpoint, self._parts, after=meta, changes=changes)
            loader.load_state_dict({**loader.state_dict(), "epoch": meta.epoch})
        else:
            Checkpoint(run.checkpoint).load(self._parts, self._ranks)
            loader.load_state_dict(meta.loader)
            if meta.epoch < config.epochs:
                journal.say(
                    f"going on from step {meta.step} (epoch {meta.epoch} of {config.epochs})"
                )
            elif config.follow == "parts":
                journal.say(f"nothing left to train: version {meta.version} is done")
            else:
                journal.say(f"nothing left to train: --epochs {config.epochs} are done")
        # The registry scales its knobs to a changed table.
        if meta.knobs and not (config.knobs if changes is None else knobs_known):
            loader.apply(loader.limits.clamp(Knobs.from_dict(meta.knobs)))
        if differs := meta.other_software():
            journal.say(differs)

    def _train_and_tune(self) -> tuple[TrainingOutcome, Controller | None]:
        """Trains with the agent until the last epoch or an early end. Returns the outcome and the agent."""
        session, run, config, ranks = self._session, self._run, self._config, self._ranks
        loader, journal = self._loader, self._journal
        with (
            self._conditions.inject_faults(loader, journal.event),
            assemble.tuned(
                config,
                loader,
                ranks.apart(f"version {run.table.version}"),
                self._knob_memory,
                journal,
                say=session.say,
                agent=run.meta.agent,
            ) as controller,
            traced(config.profile if ranks.first else 0, run.folder) as tick,
        ):
            trainer = Trainer(
                config=config,
                world=ranks,
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
                hosts=ranks.gather_objects(platform.node()),
            )
            try:
                session.signals.saved.clear()
                outcome = trainer.train(run.meta)
                self._checkpoints.wait()
                session.signals.saved.set()
            except NotFinite as error:  # on all ranks
                raise trainer.guard.error(str(error)) from None
        return outcome, controller

    def _evaluate_at_end(self, outcome: TrainingOutcome) -> dict[str, Any]:
        """Evaluates the model on its test split, unless the run was asked to stop. Returns the figures of the run."""
        meta, splits = outcome.meta, self._run.table.splits
        figures: dict[str, Any] = dict.fromkeys(("auc", "ne", "logloss", "calibration", "rows"))
        split = None
        if not outcome.stopped:
            self._validator.conclude(meta)
            split = next((s for s in ("test", "validation") if s in splits), None)
            try:
                if split:
                    figures = self._validator.measure(split, meta).quality.to_dict()
            except Stopped:
                outcome.stopped = True
        if outcome.stopped:
            self._journal.say(
                f"asked to stop: saved at step {meta.step}"
                if meta.step
                else "asked to stop before the first step: there is nothing to save"
            )
        set_aside = self._loader.quarantined["rows_set_aside"]
        peaks_bytes, first_batches_s, rows_set_aside = zip(
            *self._ranks.gather_objects(
                (outcome.peak_bytes, outcome.first_batch_s or 0.0, set_aside)
            ),
            strict=True,
        )
        return {
            **figures,
            "samples_per_s": round(outcome.timing.samples_per_s, 1),
            "stall_fraction": round(outcome.timing.stall, 5),
            "first_batch_s": round(max(first_batches_s), 3),
            "peak_bytes": sum(peaks_bytes),
            "steps": meta.step,
            "epochs": meta.epoch,
            "rows_trained": meta.rows,
            "batches_skipped": meta.skipped,
            "stopped": outcome.stopped,
            "split": split,
            "rows_set_aside": sum(rows_set_aside),
        }
