"""A run of `sluice bench`: `BenchSession` combines a loader, its agent and the measurements, and loads for a while.

It is a part of that program, so it may import every package.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from sluice.agent import policies
from sluice.agent.controller import Controller
from sluice.agent.report import page
from sluice.agent.report.narrative import last_lines, summary
from sluice.agent.report.run_folder import Run, RunFolder
from sluice.agent.runtime.foreknowledge import foreknowledge
from sluice.agent.runtime.knob_memory import KnobMemory
from sluice.agent.runtime.saved_state import is_file_name
from sluice.etl.spec.table_transform import short_transforms
from sluice.ingest.columns import Columns
from sluice.ingest.knobs import DECODE, FETCH, SIZES, KnobError, Knobs, nearest
from sluice.ingest.options import function_of, table_named
from sluice.ingest.process.stacks import on_signal
from sluice.ingest.read.parquet_files import ParquetFiles
from sluice.ingest.read.petastorm.options import PetastormOptions
from sluice.ingest.read.sources import reader_of
from sluice.ingest.row_order import Order
from sluice.ingest.run_conditions import RunConditions
from sluice.ingest.stage_spec import BATCH, COLLATE, SHUFFLE
from sluice.tools.bench_options import BenchOptions
from sluice.tools.bench_outcome import BenchOutcome, Peak, consume
from sluice.tools.terminal import View, advice

_SETTLED = 1 / 3  # share of the time at its end that counts as settled


class BenchSession:
    """A loader with its agent and their measurements. It is a context."""

    def __init__(self, options: BenchOptions, say: Callable[[str], None]) -> None:
        self._options, self._say = options, say
        self._reader, self._policy = reader_of(options.reader), policies.make(options.tuning)
        self._conditions = RunConditions(
            options.table[0], options.conditions, options.quarantine, options.store_latency_ms
        )
        self._functions = [(function_of(name)[0], name) for name in options.udf]
        table = table_named(
            (self._conditions.table, *options.table[1:]),
            options.roles,
            options.code,
            options.transforms,
        )
        self._table = table.transformed(short_transforms(options.transforms))
        plain = self._table if isinstance(self._table, ParquetFiles) else None
        columns = Columns.of(self._table.fields, options.fill, known=plain.fill if plain else {})
        if plain:  # what the loader would refuse
            plain.check(columns)
        if not is_file_name(options.knobs):
            asked = Knobs().parse(options.knobs, fetch_bytes=sys.maxsize)
            made = [name for name, _ in self._functions]
            made += [transform.name for transform in self._table.transforms]
            known = {FETCH, DECODE, SHUFFLE.name, BATCH.name, COLLATE.name, *made}
            for stage in (*asked.workers, *asked.backend, *asked.fused):
                if not known.issuperset(stage.split("+")):
                    raise KnobError(f"no stage {stage!r}{nearest(stage, (*known, *SIZES))}")
        self._stack = ExitStack()
        self._run: RunFolder | None = None
        self._run_is_full = False

    def __enter__(self) -> BenchSession:
        # This loads torch, so mistakes in the arguments are reported before.
        from sluice.ingest.loader import BatchLoader

        options = self._options
        with ExitStack() as stack:
            self._loader = loader = stack.enter_context(
                BatchLoader(
                    self._table,
                    batch_size=options.batch_size,
                    split=options.split,
                    seed=options.seed,
                    read_ahead_epochs=options.epochs or sys.maxsize,
                    memory_limit=options.memory_limit,
                    transforms=self._functions,
                    fill=options.fill,
                    order=Order(
                        shuffle=options.shuffle,
                        streams=options.streams,
                        window_rows=options.window_rows,
                        sample=options.sample or None,
                    ),
                    reading=self._conditions.reading(self._reader, PetastormOptions()),
                    errors=self._conditions.errors,
                    workers=self._conditions.workers,
                )
            )
            self._policy = policies.make(
                options.tuning, foreknowledge(loader), options.agent_weights
            )
            self._knob_memory = KnobMemory(loader, options, say=self._say)
            self._knob_memory.start()
            if options.run:
                self._run = stack.enter_context(
                    RunFolder.create(
                        options.run,
                        {
                            **options.to_dict(),
                            "version": self._table.version,
                            "reader": loader.reader,
                        },
                    )
                )
            left = (
                f" ({loader.plan.dropped:,} rows fill no batch, other rows each epoch)"
                if loader.plan.dropped
                else ""
            )
            self._say(
                f"{self._table.uri} version {self._table.version}: {loader.plan.rows:,} rows, {len(loader)} "
                f"steps an epoch{left}; needs at least {loader.memory_need}; {loader.knobs}"
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def run(self) -> dict[str, Any]:
        """Loads for the requested time and returns the figures."""
        loader, stack = self._loader, self._stack
        self._view = View()
        stack.callback(self._view.close)
        peak = stack.enter_context(Peak(loader.memory_used))
        controller = stack.enter_context(
            Controller(
                loader,
                self._policy,
                record=self._knob_memory.observing(self._record),
                observe=self._knob_memory.observing(self._observe),
                looks=partial(self._write, "look"),
                learned=self._knob_memory.learned,
            )
        )
        begun = loader.snapshot()
        with on_signal(loader.stacks), self._conditions.inject_faults(loader, self._record):
            measured = consume(
                loader, self._options.seconds, self._step, epochs=self._options.epochs
            )
        controller.stop()
        knobs = loader.knobs
        self._advice = advice(begun, loader.snapshot(), knobs)
        self._knob_memory.finish(policy=self._policy.name, learned=controller.learned())
        loader.close()
        outcome = {
            **_figures(measured, self._options.epochs),
            "peak_bytes": peak.bytes,
            "decisions": controller.decisions,
            "opening": controller.opening,
            "knobs": knobs.to_dict(),
            "version": self._table.version,
            "tuning": self._policy.name,
            "reader": self._reader,
            **self._conditions.outcome(loader),
        }
        if self._run is not None:
            told = summary(Run.read(self._run.path), outcome)
            outcome["outcome"] = told
            if told["rows_per_s_settled"] is not None:  # as the report has it
                outcome |= {
                    "rows_per_s_settled": round(told["rows_per_s_settled"]),
                    "stall_fraction_settled": round(told["stall_settled"], 4),
                }
            self._write("event", {"kind": "end", **outcome})
        return outcome

    def reported(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """Writes the report after the run folder is closed, and returns the figures together with the report's."""
        if self._run is not None:
            told = outcome["outcome"]
            report = page.written(self._run.path, self._say)
            outcome = {**outcome, "report": report and str(report), "occasions": told["occasions"]}
            for line in last_lines(told):
                self._say(line)
            if report is not None:
                self._say(f"report: {report}")
        self._say(self._advice)
        if outcome["order_hash"] is None:
            self._say("no epoch was finished, so there is no order hash; give more --seconds")
        return outcome

    def _step(self) -> None:
        if self._options.step_ms:
            time.sleep(self._options.step_ms / 1000)

    def _observe(self, metric: dict[str, Any]) -> None:
        self._view.show(self._loader.snapshot(), self._loader.knobs.fused)
        self._write("metric", metric)

    def _record(self, event: dict[str, Any]) -> None:
        # A fault on purpose is marked when it happens, not when it is noticed.
        marked = "fault" if self._options.conditions.inject else "occasion"
        self._view.record(event, mark=event["kind"] == marked)
        self._write("event", event)

    def _write(self, what: str, line: Mapping[str, Any]) -> None:
        """Writes a line to the run folder, if there is one. A full disk is reported once. It costs that line and those
        after it."""
        if self._run is None or self._run_is_full:
            return
        try:
            getattr(self._run, what)(line)
        except OSError as error:
            self._run_is_full = True
            self._say(
                f"{error.filename or self._run.path}: nothing more is written there ({error.strerror or error}); "
                "the run goes on"
            )


def _figures(measured: BenchOutcome, epochs: int | None) -> dict[str, Any]:
    """Returns the consumer's measurements as figures, with the order hash of the first epoch. With `epochs`, it is that
    of the last."""
    of_epochs = (
        {}
        if epochs is None
        else {"order_hash": measured.order_hashes[-1], "order_hashes": measured.order_hashes}
    )
    settled = _SETTLED if measured.rows_per_s(_SETTLED) else 1.0
    return {
        "rows_per_s": round(measured.rows_per_s()),
        "rows_per_s_settled": round(measured.rows_per_s(settled)),
        "stall_fraction": round(measured.stall_fraction(), 4),
        "stall_fraction_settled": round(measured.stall_fraction(settled), 4),
        "first_batch_s": round(measured.waits[0], 3),
        "order_hash": measured.order_hash,
        "rows": measured.rows,
        **of_epochs,
    }
