"""Trains on one version of the table, from its first batch to its last evaluation: `train_version`."""

from __future__ import annotations

import gc
import platform
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from sluice.agent.controller import Controller
from sluice.agent.report import run_folder
from sluice.agent.report.narrative import summary
from sluice.agent.runtime.knob_memory import KnobMemory
from sluice.dlrm import run_plan
from sluice.dlrm.checkpoint.checkpoint import Checkpoint
from sluice.dlrm.checkpoint.meta import NotFinite, check, complete_checkpoints
from sluice.dlrm.checkpoint.saving import Checkpoints
from sluice.dlrm.evaluation.validation import Validator
from sluice.dlrm.follow import versions
from sluice.dlrm.follow.transplant import transplant
from sluice.dlrm.options import Config
from sluice.dlrm.ranks import machine
from sluice.dlrm.session.check import early_warnings, left_out
from sluice.dlrm.session.run import TrainingRun
from sluice.dlrm.session.train import TrainingSession
from sluice.dlrm.session.trainer import Trainer
from sluice.dlrm.training import assemble, loaders
from sluice.dlrm.training.input_checks import BatchChecker
from sluice.dlrm.training.step_figures import StepFigures
from sluice.dlrm.training.synced_batches import Stopped, SyncedBatches
from sluice.ingest.knobs import Knobs
from sluice.ingest.loader import BatchLoader


def train_version(session: TrainingSession) -> dict[str, Any] | None:
    """Trains on the version of the session's run. Returns the result. None: the run has moved to the next version.

    All ranks take the same steps in the same order, because they exchange data in many of them."""
    started_at, run, ranks = time.perf_counter(), session.run, session.ranks
    config = replace(run.config, epochs=versions.epochs_of(run.config, run.meta))
    plan = run_plan.plan_run(config, run.table, machine(ranks.ranks, ranks.local_ranks))
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
        session.signals.workers = loader.pipeline.stacks
        session.endpoint.show_loader(loader, run.table.version)
        stack.callback(session.endpoint.show_loader, None, run.table.version)
        session.open_folder()
        journal = session.journal
        needs = f"a rank's loader needs at least {loader.memory_need}"
        for line in (plan.text, run.chosen, left_out(loader.plan), needs):
            if line:
                journal.say(line)
        knob_memory = KnobMemory(loader, config, say=journal.say, ranks=ranks.local_ranks)
        knobs_known = knob_memory.start()
        trainer = _make_trainer(session, loader, plan, config)
        stack.callback(trainer.checkpoints.close)
        _restore(run, trainer, knobs_known=knobs_known)
        _report_start(run, trainer, plan, time.perf_counter() - started_at)
        # No collection has run since the program began. None will visit what exists now: it lives as long as the model.
        gc.freeze()
        stack.callback(gc.unfreeze)
        gc.enable()
        if config.follow == "parts" and run.changes is not None:
            journal.say("before it is trained on:")
            with suppress(Stopped):
                trainer.validator.measure("train", run.meta)
        with conditions.inject_faults(loader, journal.event):
            controller = _train_and_tune(session, trainer, knob_memory)
        loader.close()  # The evaluation needs its threads and memory.
        ended = trainer.synced_batches.stopped or trainer.good_enough
        if not ended and session.follow(trainer.meta):
            return None
        result = {
            **_evaluate_at_end(run, trainer),
            "decisions": controller.decisions if controller else 0,
            "version": run.table.version,
            "bytes_per_step": plan.bytes_per_step,
            "input": conditions.outcome(loader),
        }
        if ranks.first:
            result["outcome"] = summary(run_folder.Run.read(run.folder), result)
        journal.event({"kind": "end", **result})
    return {**result, "plan": {p.name: [p.kind, *p.ranks] for p in plan.placement.places}}


def _make_trainer(
    session: TrainingSession, loader: BatchLoader, plan: run_plan.RunPlan, config: Config
) -> Trainer:
    """Makes the model with its first weights, the parts that a step calls, and the trainer that calls them."""
    run, ranks, journal = session.run, session.ranks, session.journal
    parts = assemble.parts_of(config, plan.layout, len(loader.dense_names), plan.placement, ranks)
    checkpoints = Checkpoints(run.checkpoints, parts, ranks, keep=config.keep, record=journal.event)
    batches = SyncedBatches(ranks, session.signals.stop.is_set, activity=session.activity)
    session.signals.end_wait = batches.end_wait
    validator = Validator(
        config=config,
        table=run.table,
        parts=parts,
        world=ranks,
        journal=journal,
        checkpoints=checkpoints,
        steps_per_epoch=len(loader),
        synced_batches=batches,
        on_evaluation=session.on_evaluation,
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


def _restore(run: TrainingRun, trainer: Trainer, *, knobs_known: bool) -> None:
    """Loads the run's checkpoint into the model and the loader, if there is one. `knobs_known`: the registry had the
    loader's knobs."""
    meta, changes, loader, journal = run.meta, run.changes, trainer.feed, trainer.journal
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
        check(run.checkpoint, trainer.world)
        transplant(run.checkpoint, trainer.parts, after=meta, changes=changes)
        loader.load_state_dict({**loader.state_dict(), "epoch": meta.epoch})
    else:
        Checkpoint(run.checkpoint).load(trainer.parts, trainer.world)
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


def _report_start(
    run: TrainingRun, trainer: Trainer, plan: run_plan.RunPlan, seconds: float
) -> None:
    """Reports what is trained, from where on, and with which plan. `seconds` were needed to begin."""
    meta, table, journal = run.meta, run.table, trainer.journal
    if run.changes is None:
        began = {
            "kind": "start",
            "ranks": trainer.world.ranks,
            "resumed_at": meta.step,
            "data": table.uri,
            "version": table.version,
            "reader": trainer.feed.reader,
        }
    else:
        began = {
            "kind": "follow",
            "step": meta.step,
            "epoch": meta.epoch,
            "seconds": round(seconds, 3),
            **run.changes.to_dict(),
        }
    steps = meta.steps_in_all(len(trainer.feed), trainer.config.epochs)
    journal.event({**began, "steps": steps, **plan.to_dict()})
    feed = trainer.feed
    for text in early_warnings(trainer.config, table, feed.plan, feed.huge_group):
        journal.warn(meta.step, text)
    journal.say(trainer.checkpoints.memory().text)


def _train_and_tune(
    session: TrainingSession, trainer: Trainer, knob_memory: KnobMemory
) -> Controller | None:
    """Trains with the agent until the last epoch or an early end. Returns the agent."""
    run, ranks, loader = session.run, session.ranks, trainer.feed
    with assemble.tuned(
        trainer.config,
        loader,
        ranks.apart(f"version {run.table.version}"),
        knob_memory,
        trainer.journal,
        say=session.say,
        agent=run.meta.agent,
    ) as controller:
        trainer.tuning = lambda: {
            "knobs": loader.knobs.to_dict(),
            "agent": assemble.agent_of(controller, knob_memory),
        }
        try:
            session.signals.saved.clear()
            trainer.train()
            trainer.checkpoints.wait()
            session.signals.saved.set()
        except NotFinite as error:  # on all ranks
            raise trainer.guard.error(str(error)) from None
    return controller


def _evaluate_at_end(run: TrainingRun, trainer: Trainer) -> dict[str, Any]:
    """Evaluates the model on its test split, unless the run was asked to stop. Returns the figures of the run."""
    meta, splits, timed = trainer.meta, run.table.splits, trainer.figures
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
        trainer.journal.say(
            f"asked to stop: saved at step {meta.step}"
            if meta.step
            else "asked to stop before the first step: there is nothing to save"
        )
    set_aside = trainer.feed.quarantined["rows_set_aside"]
    peaks_bytes, first_batches_s, rows_set_aside = zip(
        *trainer.world.gather_objects((timed.peak_bytes, timed.first_batch_s or 0.0, set_aside)),
        strict=True,
    )
    return {
        **figures,
        "samples_per_s": round(timed.samples_per_s, 1),
        "stall_fraction": round(timed.stall, 5),
        "first_batch_s": round(max(first_batches_s), 3),
        "peak_bytes": sum(peaks_bytes),
        "steps": meta.step,
        "epochs": meta.epoch,
        "rows_trained": meta.rows,
        "batches_skipped": meta.skipped,
        "stopped": stopped,
        "split": split,
        "rows_set_aside": sum(rows_set_aside),
    }
