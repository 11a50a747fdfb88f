"""Compares the predictions of `headroom` with the real change, in pairs of runs.

    python -m benchmarks.what_if TABLE [--only CASE,…] [--seconds 3] [--rounds 3]

In each round a loader runs under the conditions before, its pace is read and the rate under the others foretold; then
these are made real and measured, then the first again. The ratio is foretold over what came; the aim, fixed beforehand,
is that its median lies within 15 % of 1 in each case. `ranks` is the table ranks × batch × workers: foretold from one
rank's rates alone and the cost of agreeing at one batch, beside all settings measured, each in processes of its own.

Workers elsewhere are `local:4`, on the same cores. What other programs take is no part of the change: the model is
told how many of their threads wanted a core in the second run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.results import ROOT, table
from sluice import Loader
from sluice.common.program import run, say
from sluice.ingest.row_costs import RowCosts, Share
from sluice.ingest.stats import Snapshot
from sluice.tools.headroom import timed

RANKS, BATCHES, WORKERS = (1, 2), (1024, 8192), (1, 2)
FEW = 8  # batches that are used over and over to time a step alone


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Under which one of a pair runs."""

    delay_ms: float = 0.0
    """How long the store takes to answer."""
    step_ms: float = 0.0
    """What the consumer sleeps for a batch."""
    product: int = 0
    """What it computes: the product of two matrices of this size."""
    costly: int = 0
    """How often a transform takes a row's logarithms."""
    cores: int | None = None
    workers: dict[str, int] = field(default_factory=lambda: {"read": 1})
    elsewhere: str | None = None


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A change, and what the model says of it."""

    before: Conditions
    after: Conditions
    foretold: Callable[[RowCosts], RowCosts]


PAIRS = {
    "2 readers beside a trainer": Pair(
        before=Conditions(step_ms=1),
        after=Conditions(step_ms=1, workers={"read": 2}),
        foretold=lambda pace: pace.with_workers("read", 2),
    ),
    "2 readers at a far store": Pair(
        before=Conditions(delay_ms=60),
        after=Conditions(delay_ms=60, workers={"read": 2}),
        foretold=lambda pace: pace.with_workers("read", 2),
    ),
    "8 readers at a far store": Pair(
        before=Conditions(delay_ms=60),
        after=Conditions(delay_ms=60, workers={"read": 8}),
        foretold=lambda pace: pace.with_workers("read", 8),
    ),
    "4 readers on one core": Pair(
        before=Conditions(cores=1, workers={"read": 2}),
        after=Conditions(cores=1, workers={"read": 4}),
        foretold=lambda pace: pace.with_workers("read", 4),
    ),
    "2 transformers": Pair(
        before=Conditions(costly=4),
        after=Conditions(costly=4, workers={"read": 1, "costly": 2}),
        foretold=lambda pace: pace.with_workers("costly", 2),
    ),
    "2 cores for 1": Pair(
        before=Conditions(cores=1, workers={"read": 2}),
        after=Conditions(workers={"read": 2}),
        foretold=lambda pace: pace.with_cores(2),
    ),
    "1 core for 2": Pair(
        before=Conditions(workers={"read": 2}),
        after=Conditions(cores=1, workers={"read": 2}),
        foretold=lambda pace: pace.with_cores(1),
    ),
    "a store 3 × as fast": Pair(
        before=Conditions(delay_ms=60),
        after=Conditions(delay_ms=20),
        foretold=lambda pace: pace.with_store(3),
    ),
    "a cache": Pair(
        before=Conditions(delay_ms=20),
        after=Conditions(),
        foretold=lambda pace: pace.with_store(np.inf),
    ),
    "a trainer 2 × as fast": Pair(
        before=Conditions(step_ms=30, delay_ms=10),
        after=Conditions(step_ms=15, delay_ms=10),
        foretold=lambda pace: pace.with_consumer(2),
    ),
    "a computing trainer 4 × as fast": Pair(
        before=Conditions(product=1024),
        after=Conditions(product=645),
        foretold=lambda pace: pace.with_consumer((1024 / 645) ** 3),
    ),
    "4 remote readers": Pair(
        before=Conditions(delay_ms=60),
        after=Conditions(delay_ms=60, workers={}, elsewhere="local:4"),
        foretold=lambda pace: pace.with_remote(4, cores=0),
    ),
}


def costly(times: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def transform(columns: dict[str, Any]) -> dict[str, Any]:
        for column in columns.values():
            if column.dtype == np.float32:
                for _ in range(times):
                    np.log1p(np.abs(column))
        return columns

    return transform


@contextmanager
def on_cores(count: int | None) -> Iterator[None]:
    """All threads of this process on fewer cores; those that are started within keep to them."""
    before = os.sched_getaffinity(0)

    def pin(cores: Iterable[int]) -> None:
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread), cores)

    pin(sorted(before)[:count])
    try:
        yield
    finally:
        pin(before)


def step_of(conditions: Conditions) -> Callable[[Any], object]:
    if conditions.product:
        matrix = torch.rand(conditions.product, conditions.product)
        return lambda batch: matrix @ matrix
    return lambda batch: time.sleep(conditions.step_ms / 1000) if conditions.step_ms else None


def measured(data: str, conditions: Conditions, seconds: float, batch_size: int = 8192) -> RowCosts:
    """The pace under these conditions, from a loader of its own."""
    uri = f"latency://{conditions.delay_ms:g}ms{data}" if conditions.delay_ms else data
    step = step_of(conditions)
    began, used = time.perf_counter(), time.thread_time()
    for _ in range(FEW):
        step(None)
    step_s = (time.perf_counter() - began) / FEW / batch_size
    step_cpu_s = min(step_s, (time.thread_time() - used) / FEW / batch_size)
    transforms = [("costly", costly(conditions.costly))] if conditions.costly else []
    with (
        on_cores(conditions.cores),
        Loader(
            uri,
            batch_size=batch_size,
            read_ahead_epochs=sys.maxsize,
            tuning="fixed",
            transforms=transforms,
            workers=conditions.elsewhere,
        ) as loader,
    ):
        knobs = loader.knobs.with_workers(**conditions.workers)
        loader.apply(knobs)
        batches = iter(endless(loader))
        timed(batches, step, seconds / 3, time.perf_counter)
        while conditions.elsewhere and loader.snapshot().elsewhere["workers"] < int(
            conditions.elsewhere[6:]
        ):
            timed(batches, step, seconds / 3, time.perf_counter)  # until all are there
        before = loader.snapshot()
        timed(batches, step, seconds, time.perf_counter)
        after: Snapshot = loader.snapshot()
        head = loader._batches.limits.head
        return RowCosts.between(
            before, after, head=lambda name: head(knobs, name), step_s=step_s, step_cpu_s=step_cpu_s
        )


def endless(loader: Loader) -> Iterator[Any]:
    while True:
        yield from loader


def pairs(data: str, cases: list[str], seconds: float, rounds: int) -> list[dict[str, Any]]:
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in cases}
    for number in range(rounds):
        for name in cases:
            pair = PAIRS[name]
            first = measured(data, pair.before, seconds)
            then = measured(data, pair.after, seconds)
            second, came = measured(data, pair.before, seconds), then.measured
            told = statistics.mean(
                pace.rate(replace(pair.foretold(pace), others=then.others))
                for pace in (first, second)
            )
            found[name].append((statistics.mean((first.measured, second.measured)), told, came))
            say(
                f"round {number + 1}, {name}: before {found[name][-1][0]:,.0f}, foretold {told:,.0f}, came {came:,.0f} "
                f"rows/s, ratio {told / came:.2f}; other programs want "
                f"{first.others:.1f}, {then.others:.1f} and {second.others:.1f} cores"
            )
    return [
        {
            "change": name,
            **{
                what: statistics.median(column)
                for what, column in zip(
                    ("before", "foretold", "came"), zip(*each, strict=True), strict=True
                )
            },
            "foretold ÷ came": round(statistics.median(told / came for _, told, came in each), 3),
            "from": round(min(told / came for _, told, came in each), 2),
            "to": round(max(told / came for _, told, came in each), 2),
        }
        for name, each in found.items()
    ]


# ---- ranks × batch × workers


def model(dense: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(dense, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)
    )


def rank_main(argv: list[str]) -> None:
    """One rank of a setting: trains on what a loader gives, or on batches that are there already. It prints the seconds
    of a step, and those of them in which its thread was at work."""
    data, rank, ranks, batch_size, workers, seconds, store, cached = json.loads(argv[0])
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    with Loader(
        data,
        batch_size=batch_size,
        rank=rank,
        ranks=ranks,
        read_ahead_epochs=sys.maxsize,
        tuning="fixed",
    ) as loader:
        loader.apply(loader.knobs.with_workers(read=workers))
        net, steps = model(len(loader.dense_names)), 0
        batches: Iterator[Any] = endless(loader)
        if cached:
            batches = itertools.cycle(list(itertools.islice(batches, FEW)))
            loader.close()
        began, used, over = 0.0, 0.0, torch.zeros(1)
        for number, batch in enumerate(batches):
            if number == FEW:
                torch.distributed.barrier()
                began, used = time.perf_counter(), time.thread_time()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                net(batch.dense).squeeze(1), batch.label
            )
            loss.backward()
            for parameter in net.parameters():
                if ranks > 1:
                    torch.distributed.all_reduce(parameter.grad)
                parameter.data.add_(parameter.grad, alpha=-0.01 / ranks)
                parameter.grad = None
            if number >= FEW:
                steps += 1
                over[0] = time.perf_counter() - began > seconds
                if steps % FEW == 0:
                    torch.distributed.broadcast(over, 0)  # all stop at the same step
                    if over[0]:
                        break
        print(
            json.dumps(
                [(time.perf_counter() - began) / steps, (time.thread_time() - used) / steps]
            ),
            flush=True,
        )
    torch.distributed.destroy_process_group()


def trained(
    data: str, ranks: int, batch: int, workers: int, seconds: float, *, cached: bool = False
) -> tuple[float, float]:
    """The seconds of a step, and those of them in which a rank's thread was at work: means over the ranks."""
    code = "import sys; from benchmarks.what_if import rank_main; rank_main(sys.argv[1:])"
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    code,
                    json.dumps(
                        [data, rank, ranks, batch, workers, seconds, f"{folder}/store", cached]
                    ),
                ],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        said = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    step_s, work_s = (statistics.mean(each) for each in zip(*said, strict=True))
    return step_s, work_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What a training step takes on one rank alone: so much for a step, so much for each of its rows, and, beside
    others, so much until all ranks agree."""

    fixed_s: float
    row_s: float
    sync_s: Mapping[int, float]
    """Ranks → seconds a step."""

    @classmethod
    def of(
        cls, small: tuple[int, float], large: tuple[int, float], sync_s: Mapping[int, float]
    ) -> StepCost:
        """From two measured steps, each its rows and seconds."""
        row_s = max(0.0, (large[1] - small[1]) / (large[0] - small[0]))
        return cls(
            fixed_s=max(0.0, small[1] - row_s * small[0]), row_s=row_s, sync_s={1: 0.0, **sync_s}
        )

    def seconds(self, rows: float, ranks: int) -> float:
        return self.fixed_s + self.row_s * rows + self.sync_s[ranks]


def ranks_table(
    paces: Mapping[int, RowCosts], step: StepCost, ranks: Sequence[int], workers: Iterable[int]
) -> dict[tuple[int, int, int], float]:
    """(ranks, batch, workers of the narrowest stage a rank) → rows a second of all ranks on one host.

    `paces` has for each global batch what one rank without a consumer costs, with batches of that size."""
    found = {}
    for many in workers:
        for batch, pace in paces.items():
            for count in ranks:
                each = step.seconds(batch / count, count) * count / batch  # of a rank's row
                cpu_s = min(each, (step.fixed_s * count / batch) + step.row_s)
                stages = {
                    name: replace(
                        share, workers=count * (many if name == pace.narrowest else share.workers)
                    )
                    for name, share in pace.stages.items()
                }
                found[count, batch, many] = pace.rate(
                    replace(
                        pace,
                        stages=stages,
                        consumer=Share(workers=count, cpu_s=cpu_s, wait_s=max(0.0, each - cpu_s)),
                    )
                )
    return found


def ranks_sweep(data: str, seconds: float) -> list[dict[str, Any]]:
    """The whole table, foretold and measured."""
    paces = {batch: measured(data, Conditions(), seconds, batch) for batch in BATCHES}
    small, large = (
        (batch, trained(data, 1, batch, 1, seconds, cached=True)[1]) for batch in BATCHES
    )
    two_s, work_s = trained(data, 2, BATCHES[0], 1, seconds, cached=True)
    step = StepCost.of(small, large, {2: two_s - work_s})
    say(
        f"a step: {step.fixed_s * 1e3:.2f} ms and {step.row_s * 1e6:.2f} µs a row; agreeing "
        f"{step.sync_s[2] * 1e3:.2f} ms"
    )
    told, found = ranks_table(paces, step, RANKS, WORKERS), []
    for ranks, batch, workers in itertools.product(RANKS, BATCHES, WORKERS):
        came, foretold = (
            batch / trained(data, ranks, batch, workers, seconds)[0],
            told[ranks, batch, workers],
        )
        found.append(
            {
                "ranks": ranks,
                "batch": batch,
                "readers a rank": workers,
                "foretold": foretold,
                "came": came,
                "foretold ÷ came": round(foretold / came, 3),
            }
        )
        say(str(found[-1]))
    return found


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", type=Path)
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=[*PAIRS, "ranks"],
        metavar="CASE,…",
        help=f"of {', '.join(PAIRS)}, ranks (default: all)",
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="of each run (default %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(argv)
    if unknown := [name for name in given.only if name not in (*PAIRS, "ranks")]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(PAIRS)}, ranks")
    torch.set_num_threads(1)
    data = str(given.table.resolve())
    found: dict[str, Any] = {}
    if named := [name for name in given.only if name in PAIRS]:
        found["pairs"] = pairs(data, named, given.seconds, given.rounds)
        say(table(found["pairs"]))
    if "ranks" in given.only:
        found["ranks"] = ranks_sweep(data, given.seconds)
        say(table(found["ranks"]))
    return found


if __name__ == "__main__":
    run(main)
