"""Trains a table whole epochs, and measures the AUC and the processor time: `learned`, and tables of 16 bits.

python -m benchmarks.trainer dtypes --data TABLE          AUC of tables of 16 bits, three seeds, a whole epoch
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sluice.common.lines import say
from sluice.common.program import run
from sluice.dlrm.evaluation.split import evaluate
from sluice.dlrm.footprint import Footprint
from sluice.dlrm.model.ranker import loss_of
from sluice.dlrm.options import (
    TABLE_DTYPES,
    Config,
    ModelConfig,
)
from sluice.dlrm.ranks import Ranks, machine, world
from sluice.dlrm.telemetry.silence_warnings import quiet
from sluice.dlrm.training import assemble, loaders
from sluice.dlrm.training.assemble import TrainingParts, parts_of
from sluice.etl.table.table import FeatureTable
from sluice.ingest.batch import Batch
from sluice.ingest.loader import BatchLoader

ROWS, COLUMNS, DENSE = 100_000, 26, 13


def synthetic(rows: int, count: int) -> list[Batch]:
    """Ids as uneven as clicks are: the density falls with the id."""
    random = torch.Generator().manual_seed(1)
    batches = []
    for step in range(count):
        ids = (ROWS * torch.rand(COLUMNS, rows, generator=random) ** 3).int()
        batches.append(
            Batch(
                dense=torch.rand(DENSE, rows, generator=random).T,
                values=ids.flatten(),
                lengths=torch.ones(ids.numel(), dtype=torch.int32),
                label=(torch.rand(rows, generator=random) < 0.25).float(),
                weight=torch.ones(rows),
                rows=rows,
                epoch=0,
                step=step,
            )
        )
    return batches


def step(parts: TrainingParts, batch: Batch, number: int, here: Ranks) -> None:
    """One step, as the trainer takes it."""
    parts.rates.set_step(number)
    parts.dense.zero_grad()
    logits = parts.model(*parts.layout.features(batch))
    torch.autograd.backward(loss_of(logits, batch.label, batch.weight))
    parts.dense.step()


def learned(
    config: Config, table: FeatureTable, here: Ranks, *, split: str = "validation"
) -> dict[str, Any]:
    """Trains an epoch, and returns its quality on a split and its costs."""
    now = Footprint.of(config, table, machine(1, 1))
    with BatchLoader(table, batch_size=config.batch_size, seed=config.seed) as loader:
        parts = parts_of(
            config,
            now.layout,
            len(loader.dense_names),
            now.placement,
            here,
        )
        began, worked, rows = time.perf_counter(), time.process_time(), 0
        for number, batch in enumerate(loader):
            step(parts, batch, number, here)
            rows += batch.rows
        seconds, core_s = time.perf_counter() - began, time.process_time() - worked
    with loaders.evaluation(config, table, split, rank=0, local_ranks=1) as batches:
        quality = evaluate(parts, batches, split, here).quality
    return {
        "auc": quality.auc,
        "samples_per_s": rows / seconds,
        "core_us_per_sample": core_s / rows * 1e6,
        "table_bytes": sum(t.bytes for t in now.layout.tables),
        "parameters": now.parameters,
        "weight_bytes": sum(
            shard.tensor.nbytes
            for w in parts.model.state_dict().values()
            if hasattr(w, "local_shards")
            for shard in w.local_shards()
        ),
    }


def dtypes(data: str, batch_size: int, here: Ranks) -> dict[str, Any]:
    """Measures each type of tables on the test split. `nearest` is the rounding of FBGEMM's own kernel for fp16 on a
    CPU."""
    table = FeatureTable.open(data)
    config = Config(data=table.uri, version=table.version, batch_size=batch_size)
    by_dtype: dict[str, list[dict[str, Any]]] = {}
    for seed in range(3):
        for name in (*TABLE_DTYPES, "fp16, nearest"):
            variant = replace(
                config, seed=seed, model=ModelConfig(table_dtype=name.partition(",")[0])
            )
            with (
                patch.object(assemble, "replace_tables", lambda *_: [])
                if "," in name
                else nullcontext()
            ):
                by_dtype.setdefault(name, []).append(learned(variant, table, here, split="test"))
            say(
                f"{name:<14} seed {seed} auc {by_dtype[name][-1]['auc']:.4f} "
                f"{by_dtype[name][-1]['core_us_per_sample']:.1f} µs of a core a sample"
            )
    return {
        name: {
            "auc": statistics.mean(run["auc"] for run in runs),
            "less": statistics.mean(
                a["auc"] - b["auc"] for a, b in zip(by_dtype["fp32"], runs, strict=True)
            ),
            "core_us_per_sample": statistics.median(run["core_us_per_sample"] for run in runs),
            "weight_bytes": runs[0]["weight_bytes"],
        }
        for name, runs in by_dtype.items()
    }


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=["dtypes"])
    parser.add_argument("--data", metavar="TABLE", required=True, help="feature table")
    parser.add_argument("--batch-size", type=int, default=4096, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    quiet()
    with world() as here:
        return {"threads": torch.get_num_threads(), **dtypes(args.data, args.batch_size, here)}


if __name__ == "__main__":
    run(main)
