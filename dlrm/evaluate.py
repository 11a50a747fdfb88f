"""Evaluates a run's newest checkpoint over a whole split of a feature table: exact AUC, NE, logloss, calibration.

    sluice evaluate --run-dir DIR --data TABLE
    torchrun --nproc-per-node=2 -m dlrm.evaluate --run-dir DIR --data TABLE --split validation

The table may be another version than the run was trained on, as long as its columns and vocabulary are the same. The
last line of standard output is one JSON object: auc, ne, logloss, calibration, rows, and what was evaluated.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from sluice.dlrm.checkpoint.meta import chosen
from sluice.dlrm.config import Config
from sluice.dlrm.follow.versions import seen_in
from sluice.dlrm.liveness.rank_exit import RankExit, with_torchrun
from sluice.etl.common.arguments import ArgumentParser
from sluice.etl.common.program import run, say
from sluice.etl.spec import code_options
from sluice.etl.table.census import TRAIN
from sluice.etl.table.table import FeatureTable


def main(argv: list[str]) -> dict[str, Any] | None:
    parser = ArgumentParser(prog="sluice evaluate", description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", "--run", dest="run", type=Path, required=True, metavar="DIR",
                        help="run folder of dlrm.train")
    parser.add_argument("--data", metavar="TABLE", help="feature table (default: the run's)")
    parser.add_argument("--version", type=int, help="version of it (default: the newest; without --data, the run's)")
    parser.add_argument("--split", default="test", help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16384, help="rows of a global batch (default: %(default)s)")
    parser.add_argument("--best", action="store_true", help="the checkpoint that did best on validation, not the last")
    parser.add_argument("--slices", type=lambda text: tuple(text.split(",")), default=(), metavar="COLUMN,…",
                        help="figures also for the most frequent ids of these columns")
    parser.add_argument("--split-moved", choices=("refuse", "accept"), default="refuse",
                        help="what to do where the split holds rows that were trained on (default: %(default)s)")
    code_options.add_options(parser)
    args = parser.parse_args(argv)
    with_torchrun(RankExit(first=os.environ.get("RANK", "0") == "0"))

    path, meta = chosen(args.run / "checkpoints", take_best=args.best)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trained = Config.from_dict(meta.config)
    version = args.version if args.data or args.version is not None else trained.version
    table = FeatureTable.open(args.data or trained.data, version, allow_code=code_options.given(args),
                              transforms=trained.transforms)
    meta.check(table, same_version=False)
    table.files_of(args.split)  # an unknown split is an error that names those there are
    if args.split != TRAIN and (seen := seen_in(table, meta, args.split_moved, split=args.split)):
        say(f"warning: {seen}")
    config = replace(trained, data=table.uri, version=table.version, ranks=ranks, batch_size=args.batch_size,
                     sharding="auto", slices=args.slices)

    from sluice.dlrm.telemetry.silence_warnings import quiet

    quiet()
    from sluice.dlrm import run_plan
    from sluice.dlrm.checkpoint import save_load
    from sluice.dlrm.evaluation.split import evaluate
    from sluice.dlrm.ranks import machine, world
    from sluice.dlrm.training import assemble, loaders
    from sluice.dlrm.training.input_checks import Guard

    with (world() as here,
          loaders.evaluation(config, table, args.split, rank=here.rank, local_ranks=here.local_ranks) as batches):
        now = run_plan.plan_run(config, table, machine(here.ranks, here.local_ranks))
        parts = assemble.parts_of(config, now.layout, len(batches.dense_names), now.placement, here)
        save_load.load(path, parts, here, optimisers=False)
        guard = Guard({t.name: t.rows for t in now.layout.columns}, batches.dense_names, f"split {args.split!r}",
                      missing=config.missing)
        found = evaluate(parts, batches, guard, here, slices=config.slices)
        if not here.first:
            return None
    say(f"{args.split}: {found.quality}")
    return {**found.quality.to_dict(), "split": args.split, "step": meta.step, "version": table.version,
            "checkpoint": str(path),
            "slices": {name: {i: q.to_dict() for i, q in ids.items()} for name, ids in found.slices.items()}}


def program() -> NoReturn:
    """The whole program, as its command runs it."""
    run(main, at_once=True)  # as dlrm.train


if __name__ == "__main__":
    program()
