"""Measures how fast a table can be loaded here, and says what would help: `sluice bench TABLE`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.common.settings import parse
from sluice.tools.bench_options import BenchOptions

_DESCRIPTION = """Loads a table as a trainer would. It prints the rate while it lasts, and at the end what
would raise it. The last line of the output is one JSON object."""
_EXAMPLES = """\
examples:
  sluice bench data/clicks --batch-size 8192 --seconds 20
  sluice bench data/clicks --tuning auto --knobs decode=1 --store-latency-ms 50
  sluice bench data/clicks --udf mine.features:log1p --step-ms 5 --memory-limit 2GiB
  sluice bench data/clicks --udf mine.udfs:slow --knobs slow.backend=process --inject kill-worker@5s
  sluice bench "latency:///data/clicks?latency_ms=50&error_rate=0.1"
"""


def main(argv: list[str]) -> Mapping[str, Any]:
    options = parse(BenchOptions, argv, "sluice bench", description=_DESCRIPTION, epilog=_EXAMPLES)
    from sluice.tools.bench_run import run_bench

    return run_bench(options)
