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
import resource
import traceback
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agent.runs import RunError, RunFolder
from dlrm import options
from dlrm.config import ConfigError, tables_of
from dlrm.footers import check_footers
from dlrm.guard import BadData
from dlrm.meta import CheckpointError, Meta, latest
from dlrm.options import Plan
from dlrm.sharding import describe, place
from etl.program import FAILED, USAGE, UsageError, run, say
from etl.table import FeatureTable, TableError
from ingest.knobs import KnobError
from ingest.plan import PlanError

if TYPE_CHECKING:
    from dlrm.metrics import Quality
    from dlrm.trainer import Outcome
    from dlrm.watch import Watch
    from dlrm.world import World

INPUT_ERRORS = (ConfigError, CheckpointError, TableError, BadData, RunError, KnobError, PlanError, UsageError)


class Elsewhere(RuntimeError):
    """Another rank ended, and said why."""


def main(argv: list[str]) -> dict[str, Any] | None:
    first = os.environ.get("RANK", "0") == "0"
    try:
        args = options.parse(argv, __doc__)
        plan = _plan(args)
        return _check(args, plan) if args.check else _train(plan)
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
    if args.resume:
        path, meta = latest(args.run / "checkpoints")
        config = options.resumed(meta.config, said, ranks=ranks)
        table = FeatureTable.open(config.data, config.version)
        meta.check(table)
        return Plan(run=args.run, config=config, table=table, meta=replace(meta, config=config.to_dict()), resume=path)
    if "data" not in said:
        raise ConfigError("--data is missing: which feature table to train on")
    table = FeatureTable.open(said["data"], said.pop("version", None))
    config = options.fresh({**said, "data": table.uri}, version=table.version, ranks=ranks)
    return Plan(run=args.run, config=config, table=table, meta=Meta.of(table, config.to_dict()), resume=None)


def _check(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """Everything that can be known before training; raises what is wrong."""
    from dlrm import feed

    config, table = plan.config, plan.table
    placements = place(tables_of(table.fields, config.model), config.ranks, config.sharding)
    _check_files(table, 0, 1)
    with feed.training(config, table, rank=0, local_ranks=config.ranks) as loader:
        steps = len(loader)
        if plan.resume is not None:
            loader.load_state_dict(plan.meta.loader)
    if not args.resume and args.run.exists() and any(args.run.iterdir()):
        raise RunError(f"{args.run}: is not empty; choose another folder, or go on with it by --resume")
    say(describe(placements, config.ranks))
    return {"ok": True, "rows": steps * config.batch_size, "steps": steps, "epochs": config.epochs,
            "plan": [p.to_dict() for p in placements], "settings": config.to_dict()}


def _check_files(table: FeatureTable, rank: int, ranks: int) -> None:
    """Each rank looks at its part of the files."""
    label = next(f.name for f in table.fields if f.role == "label")
    # A bag's ids lie within bytes, of which statistics say nothing.
    sizes = {f.name: f.cardinality for f in table.fields if f.role == "sparse" and f.cardinality is not None}
    check_footers([f.path for f in table.files][rank::ranks], sizes, label)


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
    from dlrm import build, checkpoint, feed
    from dlrm.guard import Guard
    from dlrm.journal import Journal, Silence
    from dlrm.progress import Progress
    from dlrm.trainer import Trainer, evaluate

    config, table = plan.config, plan.table
    tables = tables_of(table.fields, config.model)
    sizes = {t.name: t.rows for t in tables}
    placements = place(tables, here.ranks, config.sharding)
    _check_files(table, here.rank, here.ranks)
    with ExitStack() as stack:
        loader = stack.enter_context(feed.training(config, table, rank=here.rank, local_ranks=here.local_ranks))
        steps = len(loader) * config.epochs
        journal: Journal | Silence = Silence()
        if here.first:
            folder = RunFolder.create(plan.run, {"kind": "train", **config.to_dict()}, resume=plan.resume is not None)
            journal = stack.enter_context(Journal(folder, Progress(steps)))
        journal.say(describe(placements, here.ranks))
        model, dense = build.model_of(config, tables, len(loader.dense_names), placements, here)
        if plan.resume is not None:
            checkpoint.load(plan.resume, model, dense, here)
            loader.load_state_dict(plan.meta.loader)
        journal.event({"kind": "start", "ranks": here.ranks, "steps": steps, "resumed_at": plan.meta.step,
                       "data": table.uri, "version": table.version, "plan": [p.to_dict() for p in placements]})

        def measure(split: str, epoch: int) -> Quality:
            guard = Guard(sizes, loader.dense_names, f"split {split!r}")
            with feed.evaluation(config, table, split, rank=here.rank, local_ranks=here.local_ranks) as batches:
                found = evaluate(model, batches, list(loader.sparse_names), guard, here)
            journal.metric({"kind": "eval", "epoch": epoch, "split": split, **found.to_dict()})
            journal.say(f"{split} after {epoch} epoch{'s' * (epoch != 1)}: {found}")
            return found

        def after_epoch(now: Meta) -> None:
            journal.event({"kind": "epoch", "epoch": now.epoch, "step": now.step, "rows": now.rows,
                           "order_hash": loader.order_hash})
            if "validation" in table.splits:
                measure("validation", now.epoch)

        trainer = Trainer(config=config, world=here, model=model, dense=dense, names=list(loader.sparse_names),
                          guard=Guard(sizes, loader.dense_names, "split 'train'"),
                          checkpoints=plan.run / "checkpoints", record=journal.event, observe=journal.metric,
                          asked_to_stop=watch.stop.is_set)
        with build.tuned(config, loader, here, journal.event, journal.metric) as controller:
            outcome = trainer.train(loader, plan.meta, after_epoch)
        loader.close()  # its threads and memory are free for the evaluation
        split = None if outcome.stopped else next((s for s in ("test", "validation") if s in table.splits), None)
        found = _summary(outcome, measure(split, outcome.meta.epoch) if split else None, here)
        found |= {"split": split, "decisions": controller.decisions if controller else 0}
        journal.event({"kind": "end", **found})
    if not here.first:
        return None
    from agent import report

    return {**found, "ranks": here.ranks, "plan": {p.table.name: [p.kind, *p.ranks] for p in placements},
            "run": str(plan.run), "report": str(report.write(plan.run))}


def _summary(outcome: Outcome, quality: Quality | None, here: World) -> dict[str, Any]:
    """What training came to, over all ranks."""
    peaks = here.gather_objects(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    firsts = here.gather_objects(outcome.first_batch_s)
    judged = dict.fromkeys(("auc", "ne", "logloss", "calibration", "rows")) if quality is None else quality.to_dict()
    return {**judged, "samples_per_s": round(outcome.timing.samples_per_s, 1),
            "stall_fraction": round(outcome.timing.stall, 5), "first_batch_s": round(max(firsts), 3),
            "peak_bytes": sum(peaks), "steps": outcome.meta.step, "epochs": outcome.meta.epoch,
            "rows_trained": outcome.meta.rows, "stopped": outcome.stopped}


if __name__ == "__main__":
    run(main)
