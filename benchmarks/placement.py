"""Where operators are applied, foretold and then measured: the same rows with their operators in the loader and in the
ETL.

    python -m benchmarks.placement --work DIR [--rows 400000] [--seconds 15] [--pairs 6] [--step-ms 0] [--quick]

The tables are made once, on this machine: `etl` by features/criteo.toml, `left` with clip and log of its 13 counts left
to the loader, `raw` with everything left to it. A run over each is a run folder; by it and by a sample of the log's
rows, what `sluice etl --place auto --for RUN` goes by, the rate and the bytes of every other table are foretold. Then
pairs of runs take turns, under the same knobs. Medians of the pairs' ratios stand beside what was foretold, and how far
off that was. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.jobs import ROOT, make_tables, together
from benchmarks.results import table as shown
from sluice.agent.report.operator_choice import Prediction
from sluice.agent.report.run_folder import Run
from sluice.common.program import run as program
from sluice.common.program import say
from sluice.etl.apply.column_costs import Form, forms
from sluice.etl.apply.parse import InputParser
from sluice.etl.read.input_paths import files_of
from sluice.etl.read.pieces import pieces_of
from sluice.etl.spec.row_split import row_keys
from sluice.etl.spec.spec import Spec
from sluice.etl.table.table import FeatureTable
from sluice.ingest.row_costs import RowCosts

KNOBS = "read=2,shuffle=1,batch=1"
AIM = 0.15


def made(work: Path, rows: int) -> dict[str, Path]:
    """The tables, made if they are not there."""
    spec = (ROOT / "features/criteo.toml").read_text()
    left = work / "left.toml"
    for end in ("low = -2}", "shift = 3}"):
        spec = spec.replace(end, f"{end[:-1]}, online = true}}")
    left.write_text(spec)
    specs = {
        "etl": ROOT / "features/criteo.toml",
        "left": left,
        "raw": ROOT / "features/criteo_raw.toml",
    }
    return make_tables(work, rows, specs)


def costs_of(log: Path, table: FeatureTable) -> dict[str, list[Form]]:
    """What each column costs in each form, on the first rows of the log."""
    spec = Spec.own((ROOT / "features/criteo.toml").read_text())
    lines = next(next(pieces_of(files_of([str(log)]), 16 << 20)).batches(()))
    columns = InputParser(spec).parse(lines.slice(0, spec.table.row_group_rows)).columns
    state = table.state()
    assert state is not None
    return forms(spec, state, columns, row_keys(columns, spec))


def plan_of(table: FeatureTable, costs: Mapping[str, list[Form]]) -> dict[str, Form]:
    """The forms in which a table holds its columns."""
    left = {
        c.name: tuple(op.name for op in c.ops[len(c.left_to_spark) :]) for c in table.spec().columns
    }
    return {
        name: next(form for form in some if form.left == left[name]) for name, some in costs.items()
    }


def foretold(
    run: Run, plans: Mapping[str, Mapping[str, Form]], name: str, row_bytes: float
) -> dict[str, tuple[float, float]]:
    """Rows a second and bytes a row of every other table, by a run over the one of that name."""
    row_costs, events = RowCosts.of_looks(run.of("loader")), run.of("operators")
    assert row_costs is not None, "the run was too short"
    costs = {one["column"]: one["cpu_s"] for one in (events[-1]["loader"] if events else ())}
    model = Prediction(row_costs, plans[name], costs, row_bytes)
    return {
        other: (model.rate(plan), model.bytes(plan))
        for other, plan in plans.items()
        if other != name
    }


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for the log, the tables and the runs"
    )
    parser.add_argument(
        "--rows", type=int, default=400_000, help="raw lines (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=15, help="of each run (default: %(default)s)"
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=6,
        help="rounds in which the tables take turns (default: %(default)s)",
    )
    parser.add_argument(
        "--step-ms",
        type=float,
        default=0,
        help="of a trainer that takes so long for a batch (default: %(default)s)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="60,000 rows, two rounds of three seconds: only to see that it works",
    )
    options = parser.parse_args(argv)
    if options.quick:
        options.rows, options.pairs, options.seconds = 60_000, 2, 3.0
    options.work.mkdir(parents=True, exist_ok=True)
    paths = made(options.work, options.rows)
    tables = {name: FeatureTable.open(path) for name, path in paths.items()}
    costs = costs_of(options.work / "log", tables["etl"])
    plans = {name: plan_of(table, costs) for name, table in tables.items()}
    bytes_a_row = {
        name: sum(f.bytes for f in table.files) / table.rows for name, table in tables.items()
    }
    rates: dict[str, list[float]] = {name: [] for name in tables}
    guesses: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number in range(options.pairs):
        for name in (list(tables), list(tables)[::-1])[number % 2]:
            run = options.work / f"run-{name}-{len(list(options.work.glob('run-*')))}"
            (one,) = together(
                [
                    [
                        "sluice",
                        "bench",
                        str(paths[name]),
                        "--seconds",
                        str(options.seconds),
                        "--tuning",
                        "fixed",
                        "--knobs",
                        KNOBS,
                        "--step-ms",
                        str(options.step_ms),
                        "--run",
                        str(run),
                    ]
                ]
            )
            rates[name].append(one["rows_per_s_settled"])
            for other, (rate, size) in foretold(
                Run.read(run), plans, name, bytes_a_row[name]
            ).items():
                guesses.setdefault((name, other), []).append(
                    (rate / one["rows_per_s_settled"], size)
                )
    lines = []
    for name, other in itertools.permutations(tables, 2):
        if (name, other) not in guesses:
            continue
        told = statistics.median(gain for gain, _ in guesses[name, other])
        was = statistics.median(b / a for a, b in zip(rates[name], rates[other], strict=True))
        size = statistics.median(size for _, size in guesses[name, other])
        lines.append(
            {
                "a run over": name,
                "foretells": other,
                "rows/s, times": round(told, 3),
                "measured": round(was, 3),
                "off": round(told / was - 1, 3),
                "within 15 %": abs(told / was - 1) <= AIM,
                "bytes a row": round(size, 2),
                "measured bytes": round(bytes_a_row[other], 2),
                "bytes off": round(size / bytes_a_row[other] - 1, 3),
            }
        )
    say(shown(lines))
    return {"rows_per_s": rates, "bytes_a_row": bytes_a_row, "foretold": lines}


if __name__ == "__main__":
    program(main)
