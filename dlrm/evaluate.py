"""Evaluates a run's newest checkpoint over a whole split of a feature table: exact AUC, NE, logloss, calibration.

    python -m dlrm.evaluate --run-dir DIR --data TABLE
    torchrun --nproc-per-node=2 -m dlrm.evaluate --run-dir DIR --data TABLE --split validation

The table may be another version than the run was trained on, as long as its columns and vocabulary are the same. The
last line of standard output is one JSON object: auc, ne, logloss, calibration, rows, and what was evaluated.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlrm.config import Config, ConfigError, tables_of
from dlrm.guard import BadData
from dlrm.meta import CheckpointError, latest
from dlrm.sharding import place
from etl.program import run, say
from etl.table import FeatureTable, TableError
from ingest.plan import PlanError


def main(argv: list[str]) -> dict[str, Any] | None:
    parser = argparse.ArgumentParser(prog="python -m dlrm.evaluate", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", "--run", dest="run", type=Path, required=True, metavar="DIR",
                        help="run folder of dlrm.train")
    parser.add_argument("--data", metavar="TABLE", help="feature table (default: the run's)")
    parser.add_argument("--version", type=int, help="version of it (default: the newest; without --data, the run's)")
    parser.add_argument("--split", default="test", help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16384, help="rows of a global batch (default: %(default)s)")
    args = parser.parse_args(argv)

    path, meta = latest(args.run / "checkpoints")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trained = Config.from_dict(meta.config)
    version = args.version if args.data or args.version is not None else trained.version
    table = FeatureTable.open(args.data or trained.data, version)
    meta.check(table, version=False)
    table.files_of(args.split)  # an unknown split is an error that names those there are
    config = replace(trained, data=table.uri, version=table.version, ranks=ranks, batch_size=args.batch_size)

    from dlrm.quiet import quiet

    quiet()
    from dlrm import build, checkpoint, feed
    from dlrm.guard import Guard
    from dlrm.trainer import evaluate
    from dlrm.world import world

    tables = tables_of(table.fields, config.model)
    with (world() as here,
          feed.evaluation(config, table, args.split, rank=here.rank, local_ranks=here.local_ranks) as batches):
        model, _ = build.model_of(config, tables, len(batches.dense_names), place(tables, ranks, "auto"), here)
        checkpoint.load(path, model, None, here)
        guard = Guard({t.name: t.rows for t in tables}, batches.dense_names, f"split {args.split!r}")
        found = evaluate(model, batches, list(batches.sparse_names), guard, here)
        if not here.first:
            return None
    say(f"{args.split}: {found}")
    return {**found.to_dict(), "split": args.split, "step": meta.step, "version": table.version,
            "checkpoint": str(path)}


if __name__ == "__main__":
    run(main, input_errors=(ConfigError, CheckpointError, TableError, BadData, PlanError))
