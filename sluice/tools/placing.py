"""Decides where the operators of a job's columns run, by an earlier run over a table of the same spec: `placed`.

It is a part of a program, so it may import every package: the run and the choice belong to the agent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sluice.agent.report.format import count
from sluice.agent.report.operator_choice import Choice, Outlook, choose, table_of
from sluice.agent.report.run_folder import Run
from sluice.common.errors import UsageError
from sluice.common.text_table import aligned
from sluice.etl.apply.column_costs import Form, forms, ways
from sluice.etl.jobs.engine import Engine
from sluice.etl.jobs.job import Job
from sluice.etl.jobs.progress import JobProgress
from sluice.etl.spec.placement import SECTION, placement_of, with_placement
from sluice.etl.spec.row_split import row_keys
from sluice.etl.spec.spec import Spec
from sluice.etl.table.fitted_state import FittedState
from sluice.etl.table.table import FeatureTable, TableError
from sluice.ingest.row_costs import RowCosts


class CannotPlace(UsageError):
    """This run cannot place operators. The message names one and says what would do."""


def placed(
    job: Job, engine_for: Callable[[Job], Engine], run_folder: str, progress: JobProgress
) -> tuple[Job, dict[str, Any]]:
    """Returns the job with its operators placed where a run like that one is fastest, and the prediction for the
    program's last line. Each column's place is printed. Processor time is measured on rows of the job's own input."""
    spec = job.spec
    if placement_of(spec.text):
        raise CannotPlace(
            f"{spec.name}: it says in [{SECTION}] already where operators are; remove that section, "
            "or leave out --place"
        )
    run = Run.read(run_folder)
    table, row_costs = _table_of(run), RowCosts.of_looks(run.of("loader"))
    _refuse_other(run, table, spec)
    if row_costs is None:
        raise CannotPlace(
            f"--for {run.path}: it has measured no stage, as it was too short; give a run of some "
            "seconds"
        )
    engine = engine_for(job)
    try:
        with progress.stage("measuring columns on a sample"):
            columns = engine.sample(spec.table.row_group_rows)
            costs = forms(spec, table.state() or FittedState(), columns, row_keys(columns, spec))
    finally:
        engine.close()
    if not costs:
        raise CannotPlace(
            f"{spec.name}: no column's operators can be left to the loader; leave out --place"
        )
    events = run.of("operators")
    chosen = choose(
        row_costs,
        costs,
        {
            c.name: tuple(op.name for op in c.ops[len(c.left_to_spark) :])
            for c in table.spec().columns
        },
        measured_s={
            one["column"]: one["cpu_s"] for one in (events[-1]["loader"] if events else ())
        },
        row_bytes=sum(file.bytes for file in table.files) / max(1, table.rows),
    )
    _say(chosen, spec, costs, row_costs.measured, progress)
    text = with_placement(
        spec.text,
        {one.column: one.left for one in chosen.choices},
        {one.column: one.reason for one in chosen.choices},
    )
    about = {
        "placement": {one.column: list(one.left) for one in chosen.choices},
        "foretold_rows_per_s": round(chosen.rows_per_s),
        "foretold_bytes_a_row": round(chosen.row_bytes, 2),
    }
    return replace(job, spec=Spec.parse(text, spec.name, spec.permission)), about


def _table_of(run: Run) -> FeatureTable:
    """Returns the table of a run."""
    uri = run.config.get("data") or run.config.get("table")
    try:
        table = FeatureTable.open(str(uri), run.config.get("version"))
        table.spec()
    except TableError as error:
        raise CannotPlace(
            f"--for {run.path}: its table cannot be read ({error}); give a run over a table that this "
            "spec made"
        ) from None
    return table


def _refuse_other(run: Run, table: FeatureTable, spec: Spec) -> None:
    """Refuses a run over a table with other features."""
    theirs, mine = (
        {c.name: (c.role, c.sources, [op.described for op in c.ops]) for c in one.columns}
        for one in (table.spec(), spec)
    )
    other = next((name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)), None)
    if other is not None:
        if other not in theirs:
            how = "is not in it"
        elif other not in mine:
            how = "is not in this spec"
        else:
            how = "is made in another way there"
        raise CannotPlace(
            f"--for {run.path}: was over {table.uri}, version {table.version}, of another spec: "
            f"column {other!r} {how}; give a run over a table that {spec.name} made"
        )


def _say(
    chosen: Outlook,
    spec: Spec,
    costs: Mapping[str, list[Form]],
    measured: float,
    progress: JobProgress,
) -> None:
    chains = {c.name: "+".join(op.name for op in c.ops) for c in spec.columns}
    for line in aligned(table_of(chosen.choices, chains)):
        progress.say(line)
    alone: dict[str, list[str]] = defaultdict(list)
    for column in spec.columns:
        if column.name not in costs and column.ops:
            alone[ways(column, spec.kinds)[1]].append(column.name)
    for why, names in alone.items():
        progress.say(f"only in the ETL: {', '.join(names)}: {why}")
    progress.say(
        f"predicted: {count(chosen.rows_per_s)} rows/s and {chosen.row_bytes:.1f} bytes a row with "
        f"{_left(chosen.choices)} left to the loader; that run had {count(measured)} rows/s"
    )


def _left(choices: tuple[Choice, ...]) -> str:
    left = [one.column for one in choices if one.left]
    return f"the operators of {', '.join(left)}" if left else "nothing"
