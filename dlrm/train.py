"""Trains a DLRM on a feature table, its embedding tables spread over all ranks, its input tuned while it runs.

    torchrun --nproc-per-node=2 -m dlrm.train --data TABLE --run-dir DIR     two ranks on this machine
    python -m dlrm.train --data TABLE --run-dir DIR                          one process
    python -m dlrm.train --data TABLE --run-dir DIR --ranks 2 --check        check settings and input, train nothing
    torchrun --nproc-per-node=1 -m dlrm.train --run-dir DIR --resume         go on, also on another number of ranks

The last line of standard output is one JSON object: what came of it, or under "error" why nothing did (torchrun itself
ends with 1 whatever its ranks do). Everything else goes to standard error. SIGTERM saves a checkpoint and leaves.
"""

from __future__ import annotations

import argparse
import json
import os
import traceback
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agent.runs import RunError
from dlrm import options
from dlrm.config import ConfigError
from dlrm.footers import check_files
from dlrm.guard import BadData
from dlrm.meta import LATEST, CheckpointError, Meta, latest
from dlrm.options import Plan
from dlrm.placement import PlacementError
from etl.program import FAILED, INTERRUPTED, USAGE, UsageError, run, say
from etl.table import FeatureTable, TableError
from ingest.knobs import KnobError, Knobs
from ingest.machine import Machine
from ingest.plan import PlanError

if TYPE_CHECKING:
    from dlrm.metrics import Quality
    from dlrm.trainer import Outcome
    from dlrm.watch import Watch
    from dlrm.world import World

INPUT_ERRORS = (ConfigError, CheckpointError, TableError, BadData, RunError, KnobError, PlanError,
                PlacementError, UsageError)


class Elsewhere(RuntimeError):
    """Another rank ended, and said why."""


def main(argv: list[str]) -> dict[str, Any] | None:
    first = os.environ.get("RANK", "0") == "0"
    try:
        args = options.parse(argv, __doc__)
        plan = _plan(args)
        return _check(args, plan) if args.check else _train(plan)
    except KeyboardInterrupt:
        if first:
            raise
        os._exit(INTERRUPTED)  # one line is enough
    except Exception as error:
        wrong_input = isinstance(error, INPUT_ERRORS)
        if first:  # it says it for all
            if not wrong_input and not isinstance(error, Elsewhere):
                traceback.print_exc()
            say(f"error: {error}")
            print(json.dumps({"error": str(error)}), flush=True)
        raise SystemExit(USAGE if wrong_input else FAILED) from None


def _plan(args: argparse.Namespace) -> Plan:
    """What the command line, the table and, to resume, the checkpoint say together."""
    said = options.given(args)
    ranks = args.ranks or int(os.environ.get("WORLD_SIZE", "1"))
    # torchrun starts all ranks anew after one of them died: they go on from what was saved.
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if args.resume or (restarted and (args.run / "checkpoints" / LATEST).exists()):
        path, meta = latest(args.run / "checkpoints")
        config = options.resumed(meta.config, said, ranks=ranks)
        table = FeatureTable.open(config.data, config.version)
        meta.check(table)
        return Plan(run=args.run, config=config, table=table, meta=replace(meta, config=config.to_dict()), resume=path,
                    go_on=True)
    if "data" not in said:
        raise ConfigError("--data is missing: which feature table to train on")
    table = FeatureTable.open(said["data"], said.pop("version", None))
    config = options.fresh({**said, "data": table.uri}, version=table.version, ranks=ranks)
    return Plan(run=args.run, config=config, table=table, meta=Meta.of(table, config.to_dict()), resume=None,
                go_on=restarted)


def _check(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """Everything that can be known before training; raises what is wrong."""
    from dlrm import feed, setting
    from dlrm.world import machine

    config, table = plan.config, plan.table
    now = setting.of(config, table, machine(config.ranks, config.ranks))
    check_files(table)
    with feed.training(config, table, rank=0, local_ranks=config.ranks) as loader:
        steps = len(loader)
        if plan.resume is not None:
            loader.load_state_dict(plan.meta.loader)
    if not args.resume and args.run.exists() and any(args.run.iterdir()):
        raise RunError(f"{args.run}: is not empty; choose another folder, or go on with it by --resume")
    say(now.text)
    return {"ok": True, "rows": steps * config.batch_size, "steps": steps, "epochs": config.epochs,
            **now.to_dict(), "settings": config.to_dict()}


def _train(plan: Plan) -> dict[str, Any] | None:
    from dlrm.quiet import quiet

    quiet()
    from dlrm.watch import Watch
    from dlrm.world import world

    with world() as here, Watch(here.store, here.rank) as watch:
        try:
            return _run(plan, here, watch)
        except Exception as error:
            # Whoever tells first knows the cause; the others only see its connections close.
            cause = watch.told()
            if cause is None:
                watch.fault(str(error))
                raise
            raise Elsewhere(cause) from error


def _run(plan: Plan, here: World, watch: Watch) -> dict[str, Any] | None:
    from dlrm import build, checkpoint, feed, setting
    from dlrm.guard import Guard
    from dlrm.journal import Journal, Silence
    from dlrm.judge import Judge
    from dlrm.trace import traced
    from dlrm.trainer import Trainer
    from dlrm.world import machine

    config, table = plan.config, plan.table
    now = setting.of(config, table, machine(here.ranks, here.local_ranks))
    check_files(table, here.rank, here.ranks)
    with ExitStack() as stack:
        loader = stack.enter_context(feed.training(config, table, rank=here.rank, local_ranks=here.local_ranks))
        steps = len(loader)
        journal: Journal | Silence = Silence()
        if here.first:
            journal = stack.enter_context(Journal.of(plan.run, config, steps * config.epochs, resume=plan.go_on))
        journal.say(now.text)
        parts = build.parts_of(config, now.layout, len(loader.dense_names), now.placement, here, steps_per_epoch=steps)
        if plan.resume is not None:
            checkpoint.load(plan.resume, parts, here)
            loader.load_state_dict(plan.meta.loader)
            if plan.meta.knobs and not config.knobs:
                loader.apply(Knobs.from_dict(plan.meta.knobs))
            if differs := plan.meta.other_software():
                journal.say(differs)
        journal.event({"kind": "start", "ranks": here.ranks, "steps": steps * config.epochs,
                       "resumed_at": plan.meta.step, "data": table.uri, "version": table.version, **now.to_dict()})
        saved = checkpoint.Checkpoints(plan.run / "checkpoints", parts, here, keep=config.keep, record=journal.event)
        stack.callback(saved.close)
        judge = Judge(config=config, table=table, parts=parts, world=here, journal=journal, checkpoints=saved,
                      steps_per_epoch=steps)

        def save(at: Meta) -> None:
            saved.save(replace(at, knobs=loader.knobs.to_dict()))
            if at.step % steps == 0:
                journal.event({"kind": "epoch", "epoch": at.epoch, "step": at.step, "rows": at.rows,
                               "order_hash": loader.order_hash})

        guard = Guard({t.name: t.rows for t in now.layout.columns}, loader.dense_names, "split 'train'",
                      missing=config.missing)
        with (build.tuned(config, loader, here, journal.event, journal.metric) as controller,
              traced(config.profile if here.first else 0, plan.run) as tick):
            trainer = Trainer(config=config, world=here, parts=parts, guard=guard, save=save, observe=journal.metric,
                              evaluate=judge.good_enough, asked_to_stop=watch.stop.is_set, tick=tick,
                              memory_used=Machine().memory_used)
            outcome = trainer.train(loader, plan.meta)
            saved.wait()
        loader.close()  # its threads and memory are free for the evaluation
        split = None if outcome.stopped else next((s for s in ("test", "validation") if s in table.splits), None)
        found = _summary(outcome, judge.measure(split, outcome.meta).quality if split else None, here)
        found |= {"split": split, "decisions": controller.decisions if controller else 0,
                  "bytes_per_step": now.bytes_per_step, "masked": setting.masked(now.layout, here)}
        journal.event({"kind": "end", **found})
    if not here.first:
        return None
    from agent import report

    return {**found, "ranks": here.ranks, "plan": {p.name: [p.kind, *p.ranks] for p in now.placement.places},
            "run": str(plan.run), "report": str(report.write(plan.run))}


def _summary(outcome: Outcome, quality: Quality | None, here: World) -> dict[str, Any]:
    """What training came to, over all ranks."""
    peaks = here.gather_objects(outcome.peak_bytes)
    firsts = here.gather_objects(outcome.first_batch_s)
    judged = dict.fromkeys(("auc", "ne", "logloss", "calibration", "rows")) if quality is None else quality.to_dict()
    return {**judged, "samples_per_s": round(outcome.timing.samples_per_s, 1),
            "stall_fraction": round(outcome.timing.stall, 5), "first_batch_s": round(max(firsts), 3),
            "peak_bytes": sum(peaks), "steps": outcome.meta.step, "epochs": outcome.meta.epoch,
            "rows_trained": outcome.meta.rows, "stopped": outcome.stopped}


if __name__ == "__main__":
    run(main, at_once=True)  # gloo's threads abort about one ended run in ten while Python goes down
