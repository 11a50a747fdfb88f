"""A run of `sluice bench`: combines a loader, its agent and the measurements, and loads for a while: `run_bench`.

It is a part of that program, so it may import every package.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.agent import policies
from sluice.agent.costs.rates import rates
from sluice.agent.report.format import printer
from sluice.agent.report.run_folder import RunFolder
from sluice.agent.report.story import Story, last_lines
from sluice.agent.runtime.knob_memory import KnobMemory
from sluice.agent.runtime.ticker import Ticker
from sluice.agent.tuning import TunedRun, advice
from sluice.common.lines import say
from sluice.etl.spec.table_transform import short_transforms
from sluice.ingest.options import table_named
from sluice.ingest.process.stacks import on_signal
from sluice.ingest.row_order import Order
from sluice.ingest.run_conditions import RunConditions
from sluice.tools.bench import BenchOptions

if TYPE_CHECKING:
    from sluice.ingest.loader import BatchLoader

_SETTLED = 2 / 3  # of the time, after which rates count as settled


def run_bench(options: BenchOptions) -> dict[str, Any]:
    """Loads as the options say, prints what happens and what would help, and returns the figures."""
    policies.make(options.tuning)  # a wrong name is reported before anything is opened
    conditions = RunConditions(
        options.table[0], options.conditions, options.quarantine, options.store_latency_ms
    )
    with ExitStack() as stack:
        loader = stack.enter_context(_open(options, conditions))
        table = loader.table
        memory = KnobMemory(loader, options, say=say)
        memory.start()
        dropped = loader.plan.dropped
        left = f" ({dropped:,} rows fill no batch, other rows each epoch)" if dropped else ""
        say(
            f"{table.uri} version {table.version}: {loader.plan.rows:,} rows, {len(loader)} steps an epoch{left}; "
            f"needs at least {loader.memory_need}; {loader.knobs}"
        )
        policy = policies.make(options.tuning)
        config = {**asdict(options), "version": table.version, "reader": loader.reader}
        del config["code"]  # the permission to run code
        folder = RunFolder.create(options.run, config) if options.run else None
        outcome: dict[str, Any] = {}
        tuned = stack.enter_context(
            TunedRun(
                loader.tunable,
                policy,
                folder=folder,
                outcome=lambda: outcome or loader.tunable.outcome(),
                # A fault on purpose is marked when it happens, not when it is noticed.
                listen=memory.observing(
                    printer("fault" if options.conditions.inject else "incident", say)
                ),
                learned=memory.learned,
            )
        )
        begun = loader.snapshot()
        figures = _load(options, loader, conditions, tuned)
        measured, stall = rates(begun, loader.snapshot()), figures["stall_fraction"]
        what_would_help = ""
        if measured and stall is not None:
            what_would_help = advice(measured, stall, tuned.status)
        outcome |= {
            **figures,
            "version": table.version,
            "reader": loader.reader,
            **conditions.outcome(loader),
        }
        tuned.close()
        outcome |= tuned.figures()
        memory.finish(policy=policy.name, learned=tuned.controller.learned())
    if folder is not None:
        outcome |= _summarise(folder.path, tuned.report)
    say(what_would_help)
    if outcome["order_hash"] is None:
        say("no epoch was finished, so there is no order hash; give more --seconds")
    return outcome


def _open(options: BenchOptions, conditions: RunConditions) -> BatchLoader:
    """Opens the table and its loader."""
    names = (conditions.table, *options.table[1:])
    table = table_named(names, options.roles, options.code, options.transforms)
    # This loads torch, so mistakes in the arguments are reported before.
    from sluice.ingest.cache.made_rows import place_of
    from sluice.ingest.loader import BatchLoader

    return BatchLoader(
        table.transformed(short_transforms(options.transforms)),
        batch_size=options.batch_size,
        split=options.split,
        seed=options.seed,
        read_ahead_epochs=options.epochs or sys.maxsize,
        memory_limit=options.memory_limit,
        cores=options.cores,
        cache=place_of(options.cache, options.cache_limit, options.epochs or 2),
        fill=options.fill,
        order=Order(
            shuffle=options.shuffle, streams=options.streams, window_rows=options.window_rows
        ),
        **conditions.settings(options.reader),
    )


def _load(
    options: BenchOptions, loader: BatchLoader, conditions: RunConditions, tuned: TunedRun
) -> dict[str, Any]:
    """Loads for the requested time while the agent tunes. Returns the figures, with the largest memory."""
    peak_bytes = 0

    def look_at_memory() -> bool:
        nonlocal peak_bytes
        peak_bytes = max(peak_bytes, loader.pipeline.machine.memory_used())
        return True

    peak = Ticker("sluice-peak", lambda: 0.05, look_at_memory)
    with ExitStack() as stack:
        stack.callback(peak.stop)
        peak.start()
        stack.enter_context(on_signal(loader.pipeline.stacks))
        tuned.start()
        with conditions.inject_faults(loader, tuned.record):
            figures = consume(
                loader,
                options.seconds,
                lambda: time.sleep(options.step_ms / 1000),
                epochs=options.epochs,
            )
        look_at_memory()
    return {**figures, "peak_bytes": peak_bytes}


def consume(
    loader: BatchLoader,
    seconds: float,
    step: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
    *,
    epochs: int | None = None,
) -> dict[str, Any]:
    """Takes batches for that many seconds from the first batch on, or exactly so many epochs, and returns the figures.
    Settled ones are those of the last third. `step` is the trainer's work for a batch."""
    hashes = list[str | None]()
    began = middle = None
    taken, done = 0, False
    while not done:
        for batch in loader:
            taken += 1
            began = clock() if began is None else began
            if batch.step == len(loader) - 1:
                hashes.append(loader.order_hash)
            share = taken / epochs / len(loader) if epochs else (clock() - began) / seconds
            if middle is None and share >= _SETTLED:
                middle = loader.stats()
            step()
            done = share >= 1 and (epochs is not None or taken > 1)
            if done:
                break
    figures = loader.tunable.outcome()
    settled = loader.stats()
    if middle is not None and settled.rows > middle.rows:
        settled = settled.since(middle)
    figures |= {
        "rows_per_s_settled": round(settled.rows_per_s),
        "stall_fraction_settled": round(settled.stall_fraction, 4),
        "order_hash": None,
    }
    if hashes:
        figures["order_hash"] = hashes[-1 if epochs else 0]
    return {**figures, "order_hashes": hashes} if epochs else figures


def _summarise(run: Path, report: Path | None) -> dict[str, Any]:
    """Prints what a run folder's report says, and returns its figures."""
    told = Story.read(run).summary
    for text in (*last_lines(told), *([f"report: {report}"] if report else [])):
        say(text)
    figures = {"outcome": told, "report": report and str(report), "incidents": told["incidents"]}
    if told["rows_per_s_settled"] is None:
        return figures
    return figures | {
        "rows_per_s_settled": round(told["rows_per_s_settled"]),
        "stall_fraction_settled": round(told["stall_settled"], 4),
    }
