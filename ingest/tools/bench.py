"""Measures how fast a table can be loaded here, against how fast it can be decoded: `sluice bench TABLE`."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from sluice.agent import policies
from sluice.agent.controller import Controller
from sluice.agent.report import page
from sluice.agent.report.format import line
from sluice.agent.report.incidents import occasions
from sluice.agent.report.run_folder import Run, RunFolder
from sluice.agent.runtime import knob_memory
from sluice.etl.common.arguments import ArgumentParser
from sluice.etl.common.errors import UsageError
from sluice.etl.common.program import say
from sluice.etl.spec import code_options
from sluice.etl.spec.transforms import short_transforms
from sluice.ingest import options as wishes
from sluice.ingest.columns import Columns
from sluice.ingest.knobs import parse_bytes
from sluice.ingest.loader import BatchLoader
from sluice.ingest.options import function_of, roles_of
from sluice.ingest.process.stacks import on_signal
from sluice.ingest.read.parquet_files import table_of
from sluice.ingest.read.reader import AUTO, READERS, RowGroupReader, RowGroupSource, reader_of, source_of
from sluice.ingest.row_order import Read
from sluice.ingest.stages.transform import Transform
from sluice.ingest.tools.decode_limit import decode_rows_per_s
from sluice.ingest.tools.run_conditions import RunConditions
from sluice.ingest.tools.terminal import View

_EXAMPLES = """\
examples:
  sluice bench data/clicks --batch-size 8192 --seconds 20
  sluice bench data/clicks --tuning auto --knobs read=1 --store-latency-ms 50
  sluice bench data/clicks --udf mine.features:log1p --step-ms 5 --memory-limit 2GiB
  sluice bench data/clicks --udf mine.udfs:slow --knobs slow.backend=process,slow=2 --inject kill-worker@5s
  sluice bench "latency:///data/clicks?latency_ms=50&error_rate=0.1"
"""
_LOOK_S = 0.05
_SETTLED = 1 / 3  # share of the time at its end that counts as settled
_DECODE_S = 0.4
_DECODE_THREADS = (1, 2, 4)


@dataclass
class BenchOutcome:
    """What a consumer saw: when each batch came, how many rows it held, and how long it had to be waited for."""

    marks: list[tuple[float, int]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    """The seconds of waiting before each batch; 0 for the first, which is not counted."""
    order_hash: str | None = None
    """The order hash of the first epoch, once it has ended."""

    def rows_per_s(self, share: float = 1.0) -> float:
        """The rate from the first batch (or so late that `share` of the time is left) to the last; the first is not
        counted."""
        kept = self.marks[self._from(share):]
        return sum(rows for _, rows in kept[1:]) / (kept[-1][0] - kept[0][0]) if len(kept) > 1 else 0.0

    def stall_fraction(self, share: float = 1.0) -> float:
        """The share of that time that was spent waiting."""
        first = self._from(share)
        spent = self.marks[-1][0] - self.marks[first][0]
        return min(1.0, sum(self.waits[first + 1:]) / spent) if spent else 0.0

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.marks)

    def _from(self, share: float) -> int:
        begin, end = self.marks[0][0], self.marks[-1][0]
        return next(n for n, (at, _) in enumerate(self.marks) if at >= end - share * (end - begin))


def consume(loader: BatchLoader, seconds: float, step: Callable[[], None],
            clock: Callable[[], float] = time.perf_counter) -> BenchOutcome:
    """Takes batches for that many seconds from the first on, epoch after epoch. `step` is what a trainer does with
    one."""
    found = BenchOutcome()
    end = float("inf")
    began = clock()
    while True:
        for batch in loader:
            now = clock()
            found.waits.append(now - began if found.marks else 0.0)
            if not found.marks:
                end = now + seconds
            found.marks.append((now, batch.rows))
            found.order_hash = found.order_hash or loader.order_hash
            if now >= end and len(found.marks) > 1:
                return found
            step()
            began = clock()


class Peak:
    """A context that notes the most memory in use while it lasts."""

    def __init__(self, memory_used: Callable[[], int]):
        self.bytes = 0
        self._memory_used, self._stop = memory_used, threading.Event()
        self._thread = threading.Thread(target=self._run, name="sluice-peak", daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            self.bytes = max(self.bytes, self._memory_used())

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.bytes = max(self.bytes, self._memory_used())


@dataclass
class DecodeLimit:
    """The best decoding rate so far, over a few numbers of threads tried in turn."""

    source: RowGroupSource
    groups: RowGroupReader
    rows_per_s: float = 0.0
    threads: int = 0

    def measure(self) -> None:
        for threads in _DECODE_THREADS:
            rate = decode_rows_per_s(self.source, self.groups, threads, _DECODE_S)
            if rate > self.rows_per_s:
                self.rows_per_s, self.threads = rate, threads


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="sluice bench", epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Loads a table as a trainer would and says how fast, beside how fast its reader decodes "
                            "(the limit). The last line of the output is one JSON object.")
    add = parser.add_argument
    add("table", help="a feature table, as etl/job.py writes it, or any folder, glob or file of Parquet")
    add("--roles", metavar="ROLE=NAME,…;…", help="of the columns of plain Parquet, for instance "
        "'label=click;dense=I*;sparse=C*,user' (default: guessed, and printed)")
    add("--fill", type=float, metavar="NUMBER", help="what stands where a number is missing (default: an error)")
    add("--batch-size", type=int, default=8192, help="rows of a batch (default %(default)s)")
    add("--seconds", type=float, default=10.0, help="how long to load, from the first batch on (default %(default)s)")
    add("--split", default="train", help="which part of the table (default %(default)s)")
    add("--reader", choices=(AUTO, *READERS), default=AUTO,
        help="who decodes (default: petastorm where it is installed, else arrow)")
    add("--tuning", default="fixed", metavar="POLICY",
        help="who turns the knobs: " + ", ".join(policies.names()) + " (default %(default)s, as a setting is "
        "measured unless more is asked for; training has auto)")
    add("--udf", action="append", default=[], metavar="MODULE:FUNCTION",
        help="a transform: a function over a dict of numpy arrays, a stage of its own, which can also run in "
        "processes (--knobs NAME.backend=process); may be given again")
    add("--arrow-udf", action="append", default=[], metavar="MODULE:FUNCTION",
        help="a transform over a pyarrow.RecordBatch, after those of --udf")
    add("--step-ms", type=float, default=0.0, help="how long the trainer takes for a batch (default %(default)s)")
    add("--store-latency-ms", type=float, default=0.0,
        help="how long a store takes before it answers a row group's read (default %(default)s)")
    add("--memory-limit", type=parse_bytes, metavar="BYTES", help="for the whole process, for instance 2GiB "
        "(default: what the machine allows)")
    add("--seed", type=int, default=0, help="of the order of rows (default %(default)s)")
    add("--no-shuffle", action="store_true", help="rows as they lie")
    add("--run-dir", "--run", dest="run", metavar="DIR", help="a new folder for events, metrics and a report")
    add("--quarantine", metavar="FILE", default="quarantine.jsonl", help="where rows set aside are listed "
        "(default %(default)s)")
    knob_memory.add_options(parser)
    wishes.add_options(parser)
    code_options.add_options(parser)
    code_options.add_transforms(parser)
    return parser


def main(argv: list[str]) -> Mapping[str, Any]:
    arguments = _parser().parse_args(argv)
    if arguments.seconds <= 0:
        raise UsageError(f"--seconds {arguments.seconds}: give a positive number")
    if arguments.step_ms < 0 or arguments.store_latency_ms < 0:
        raise UsageError("--step-ms and --store-latency-ms are not below 0")
    arguments.reader = reader_of(arguments.reader)
    policy = policies.make(arguments.tuning)
    conditions = RunConditions(arguments.table, wishes.RunOptions.of(arguments), arguments.quarantine)
    table = table_of(conditions.table, roles_of(arguments.roles), code_options.given(arguments))
    table = table.transformed(short_transforms(getattr(arguments, "transforms", ())))
    latency_s = arguments.store_latency_ms / 1000

    def before_read(_read: Read) -> None:
        time.sleep(latency_s)

    def step() -> None:
        if arguments.step_ms:
            time.sleep(arguments.step_ms / 1000)

    transforms = [Transform(function_of(name)[0], name) for name in arguments.udf]
    transforms += [Transform(*function_of(name), arrow=True) for name in arguments.arrow_udf]
    stored = before_read if latency_s else None
    with ExitStack() as stack:
        loader = stack.enter_context(BatchLoader(
            table, batch_size=arguments.batch_size, split=arguments.split, seed=arguments.seed, epochs=sys.maxsize,
            memory_limit=arguments.memory_limit, reader=arguments.reader, transforms=transforms, before_read=stored,
            shuffle=not arguments.no_shuffle, fill=arguments.fill, **conditions.for_loader()))
        kept = knob_memory.KnobMemory(loader, knob_memory.KnobOptions.of(arguments), say=say)
        kept.start()
        run = stack.enter_context(RunFolder.create(arguments.run, vars(arguments))) if arguments.run else None
        left = f" ({loader.plan.dropped:,} rows fill no batch, other ones each time)" if loader.plan.dropped else ""
        say(f"{table.uri} version {table.version}: {loader.plan.rows:,} rows, {len(loader)} steps an epoch{left}; "
            f"needs at least {loader.memory_need}; {loader.knobs}")
        groups = RowGroupReader(table.files_of(arguments.split), Columns.of(table.fields).names, stored,
                                conditions.files())
        stack.callback(groups.close)
        limit = DecodeLimit(source_of(arguments.reader, groups), groups)
        limit.measure()
        view = View()
        stack.callback(view.close)

        def observe(metric: dict[str, Any]) -> None:
            view.show(loader.snapshot())
            if run is not None:
                run.metric(metric)

        def record(event: dict[str, Any]) -> None:
            # A fault on purpose is marked when it happens, not when it is noticed.
            view.tell(line(event), mark=event["kind"] == ("fault" if arguments.inject else "occasion"))
            if run is not None:
                run.event(event)

        peak = stack.enter_context(Peak(loader.memory_used))
        tuned = stack.enter_context(kept.sharing(loader))
        controller = stack.enter_context(Controller(tuned, policy, record=kept.observing(record),
                                                    observe=kept.observing(observe), learned=kept.learned))
        with on_signal(loader.stacks), conditions.inject_faults(loader, record):
            found = consume(loader, arguments.seconds, step)
        controller.stop()
        peak_bytes = peak.bytes  # taken before the decoder is measured alone, to which the limit does not apply
        knobs, settled = loader.knobs, found.rows_per_s(_SETTLED) or found.rows_per_s()
        kept.finish(policy=policy.name, record=run.event if run is not None else None, learned=controller.learned())
        loader.close()
        limit.measure()
        outcome = {"rows_per_s": round(found.rows_per_s()), "rows_per_s_settled": round(settled),
                   "decode_rows_per_s": round(limit.rows_per_s), "decode_threads": limit.threads,
                   "stall_fraction": round(found.stall_fraction(), 4),
                   "stall_fraction_settled": round(found.stall_fraction(_SETTLED), 4), "peak_bytes": peak_bytes,
                   "decisions": controller.decisions, "knobs": knobs.to_dict(), "order_hash": found.order_hash,
                   "rows": found.rows, "tuning": policy.name, "reader": arguments.reader, **conditions.outcome(loader)}
        if run is not None:
            run.event({"kind": "end", **outcome})
    if run is not None:
        outcome["report"] = str(page.write(run.path))
        happened = occasions(Run.read(run.path))
        outcome["occasions"] = [{**asdict(one), "sentence": one.sentence} for one in happened]
        for one in happened:
            say(f"{one.label}. {one.sentence}")
        say(f"report: {outcome['report']}")
    if found.order_hash is None:
        say("no epoch was finished, so there is no order hash; give more --seconds")
    return outcome
