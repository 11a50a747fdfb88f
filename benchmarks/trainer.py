"""Measures the trainer: one case per call, with the figures in the last line.

    python benchmarks/trainer.py plain                        against a plain PyTorch DLRM, 26 tables of 100 k rows
    python benchmarks/trainer.py cached --data TABLE          fed by the loader against the same batches from memory
    python benchmarks/trainer.py evaluation --data TABLE      without gradients and with them, and the bytes these keep
    python benchmarks/trainer.py start --data TABLE           seconds from the command to the first step
    python benchmarks/trainer.py optimisers --data TABLE      AUC and bytes of state, dense by table optimiser
    python benchmarks/trainer.py compress --data TABLE        AUC of smaller tables at equal bytes
    python benchmarks/trainer.py dtypes --data TABLE          AUC of tables of 16 bits, three seeds, a whole epoch
    python benchmarks/trainer.py seeds --data TABLE           three seeds and their spread

Contenders take turns, a few seconds each, over several rounds; figures are medians. Quality is that of the validation
split after `--steps` steps from the same first weights, on the same batches.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sluice.common.errors import UsageError
from sluice.common.program import run, say
from sluice.dlrm import run_plan
from sluice.dlrm.evaluation.split import evaluate
from sluice.dlrm.model.ranker import TableLayout, loss_of
from sluice.dlrm.model.towers import build
from sluice.dlrm.options import (
    OPTIMISERS,
    TABLE_DTYPES,
    TABLE_OPTIMISERS,
    Config,
    ModelConfig,
    OptimConfig,
    Table,
    tables_of,
)
from sluice.dlrm.ranks import Ranks, machine, world
from sluice.dlrm.sharding.apply import placed
from sluice.dlrm.telemetry.silence_warnings import quiet
from sluice.dlrm.training import assemble, loaders
from sluice.dlrm.training.assemble import TrainingParts, parts_of
from sluice.dlrm.training.input_checks import BatchChecker
from sluice.etl.table.table import FeatureTable
from sluice.ingest.batch import Batch
from sluice.ingest.loader import BatchLoader

ROWS, COLUMNS, DENSE, WIDTH = 100_000, 26, 13, 16
RATES = {"rowwise_adagrad": 0.05, "adagrad": 0.05, "adam": 0.001, "sgd": 1.0}
DENSE_RATES = {**RATES, "adagrad": 0.02, "sgd": 0.1}


class Plain(nn.Module):
    """As it is written first: an EmbeddingBag a column, dense gradients, the same tower."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(COLUMNS)
        )
        self.tower = build(ModelConfig(width=WIDTH), dense=DENSE, columns=COLUMNS)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        pooled = torch.stack(
            [table(column.unsqueeze(1)) for table, column in zip(self.tables, ids, strict=True)], 1
        )
        logits: torch.Tensor = self.tower(dense, pooled)
        return logits


def synthetic(rows: int, count: int) -> list[Batch]:
    """Ids as uneven as clicks are: the density falls with the id."""
    random = torch.Generator().manual_seed(1)
    found = []
    for step in range(count):
        ids = (ROWS * torch.rand(COLUMNS, rows, generator=random) ** 3).int()
        found.append(
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
    return found


def step(parts: TrainingParts, batch: Batch, number: int, here: Ranks) -> None:
    """One step, as the trainer takes it."""
    parts.rates.set_step(number)
    parts.dense.zero_grad()
    logits = parts.model(*parts.layout.features(batch))
    torch.autograd.backward(loss_of(logits, batch.label, batch.weight))
    parts.dense.step()


def in_turns(
    contenders: dict[str, Callable[[], int]], seconds: float, rounds: int
) -> dict[str, list[float]]:
    """Rows a second of each, by rounds. A contender takes one step and says how many rows that was."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        for _ in range(3):
            contender()
    for _ in range(rounds):
        for name, contender in contenders.items():
            rows, began = 0, time.perf_counter()
            while time.perf_counter() - began < seconds:
                rows += contender()
            found[name].append(rows / (time.perf_counter() - began))
        say("  ".join(f"{name} {rates[-1]:,.0f}/s" for name, rates in found.items()))
    return found


def plain(args: argparse.Namespace, here: Ranks) -> dict[str, Any]:
    config = Config(data="none", version=0, batch_size=args.batch_size)
    columns = [Table(name=f"C{n}", rows=ROWS, width=WIDTH) for n in range(COLUMNS)]
    layout = TableLayout(config.model, columns)
    parts = parts_of(config, layout, DENSE, placed(config, layout.tables, machine(1, 1)), here)
    batches = cycle(synthetic(args.batch_size, 8))
    other = Plain()
    optimiser = torch.optim.Adagrad(other.parameters(), lr=0.05)

    def ours() -> int:
        step(parts, next(batches), 0, here)
        return args.batch_size

    def theirs() -> int:
        batch = next(batches)
        optimiser.zero_grad()
        loss_of(
            other(batch.dense, batch.values.view(COLUMNS, -1)), batch.label, batch.weight
        ).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        return args.batch_size

    found = in_turns({"ours": ours, "plain": theirs}, args.seconds, args.rounds)
    return {
        "ours": statistics.median(found["ours"]),
        "plain": statistics.median(found["plain"]),
        "ratio": statistics.median(
            a / b for a, b in zip(found["ours"], found["plain"], strict=True)
        ),
        "state_bytes": COLUMNS * ROWS * 4,
        "plain_state_bytes": COLUMNS * ROWS * WIDTH * 4,
    }


def cached(args: argparse.Namespace, here: Ranks) -> dict[str, Any]:
    config, table, now = _run_of(args)
    wait = [0.0, 0.0]
    with BatchLoader(table, batch_size=config.batch_size, read_ahead_epochs=10**6) as loader:
        parts = parts_of(config, now.layout, len(loader.dense_names), now.placement, here)

        def endless() -> Iterator[Batch]:
            while True:
                yield from loader

        live = endless()
        kept = cycle(islice(_copies(live), 32))

        def fed() -> int:
            began = time.perf_counter()
            batch = next(live)
            got = time.perf_counter()
            step(parts, batch, 0, here)
            wait[0] += got - began
            wait[1] += time.perf_counter() - began
            return batch.rows

        def from_memory() -> int:
            batch = next(kept)
            step(parts, batch, 0, here)
            return batch.rows

        found = in_turns({"fed": fed, "cached": from_memory}, args.seconds, args.rounds)
    return {
        "fed": statistics.median(found["fed"]),
        "cached": statistics.median(found["cached"]),
        "ratio": statistics.median(
            a / b for a, b in zip(found["fed"], found["cached"], strict=True)
        ),
        "stall_fraction": wait[0] / wait[1],
    }


def evaluation(args: argparse.Namespace, here: Ranks) -> dict[str, Any]:
    """The forward pass alone, as an evaluation takes it."""
    config, table, now = _run_of(args)
    with BatchLoader(table, batch_size=config.batch_size) as loader:
        parts = parts_of(config, now.layout, len(loader.dense_names), now.placement, here)
        some = [parts.layout.features(b) for b in islice(_copies(loader), 16)]
    batches = cycle(some)

    def with_gradients() -> int:
        parts.model(*next(batches))
        return args.batch_size

    kept: dict[int, int] = {}  # by address: a tensor that several operations keep counts once

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept[t.data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        with_gradients()
    found = in_turns(
        {"with_gradients": with_gradients, "without_gradients": torch.no_grad()(with_gradients)},
        args.seconds,
        args.rounds,
    )
    return {
        **{name: statistics.median(rates) for name, rates in found.items()},
        "kept_bytes": sum(kept.values()),
    }


def start(args: argparse.Namespace, _here: Ranks) -> dict[str, Any]:
    found = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    "--nproc-per-node=2",
                    "-m",
                    "dlrm.train",
                    "--data",
                    args.data,
                    "--run-dir",
                    f"{folder}/run",
                    "--log-every",
                    "1",
                ],
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
            )
            assert process.stderr is not None
            found += [
                time.perf_counter() - began
                for line in process.stderr
                if line.startswith("step 1 ")
                for _ in [process.terminate()]
            ]
            process.wait()
    return {"seconds_to_first_step": statistics.median(found), "all": found}


def learned(
    config: Config,
    table: FeatureTable,
    steps: int | None,
    here: Ranks,
    *,
    split: str = "validation",
) -> dict[str, Any]:
    """What so many steps come to, or a whole epoch, on a split."""
    now = run_plan.plan_run(config, table, machine(1, 1))
    with BatchLoader(table, batch_size=config.batch_size, seed=config.seed) as loader:
        parts = parts_of(
            config,
            now.layout,
            len(loader.dense_names),
            now.placement,
            here,
            steps_per_epoch=len(loader),
        )
        began, worked, rows = time.perf_counter(), time.process_time(), 0
        for number, batch in enumerate(islice(loader, steps)):
            step(parts, batch, number, here)
            rows += batch.rows
        seconds, core_s = time.perf_counter() - began, time.process_time() - worked
    with loaders.evaluation(config, table, split, rank=0, local_ranks=1) as batches:
        checker = BatchChecker(
            {t.name: t.rows for t in now.layout.columns}, batches.dense_names, split
        )
        quality = evaluate(parts, batches, checker, here).quality
    return {
        "auc": quality.auc,
        "ne": quality.ne,
        "samples_per_s": rows / seconds,
        "core_us_per_sample": core_s / rows * 1e6,
        "state_bytes": now.state_bytes,
        "gradient_bytes": now.gradient_bytes,
        "table_bytes": sum(t.bytes for t in now.layout.tables),
        "parameters": now.count.parameters,
        "weight_bytes": sum(
            shard.tensor.nbytes
            for w in parts.model.state_dict().values()
            if hasattr(w, "local_shards")
            for shard in w.local_shards()
        ),
        "flops": now.count.flops,
    }


def _each(
    args: argparse.Namespace, here: Ranks, runs: dict[str, Config], table: FeatureTable
) -> dict[str, Any]:
    found = {}
    for name, config in runs.items():
        found[name] = learned(config, table, args.steps, here)
        say(
            f"{name:<28} auc {found[name]['auc']:.4f}  ne {found[name]['ne']:.4f}  "
            f"{found[name]['samples_per_s']:,.0f} samples/s  tables {found[name]['table_bytes']:,} B  "
            f"state {found[name]['state_bytes']:,} B"
        )
    return {"steps": args.steps, "runs": found}


def optimisers(args: argparse.Namespace, here: Ranks) -> dict[str, Any]:
    config, table, _ = _run_of(args)
    return _each(
        args,
        here,
        {
            f"{a} × {b}": replace(
                config,
                optim=OptimConfig(
                    table_optimiser=a, lr=RATES[a], dense_optimiser=b, dense_lr=DENSE_RATES[b]
                ),
            )
            for a in TABLE_OPTIMISERS
            if a != "adam" or torch.cuda.is_available()
            for b in OPTIMISERS
        },
        table,
    )


def compress(args: argparse.Namespace, here: Ranks) -> dict[str, Any]:
    """The large tables, and the same at an eighth of their bytes."""
    config, table, _ = _run_of(args)
    tables = tables_of(table.fields, config.model)
    chosen = {t.name: f"modulo:{t.rows // 8}" for t in tables if t.rows > 4000}
    smaller = replace(config, model=replace(config.model, compress=chosen))
    return _each(args, here, {"full": config, "modulo": smaller}, table)


def dtypes(args: argparse.Namespace, here: Ranks) -> dict[str, Any]:
    """On the test split. `nearest` is what FBGEMM's own kernel makes of fp16 on a CPU."""
    config, table, _ = _run_of(args)
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in range(3):
        for name in (*TABLE_DTYPES, "fp16, nearest"):
            one = replace(config, seed=seed, model=ModelConfig(table_dtype=name.partition(",")[0]))
            with (
                patch.object(assemble, "replace_tables", lambda *_: [])
                if "," in name
                else nullcontext()
            ):
                found.setdefault(name, []).append(learned(one, table, None, here, split="test"))
            say(
                f"{name:<14} seed {seed} auc {found[name][-1]['auc']:.4f} "
                f"{found[name][-1]['core_us_per_sample']:.1f} µs of a core a sample"
            )
    return {
        name: {
            "auc": statistics.mean(one["auc"] for one in runs),
            "less": statistics.mean(
                a["auc"] - b["auc"] for a, b in zip(found["fp32"], runs, strict=True)
            ),
            "core_us_per_sample": statistics.median(one["core_us_per_sample"] for one in runs),
            "weight_bytes": runs[0]["weight_bytes"],
        }
        for name, runs in found.items()
    }


def seeds(args: argparse.Namespace, here: Ranks) -> dict[str, Any]:
    config, table, _ = _run_of(args)
    found = _each(args, here, {str(n): replace(config, seed=n) for n in range(3)}, table)
    aucs = [r["auc"] for r in found["runs"].values()]
    return {**found, "mean": statistics.mean(aucs), "spread": max(aucs) - min(aucs)}


def _copies(batches: Iterable[Batch]) -> Iterator[Batch]:
    """A loader uses its batches' memory again."""
    for b in batches:
        yield replace(
            b,
            dense=b.dense.clone(),
            values=b.values.clone(),
            label=b.label.clone(),
            weight=b.weight.clone(),
            lengths=b.lengths.clone(),
        )


def _run_of(args: argparse.Namespace) -> tuple[Config, FeatureTable, run_plan.RunPlan]:
    if not args.data:
        raise UsageError("--data is missing: which feature table")
    table = FeatureTable.open(args.data)
    config = Config(data=table.uri, version=table.version, batch_size=args.batch_size)
    return config, table, run_plan.plan_run(config, table, machine(1, 1))


CASES = {
    f.__name__: f for f in (plain, cached, evaluation, start, optimisers, compress, dtypes, seeds)
}


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--data", metavar="TABLE", help="feature table, for all cases but `plain`")
    for flag, kind, default in (
        ("--batch-size", int, 4096),
        ("--seconds", float, 4.0),
        ("--rounds", int, 5),
        ("--steps", int, 150),
    ):
        parser.add_argument(flag, type=kind, default=default, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    quiet()
    if args.case == "start":
        return start(args, None)  # type: ignore[arg-type]
    with world() as here:
        return {
            "case": args.case,
            "threads": torch.get_num_threads(),
            **CASES[args.case](args, here),
        }


if __name__ == "__main__":
    run(main)
