"""Measures how fast a table can be loaded here, and says what would help: `sluice bench TABLE`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sluice.common.program import say
from sluice.common.settings import parse
from sluice.tools.bench_options import BenchOptions

_DESCRIPTION = """Loads a table as a trainer would. It prints the rate, and what would raise it. A terminal shows
the run while it lasts. The last line of the output is one JSON object."""
_EXAMPLES = """\
examples:
  sluice bench data/clicks --batch-size 8192 --seconds 20
  sluice bench data/clicks --tuning auto --knobs decode=1 --store-latency-ms 50
  sluice bench data/clicks --udf mine.features:log1p --step-ms 5 --memory-limit 2GiB
  sluice bench data/clicks --udf mine.udfs:slow --knobs slow.backend=process --inject kill-worker@5s
  sluice bench data/clicks --packed 20GiB
  sluice bench "latency:///data/clicks?latency_ms=50&error_rate=0.1"
"""


def main(argv: list[str]) -> Mapping[str, Any]:
    options = parse(BenchOptions, argv, "sluice bench", description=_DESCRIPTION, epilog=_EXAMPLES)
    from sluice.tools.bench_session import BenchSession

    with BenchSession(options, say) as session:
        outcome = session.run()
    outcome = session.reported(outcome)
    if options.conditions.packed is None:
        return outcome
    # The packed copy is compared with Parquet alone.
    conditions = replace(options.conditions, packed=None, packed_folder="")
    with BenchSession(replace(options, run="", conditions=conditions), say) as session:
        plain = session.run()
    return {
        **outcome,
        "rows_per_s_parquet": plain["rows_per_s"],
        "rows_per_s_packed": outcome["rows_per_s"],
        "parquet_bytes": session.stored_bytes,
        "packed_bytes": outcome["store"].get("packed_bytes", 0),
    }
