"""A run of `sluice bench`: combines a loader, its agent and the measurements, and loads for a while: `run_bench`.

It is a part of that program, so it may import every package.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from sluice.agent import policies
from sluice.agent.controller import Controller
from sluice.agent.report import page
from sluice.agent.report.format import line
from sluice.agent.report.narrative import last_lines, summary
from sluice.agent.report.run_folder import Run, RunFolder
from sluice.agent.runtime.foreknowledge import foreknowledge
from sluice.agent.runtime.knob_memory import KnobMemory
from sluice.agent.runtime.saved_state import is_file_name
from sluice.common.program import say
from sluice.etl.spec.table_transform import short_transforms
from sluice.etl.table.table import FeatureTable
from sluice.ingest.columns import Columns
from sluice.ingest.knobs import DECODE, FETCH, SIZES, KnobError, Knobs, nearest
from sluice.ingest.options import function_of, table_named
from sluice.ingest.process.stacks import on_signal
from sluice.ingest.read.parquet_files import ParquetFiles
from sluice.ingest.read.sources import reader_of
from sluice.ingest.row_order import Order
from sluice.ingest.run_conditions import RunConditions
from sluice.ingest.stage_spec import BATCH, COLLATE, SHUFFLE
from sluice.ingest.stats import Snapshot
from sluice.tools.bench_lines import advice, measurement
from sluice.tools.bench_options import BenchOptions
from sluice.tools.bench_outcome import Peak, consume

if TYPE_CHECKING:
    from sluice.ingest.loader import BatchLoader


def run_bench(options: BenchOptions) -> dict[str, Any]:
    """Loads as the options say, prints what happens and what would help, and returns the figures."""
    reader = reader_of(options.reader)
    policies.make(options.tuning)  # a wrong name is reported before anything is opened
    conditions = RunConditions(
        options.table[0], options.conditions, options.quarantine, options.store_latency_ms
    )
    functions = [(function_of(name)[0], name) for name in options.udf]
    table = _open_table(options, conditions.table, [name for name, _ in functions])
    # This loads torch, so mistakes in the arguments are reported before.
    from sluice.ingest.loader import BatchLoader

    with ExitStack() as stack:
        loader = stack.enter_context(
            BatchLoader(
                table,
                batch_size=options.batch_size,
                split=options.split,
                seed=options.seed,
                read_ahead_epochs=options.epochs or sys.maxsize,
                memory_limit=options.memory_limit,
                transforms=functions,
                fill=options.fill,
                order=Order(
                    shuffle=options.shuffle,
                    streams=options.streams,
                    window_rows=options.window_rows,
                ),
                reading=conditions.reading(reader),
                errors=conditions.errors,
                workers=conditions.workers,
            )
        )
        memory = KnobMemory(loader, options, say=say)
        memory.start()
        folder = None
        if options.run:
            told = {**options.to_dict(), "version": table.version, "reader": loader.reader}
            folder = stack.enter_context(RunFolder.create(options.run, told))
        dropped = loader.plan.dropped
        left = f" ({dropped:,} rows fill no batch, other rows each epoch)" if dropped else ""
        say(
            f"{table.uri} version {table.version}: {loader.plan.rows:,} rows, {len(loader)} steps an epoch{left}; "
            f"needs at least {loader.memory_need}; {loader.knobs}"
        )
        outcome, what_would_help = _load(options, loader, conditions, memory, folder)
    if folder is not None:
        told = outcome["outcome"]
        report = page.written(folder.path, say)
        outcome |= {"report": report and str(report), "occasions": told["occasions"]}
        for text in (*last_lines(told), *([f"report: {report}"] if report else [])):
            say(text)
    say(what_would_help)
    if outcome["order_hash"] is None:
        say("no epoch was finished, so there is no order hash; give more --seconds")
    return outcome


def _open_table(
    options: BenchOptions, name: str, functions: list[str]
) -> FeatureTable | ParquetFiles:
    """Opens the table. Raises what a loader would refuse of its columns, and of the names of stages."""
    names = (name, *options.table[1:])
    table = table_named(names, options.roles, options.code, options.transforms)
    table = table.transformed(short_transforms(options.transforms))
    plain = table if isinstance(table, ParquetFiles) else None
    columns = Columns.of(table.fields, options.fill, known=plain.fill if plain else {})
    if plain:
        plain.check(columns)
    if not is_file_name(options.knobs):
        asked = Knobs().parse(options.knobs, fetch_bytes=sys.maxsize)
        made = (*functions, *(transform.name for transform in table.transforms))
        known = {FETCH, DECODE, SHUFFLE.name, BATCH.name, COLLATE.name, *made}
        for stage in (*asked.workers, *asked.backend, *asked.fused):
            if not known.issuperset(stage.split("+")):
                raise KnobError(f"no stage {stage!r}{nearest(stage, (*known, *SIZES))}")
    return table


def _load(
    options: BenchOptions,
    loader: BatchLoader,
    conditions: RunConditions,
    memory: KnobMemory,
    folder: RunFolder | None,
) -> tuple[dict[str, Any], str]:
    """Loads for the requested time. Returns the figures, and what would help."""
    policy = policies.make(options.tuning, foreknowledge(loader), options.agent_weights)
    # A fault on purpose is marked when it happens, not when it is noticed.
    record = _Record(loader, folder, "fault" if options.conditions.inject else "occasion")
    controller = Controller(
        loader,
        policy,
        record=memory.observing(record.event),
        observe=memory.observing(record.metric),
        looks=partial(record.write, "look"),
        learned=memory.learned,
    )
    begun = loader.snapshot()
    with Peak(loader.memory_used) as peak, controller, on_signal(loader.stacks):
        with conditions.inject_faults(loader, record.event):
            measured = consume(
                loader,
                options.seconds,
                lambda: time.sleep(options.step_ms / 1000),
                epochs=options.epochs,
            )
        controller.stop()
        knobs = loader.knobs
        what_would_help = advice(begun, loader.snapshot(), knobs)
        memory.finish(policy=policy.name, learned=controller.learned())
        loader.close()
        outcome = {
            **measured.figures(),
            "peak_bytes": peak.bytes,
            "decisions": controller.decisions,
            "opening": controller.opening,
            "knobs": knobs.to_dict(),
            "version": loader.table.version,
            "tuning": policy.name,
            "reader": loader.reader,
            **conditions.outcome(loader),
        }
    if folder is not None:
        told = summary(Run.read(folder.path), outcome)
        outcome["outcome"] = told
        if told["rows_per_s_settled"] is not None:  # as the report has it
            outcome |= {
                "rows_per_s_settled": round(told["rows_per_s_settled"]),
                "stall_fraction_settled": round(told["stall_settled"], 4),
            }
        record.write("event", {"kind": "end", **outcome})
    return outcome, what_would_help


class _Record:
    """Prints the events and measurements of a run, and writes them to its folder, if it has one."""

    def __init__(self, loader: BatchLoader, folder: RunFolder | None, marked: str) -> None:
        """Events of the kind `marked` get the letters that the report has for them."""
        self._loader, self._folder, self._marked = loader, folder, marked
        self._last: Snapshot | None = None
        self._letters = cycle(ascii_uppercase)

    def event(self, event: dict[str, Any]) -> None:
        marked = event["kind"] == self._marked
        say(f"{next(self._letters)}. {line(event)}" if marked else line(event))
        self.write("event", event)

    def metric(self, metric: dict[str, Any]) -> None:
        before, self._last = self._last, self._loader.snapshot()
        if before is not None:
            say(measurement(before, self._last, self._loader.knobs.fused))
        self.write("metric", metric)

    def write(self, what: str, told: Mapping[str, Any]) -> None:
        """Writes a line to the folder. A full disk is reported once. It costs that line and those after it."""
        if self._folder is None:
            return
        try:
            getattr(self._folder, what)(told)
        except OSError as error:
            path, self._folder = error.filename or self._folder.path, None
            say(
                f"{path}: nothing more is written there ({error.strerror or error}); the run goes on"
            )
