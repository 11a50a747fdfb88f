"""Trains a DLRM on a feature table, its embedding tables spread over all ranks, its input tuned while it runs.

    torchrun --nproc-per-node=2 -m dlrm.train --data TABLE --run-dir DIR     two ranks on this machine
    sluice train --data TABLE --run-dir DIR                          one process
    sluice train --data TABLE --run-dir DIR --ranks 2 --check        check settings and input, train nothing
    torchrun --nproc-per-node=1 -m dlrm.train --run-dir DIR --resume         go on, also on another number of ranks
    torchrun --nproc-per-node=2 -m dlrm.train --data TABLE --run-dir DIR --resume     begin, or go on: for schedulers

The last line of standard output is one JSON object: what came of it, or under "error" why nothing did (torchrun itself
ends with 1 whatever its ranks do). Everything else goes to standard error. SIGTERM saves a checkpoint and leaves.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sluice.agent.report import run_folder
from sluice.agent.report.run_folder import RunError
from sluice.dlrm import cli as options
from sluice.dlrm.checkpoint.meta import LATEST, CheckpointError, CheckpointMeta, latest
from sluice.dlrm.config import Config, ConfigError, profile_of, tables_of
from sluice.dlrm.follow import versions
from sluice.dlrm.follow.versions import StartPoint
from sluice.dlrm.liveness.activity import Activity
from sluice.dlrm.liveness.rank_exit import RankExit, with_torchrun
from sluice.dlrm.tables import spread_out
from sluice.dlrm.training.input_checks import check_files, find
from sluice.etl.common.errors import UsageError
from sluice.etl.common.extras import advice
from sluice.etl.common.program import FAILED, INTERRUPTED, USAGE, run, say
from sluice.etl.spec import code_options
from sluice.etl.table.pins import Hold
from sluice.etl.table.table import FeatureTable
from sluice.ingest.knobs import Knobs
from sluice.ingest.machine import Machine

if TYPE_CHECKING:
    from sluice.dlrm.evaluation.metrics import Quality
    from sluice.dlrm.ranks import Ranks
    from sluice.dlrm.telemetry.journal import Journal, Silence
    from sluice.dlrm.telemetry.prometheus import Endpoint
    from sluice.dlrm.training.signals import StopSignals
    from sluice.dlrm.training.trainer import TrainingOutcome

class Elsewhere(RuntimeError):
    """Another rank ended, and said why."""


def main(argv: list[str]) -> dict[str, Any] | None:
    first = os.environ.get("RANK", "0") == "0"
    ending = RankExit(first=first)
    with_torchrun(ending)
    try:
        args = options.parse(argv, __doc__)
        plan = replace(_plan(args), pause=args.pause)
        return _check(args, plan) if args.check else _train(plan, ending)
    except KeyboardInterrupt:
        if first:
            raise
        os._exit(INTERRUPTED)  # the one line printed is enough
    except Exception as error:
        ending.mine()
        missing = advice(error, "train")
        wrong_input = bool(missing) or isinstance(error, UsageError)
        if first:  # it says it for all
            if not wrong_input and not isinstance(error, Elsewhere):
                traceback.print_exc()
            say(f"error: {missing or error}")
            print(json.dumps({"error": missing or str(error)}), flush=True)
        raise SystemExit(USAGE if wrong_input else FAILED) from None


def _plan(args: argparse.Namespace) -> StartPoint:
    """Plans the run from the command line, the table and, to resume, the checkpoint."""
    if args.pause is not None and args.pause < 1:
        raise ConfigError(f"--pause-after: {args.pause} is not a whole number of 1 or more")
    said, allowed = options.given(args), code_options.given(args)
    ranks = args.ranks or int(os.environ.get("WORLD_SIZE", "1"))
    # torchrun starts all ranks anew after one of them died: they go on from what was saved.
    go_on = args.resume or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    saved = (args.run / "checkpoints" / LATEST).exists()
    if args.resume and not saved and "data" not in said:
        raise CheckpointError(f"{args.run}: holds no checkpoint to go on from; give --data, too, to begin a run there")
    if go_on and saved:
        path, meta = latest(args.run / "checkpoints")
        config = options.resumed(meta.config, said, ranks=ranks)
        if not meta.trained:  # an older program wrote it: from here on the rows are recorded
            meta = replace(meta, trained=meta.seen().to_json())
        meta = replace(meta, config=config.to_dict())
        if (version := versions.next_version(config, meta)) is not None:
            return versions.start_on(args.run, path, meta, version, split_moved=args.split_moved, allow_code=allowed)
        table = FeatureTable.open(config.data, config.version, allow_code=allowed, transforms=config.transforms)
        meta.check(table)
        seen = versions.seen_in(table, meta, args.split_moved)
        return StartPoint(run=args.run, config=config, table=versions.view(table, config), meta=meta, resume=path,
                          go_on=True,
                          split_moved=args.split_moved, seen=seen)
    if "data" not in said:
        raise ConfigError("--data is missing: which feature table to train on")
    first = 0 if said.get("follow") == "parts" else None  # a pass over all parts begins with the oldest
    table = FeatureTable.open(said["data"], said.pop("version", first), allow_code=allowed,
                              transforms=said.get("transforms", ()))
    config = options.fresh({**said, "data": table.uri}, version=table.version, ranks=ranks)
    columns = tables_of(table.fields, config.model, profile_of(table))
    config = replace(config, model=spread_out(config.model, columns))
    return StartPoint(run=args.run, config=config, table=versions.view(table, config),
                      meta=CheckpointMeta.of(table, config.to_dict()),
                      resume=None, go_on=go_on, split_moved=args.split_moved)


def _check(args: argparse.Namespace, plan: StartPoint) -> dict[str, Any]:
    """Checks everything that can be known before training; raises what is wrong."""
    from sluice.dlrm import run_plan
    from sluice.dlrm.ranks import machine
    from sluice.dlrm.training import loaders

    config, table = plan.config, plan.table
    planned = run_plan.plan_run(config, table, machine(config.ranks, config.ranks))
    check_files(table)
    conditions = loaders.conditions(config, plan.run, 0)
    with loaders.training(config, table, rank=0, local_ranks=config.ranks, conditions=conditions) as loader:
        loaders.knob_memory(config, loader, config.ranks, say).start()
        steps = len(loader)
        if plan.meta.loader:
            loader.load_state_dict(plan.meta.loader)
    run_folder.check(args.run)
    if not args.resume and run_folder.has_run(args.run):
        raise RunError(f"{args.run}: already holds a run; choose another folder, or go on with it by --resume")
    say(planned.text)
    return {"ok": True, "rows": steps * config.batch_size, "steps": steps, "epochs": config.epochs,
            **planned.to_dict(), "settings": config.to_dict()}


def _train(plan: StartPoint, ending: RankExit) -> dict[str, Any] | None:
    from sluice.dlrm.telemetry.silence_warnings import quiet

    quiet()
    from sluice.dlrm.liveness.heartbeat import Heartbeat
    from sluice.dlrm.ranks import world
    from sluice.dlrm.training.signals import StopSignals

    activity = Activity(most_s=plan.config.stall_after)
    with (world() as ranks, StopSignals(ranks.store, ranks.rank) as watch,
          Heartbeat(ranks.store, ranks.rank, ranks.ranks, activity, ending, workers=watch.worker_stacks)):
        try:
            return _run(plan, ranks, watch, activity, ending)
        except Exception as error:
            # The rank that reports first knows the cause; the others only see its connections close.
            cause = watch.other_ranks_error()
            if cause is None:
                watch.report_error(str(error))
                raise
            raise Elsewhere(cause) from error


def _run(plan: StartPoint, ranks: Ranks, watch: StopSignals, activity: Activity, ending: RankExit
         ) -> dict[str, Any] | None:
    """Trains in one stretch after another, each on one version of the table; without --follow there is only one."""
    from sluice.dlrm.telemetry.prometheus import Endpoint

    on_evaluation = _pause_after(plan.pause, watch)
    with ExitStack() as whole:
        journals: list[Journal | Silence] = []  # made once the first stretch knows that it can begin
        endpoint = whole.enter_context(Endpoint.at(plan.config.metrics_port, ranks.rank, ranks.local_rank))
        hold = whole.enter_context(Hold(f"train-{plan.run.name}", say)) if ranks.first else None
        if hold is not None:
            ending.before.append(hold.release)
        found: dict[str, Any] = {}
        following: StartPoint | None = plan
        while following is not None:
            plan = following
            if hold is not None:
                hold.take(plan.table.uri, plan.table.version)
            ranks.barrier()  # pinned before any rank looks whether all files are there
            gc.collect()  # what held the model before is gone, and this holds the next one
            found, following = _train_on_version(plan, ranks, watch, activity, ending, whole=whole, journals=journals,
                                                 endpoint=endpoint, on_evaluation=on_evaluation)
    if not ranks.first:
        return None
    return {**found, "ranks": ranks.ranks, "run": str(plan.run), "report": _report(plan.run)}


def _report(run: Path) -> str | None:
    """Writes the report and says where it is; None if it could not be written, which does the run no harm."""
    from sluice.agent.report import page

    try:
        return str(page.write(run))
    except OSError as error:
        say(f"{error.filename or run}: the report cannot be written ({error.strerror or error}); make room, then "
            f"`sluice report {run}` writes it")
        return None


def _train_on_version(plan: StartPoint, ranks: Ranks, watch: StopSignals, activity: Activity, ending: RankExit, *,
                      whole: ExitStack, journals: list[Journal | Silence], endpoint: Endpoint,
                      on_evaluation: Callable[[], None]) -> tuple[dict[str, Any], StartPoint | None]:
    """Trains on one version of the table; returns the result, and the plan for the next version, if there is one."""
    from sluice.dlrm import run_plan
    from sluice.dlrm.checkpoint import save_load
    from sluice.dlrm.evaluation.validation import Validator
    from sluice.dlrm.follow.transplant import transplant
    from sluice.dlrm.ranks import machine
    from sluice.dlrm.telemetry.journal import Journal, Silence
    from sluice.dlrm.training import assemble, loaders
    from sluice.dlrm.training.input_checks import Guard
    from sluice.dlrm.training.profiler import traced
    from sluice.dlrm.training.synced_batches import Stopped, SyncedBatches
    from sluice.dlrm.training.trainer import Trainer

    began = time.perf_counter()
    config, table = replace(plan.config, epochs=versions.epochs_of(plan.config, plan.meta)), plan.table
    planned = run_plan.plan_run(config, table, machine(ranks.ranks, ranks.local_ranks))
    check_files(table, ranks.rank, ranks.ranks)
    with ExitStack() as stack:
        conditions = loaders.conditions(config, plan.run, ranks.rank)
        loader = stack.enter_context(loaders.training(config, table, rank=ranks.rank, local_ranks=ranks.local_ranks,
                                                      conditions=conditions))
        watch.workers = loader.stacks
        ending.before.append(conditions.give_back)
        stack.callback(ending.before.remove, conditions.give_back)
        steps = len(loader)
        if not journals:
            journals.append(whole.enter_context(Journal.of(plan.run, plan.config, resume=plan.go_on))
                            if ranks.first else Silence())
        journal = journals[0]
        journal.expect(plan.meta.steps_in_all(steps, config.epochs))
        journal.tell(endpoint.observe)
        endpoint.reads(loader.snapshot, table.version)
        stack.callback(endpoint.reads, None, table.version)
        journal.say(planned.text)
        journal.say(f"a rank's loader needs at least {loader.memory_need}")
        knob_memory = loaders.knob_memory(config, loader, ranks.local_ranks, journal.say)
        known = knob_memory.start()
        parts = assemble.parts_of(config, planned.layout, len(loader.dense_names), planned.placement, ranks,
                                  steps_per_epoch=steps)
        if plan.seen:
            journal.event({"kind": "warning", "step": plan.meta.step, "text": plan.seen})
            journal.say(f"warning: {plan.seen}")
        if plan.resume is not None:
            if plan.changes is not None and plan.before is not None:
                journal.say(plan.changes.text)
                save_load.check(plan.resume, ranks)
                transplant(plan.resume, parts, before=plan.before, after=plan.meta, changes=plan.changes)
                loader.load_state_dict({**loader.state_dict(), "epoch": plan.meta.epoch})
            else:
                save_load.load(plan.resume, parts, ranks)
                loader.load_state_dict(plan.meta.loader)
                journal.say(_onward(plan.meta, config))
            # What the registry has for a changed table was scaled to it.
            if plan.meta.knobs and (not known if plan.changes is not None else not config.knobs):
                loader.apply(loader.limits.clamp(Knobs.from_dict(plan.meta.knobs)))
            if differs := plan.meta.other_software():
                journal.say(differs)
        if plan.changes is not None:
            journal.event({"kind": "follow", "step": plan.meta.step, "epoch": plan.meta.epoch,
                           "seconds": round(time.perf_counter() - began, 3), **plan.changes.to_dict(),
                           **planned.to_dict()})
        else:
            journal.event({"kind": "start", "ranks": ranks.ranks,
                           "steps": plan.meta.steps_in_all(steps, config.epochs), "resumed_at": plan.meta.step,
                           "data": table.uri, "version": table.version, **planned.to_dict()})
        saved = save_load.Checkpoints(plan.run / "checkpoints", parts, ranks, keep=config.keep, record=journal.event)
        stack.callback(saved.close)
        gate = SyncedBatches(ranks, watch.stop.is_set, time.perf_counter, activity)
        watch.stalled = gate.stalled
        validator = Validator(config=config, table=table, parts=parts, world=ranks, journal=journal, checkpoints=saved,
                          steps_per_epoch=steps, gate=gate, on_evaluation=on_evaluation)
        if config.follow == "parts" and plan.changes is not None:
            journal.say("before it is trained on:")
            with suppress(Stopped):
                validator.measure("train", plan.meta)

        def save(at: CheckpointMeta) -> None:
            with activity.apart("saved a checkpoint"):
                saved.save(replace(at, knobs=loader.knobs.to_dict(), agent=assemble.agent_of(controller, knob_memory)))
            if not at.loader["step"]:
                journal.event({"kind": "epoch", "epoch": at.epoch, "step": at.step, "rows": at.rows,
                               "order_hash": loader.order_hash})

        def evaluate_and_check(at: CheckpointMeta) -> bool:
            with activity.apart("evaluated"):
                return validator.evaluate_and_check(at)

        def table_changed(at: CheckpointMeta) -> bool:
            return ranks.gather_objects(versions.next_version(config, at) if ranks.first else None)[0] is not None

        guard = Guard({t.name: t.rows for t in planned.layout.columns}, loader.dense_names, "split 'train'",
                      missing=config.missing, find=partial(find, table, "train"))
        with (conditions.inject_faults(loader, journal.event),
              assemble.tuned(config, loader, ranks.apart(f"version {table.version}"), knob_memory, record=journal.event,
                             observe=journal.metric, agent=plan.meta.agent) as controller,
              traced(config.profile if ranks.first else 0, plan.run) as tick):
            trainer = Trainer(config=config, world=ranks, parts=parts, guard=guard, save=save, observe=journal.metric,
                              evaluate=evaluate_and_check, gate=gate, tick=tick, table_changed=table_changed,
                              memory_used=Machine().memory_used)
            outcome = trainer.train(loader, plan.meta)
            saved.wait()
        loader.close()  # its threads and memory are free for the evaluation
        following = None if outcome.stopped or outcome.good else _following(plan, outcome.meta, ranks, watch)
        if following is not None:
            return {}, following
        split = None if outcome.stopped else next((s for s in ("test", "validation") if s in table.splits), None)
        quality = None
        try:
            quality = validator.measure(split, outcome.meta).quality if split else None
        except Stopped:
            outcome = replace(outcome, stopped=True)
        if outcome.stopped:
            journal.say(f"asked to stop: saved at step {outcome.meta.step}" if outcome.meta.step else
                        "asked to stop before the first step: there is nothing to save")
        found = _summary(outcome, quality, ranks)
        found |= {"split": split, "decisions": controller.decisions if controller else 0, "version": table.version,
                  "bytes_per_step": planned.bytes_per_step, "masked": run_plan.masked(planned.layout, ranks),
                  "rows_set_aside": sum(ranks.gather_objects(loader.quarantined["rows_set_aside"])),
                  "input": conditions.outcome(loader)}
        journal.event({"kind": "end", **found})
    return {**found, "plan": {p.name: [p.kind, *p.ranks] for p in planned.placement.places}}, None


def _pause_after(evaluations: int | None, watch: StopSignals) -> Callable[[], None]:
    """A function to be called at each evaluation of the validation split, on every rank: at the last of so many it asks
    to stop."""
    left = count((evaluations or 0) - 1, -1)

    def on_evaluation() -> None:
        if next(left) == 0:
            watch.stop.set()

    return on_evaluation


def _onward(meta: CheckpointMeta, config: Config) -> str:
    """Says what a resumed run is about to do."""
    if meta.epoch < config.epochs:
        return f"going on from step {meta.step} (epoch {meta.epoch} of {config.epochs})"
    done = f"version {meta.version} is" if config.follow == "parts" else f"--epochs {config.epochs} are"
    return f"nothing left to train: {done} done"


def _following(plan: StartPoint, meta: CheckpointMeta, ranks: Ranks, watch: StopSignals) -> StartPoint | None:
    """The plan for the next version of the table, the same on every rank. With --follow-wait, it waits for one."""
    end = time.monotonic() + (plan.config.follow_wait if plan.config.follow == "parts" else 0)
    while True:
        version = versions.next_version(plan.config, meta) if ranks.first else None
        over = time.monotonic() >= end or watch.stop.is_set()
        version, over = ranks.gather_objects((version, over))[0]
        if version is not None:
            path, meta = latest(plan.run / "checkpoints")
            return versions.start_on(plan.run, path, meta, version, split_moved=plan.split_moved,
                                     allow_code=plan.table.permission)
        if over:
            return None
        watch.stop.wait(1.0)


def _summary(outcome: TrainingOutcome, quality: Quality | None, ranks: Ranks) -> dict[str, Any]:
    """Sums up the results of training, over all ranks."""
    peaks = ranks.gather_objects(outcome.peak_bytes)
    firsts = ranks.gather_objects(outcome.first_batch_s)
    judged = dict.fromkeys(("auc", "ne", "logloss", "calibration", "rows")) if quality is None else quality.to_dict()
    return {**judged, "samples_per_s": round(outcome.timing.samples_per_s, 1),
            "stall_fraction": round(outcome.timing.stall, 5), "first_batch_s": round(max(firsts), 3),
            "peak_bytes": sum(peaks), "steps": outcome.meta.step, "epochs": outcome.meta.epoch,
            "rows_trained": outcome.meta.rows, "stopped": outcome.stopped}


def program() -> NoReturn:
    """The whole program, as its command runs it."""
    run(main, at_once=True)  # gloo's threads abort about one ended run in ten while Python goes down


if __name__ == "__main__":
    program()
