"""Measures how fast a table can be loaded here, and says what would help: `sluice bench TABLE`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sluice.agent import policies
from sluice.agent.runtime.loader_options import LoaderOptions
from sluice.common.settings import parse, setting
from sluice.etl.spec.code_options import CodeOptions, TransformOptions
from sluice.ingest.options import OrderOptions, RunOptions

_DESCRIPTION = """Loads a table as a trainer would. It prints the rate while it lasts, and at the end what
would raise it. The last line of the output is one JSON object."""
_EXAMPLES = """\
examples:
  sluice bench data/clicks --batch-size 8192 --seconds 20
  sluice bench data/clicks --tuning auto --knobs decode=1 --store-latency-ms 50
  sluice bench data/clicks --transform mine.features:log1p --step-ms 5 --memory-limit 2GiB
  sluice bench data/clicks --transform mine.features:slow --knobs slow.backend=process --inject kill-worker@5s
  sluice bench "latency:///data/clicks?latency_ms=50&error_rate=0.1"
"""


@dataclass(frozen=True, kw_only=True)
class BenchRows:
    """Which rows are loaded, and in which order."""

    title = "what"
    table: tuple[str, ...] = setting(
        help="a feature table, as etl/job.py writes it, or any folder, glob or files of Parquet",
        metavar="TABLE",
        positional=True,
        several=True,
    )
    roles: str | None = setting(
        None,
        "roles of the columns of plain Parquet, for instance "
        "'label=click;dense=I*;sparse=C*,user%1000000' (% hashes to so many ids; default: "
        "guessed, and printed, unless --spec says it)",
        metavar="ROLE=NAME,…;…",
    )
    fill: float | None = setting(
        None,
        "what stands where a number is missing (default: an error; 0 if roles are guessed)",
        metavar="NUMBER",
    )
    split: str = setting("train", "which part of the table", metavar="NAME")
    batch_size: int = setting(8192, "rows of a batch")
    seconds: float = setting(10.0, "how long to load, from the first batch on", above=0)
    epochs: int | None = setting(
        None,
        "load exactly so many epochs instead, however long that takes",
        metavar="N",
        least=1,
    )
    seed: int = setting(0, "decides the order of rows")
    shuffle: bool = setting(True, "rows as they lie", flags=("--no-shuffle",))


@dataclass(frozen=True, kw_only=True)
class BenchInput(LoaderOptions, TransformOptions):
    """How the loader works, apart from its knobs."""

    title = "input"
    tuning: str = setting(
        "fixed",
        "who turns the knobs: " + ", ".join(policies.names()) + " (default: fixed, "
        "as a setting is measured unless more is asked for; training has auto)",
        metavar="POLICY",
        parse=policies.renamed,
    )


@dataclass(frozen=True, kw_only=True)
class BenchOptions(BenchRows, OrderOptions, BenchInput):
    """What is loaded and how, the imitated trainer and store, and the run folder."""

    title = "measurement"
    step_ms: float = setting(0.0, "how long the trainer takes for a batch", least=0)
    store_latency_ms: float = setting(
        0.0, "how long a store takes before it answers a request", least=0
    )
    run: str = setting(
        "",
        "a new folder for events, metrics and a report",
        flags=("--run-dir", "--run"),
        metavar="DIR",
    )
    quarantine: str = setting(
        "quarantine.jsonl", "where quarantined rows are listed", metavar="FILE"
    )
    conditions: RunOptions = field(default_factory=RunOptions)
    code: CodeOptions = field(default_factory=CodeOptions)


def main(argv: list[str]) -> Mapping[str, Any]:
    options = parse(BenchOptions, argv, "sluice bench", description=_DESCRIPTION, epilog=_EXAMPLES)
    from sluice.tools.bench_run import run_bench

    return run_bench(options)
