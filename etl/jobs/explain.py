"""Says in words what a job would do: `explain`. It reads the spec and the table's log, and starts nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pyarrow as pa

from sluice.etl.jobs.engine import MAPPED
from sluice.etl.jobs.job import Job
from sluice.etl.ops.base import MAX_VALUES
from sluice.etl.spec.columns import ColumnSpec
from sluice.etl.spec.spec import Spec


def explain(job: Job, engine: str = "spark") -> tuple[list[str], dict[str, Any]]:
    """Returns lines for a person, and the same as plain values."""
    spec, learning = job.spec, job.before is None or job.update_state
    passes = (max(1, spec.levels) if learning else 1) + spec.rows.relational
    key = [column.name for column in spec.rule.columns]
    # No row's split depends on these.
    free = [name for name in spec.input.columns if name not in key]
    kept = job.before.tables if job.before and not learning else {}
    known = {key: "broadcast" if isinstance(kept[key], pa.Table) else MAPPED for key in kept}
    about: dict[str, Any] = {
        "engine": engine,
        "mode": job.mode,
        "base_version": job.base.version,
        "columns": len(spec.columns),
        "levels": spec.levels,
        "passes": passes + 1,
        "fitted": [learned.key for learned in spec.fitted] if learning else [],
        "online": [c.name for c in spec.columns if c.online is not None],
        "worker_bytes": job.worker_bytes,
        "collected_values": job.collected_values,
        "ways": known,
        "joins": [
            f"{join.path}: {'as of a time' if join.time else 'by size'}" for join in spec.rows.joins
        ],
        "key": key,
        "file_rows": spec.table.file_rows,
        "row_group_rows": spec.table.row_group_rows,
    }
    lines = [
        f"{job.mode} {job.store.uri}: "
        + (
            "a new table"
            if job.base.version is None
            else f"version {job.base.next} on version {job.base.version}"
        ),
        f"input: {', '.join(job.inputs)} as {spec.input.format}, {len(spec.input.columns)} columns",
        f"rows are known by {spec.rule.text}" + (f"; {', '.join(free)} move none" if free else ""),
        "",
    ]
    lines += [*_rows(spec), "columns:", *[_of_column(c) for c in spec.columns], ""]
    lines.append(
        f"passes over the input: {passes} to {'learn' if learning else 'count'} and 1 to write"
    )
    if learning:
        lines += [
            f"  level {level + 1}: {', '.join(x.key for x in spec.fitted if x.level == level)}"
            for level in range(spec.levels)
        ]
        if spec.fitted:
            lines.append(f"  all is learned from the rows of split {spec.table.training!r} alone")
    else:
        lines.append(f"  what version {job.base.version} learned is applied as it is")
    lines += _ways(spec, known, job.collected_values) if engine == "spark" else []
    lines.append(
        f"files of about {spec.table.file_rows:,} rows in row groups of {spec.table.row_group_rows:,}, in "
        f"{', '.join(spec.table.split)}; rows lie {_order(spec)}"
    )
    return lines, about


def _ways(spec: Spec, known: dict[str, str], most: int) -> list[str]:
    """Says how rows will meet what was learned; before anything was learned, by which sizes that will be chosen."""
    if known:
        lines = [
            f"  {way}: {', '.join(keys)}"
            for way in ("broadcast", MAPPED)
            if (keys := [key for key, chosen in known.items() if chosen == way])
        ]
        return ["what was learned is applied by:", *lines] if lines else []
    may = [learned.key for learned in spec.fitted if spec.may_be_stored(learned)]
    most = most if may else MAX_VALUES
    lines = [f"the driver collects at most {most:,} learned values and broadcasts them"]
    if may:
        lines.append(
            f"  beyond, the largest of {', '.join(may)} stay in files, and the workers of a machine map one file of "
            "their hashes"
        )
    return lines


def _order(spec: Spec) -> str:
    if spec.table.partition:
        within = (
            f"by the hash of {spec.table.together}"
            if spec.table.together
            else "by the hash of each"
        )
        return f"in a folder for each {spec.table.partition}, and {within} in it"
    if spec.table.order:
        return f"in the order of {' and '.join(filter(None, (spec.table.order, spec.table.then)))}"
    return f"by the hash of {spec.table.together}" if spec.table.together else "by the hash of each"


def _rows(spec: Spec) -> list[str]:
    rows, lines = spec.rows, []
    if rows.dedup:
        lines.append(f"  of rows alike in {', '.join(rows.dedup.by) or 'everything'} one stays")
    lines += [
        f"  join {j.path} by {', '.join(j.on)}: {', '.join(j.columns)}"
        + (
            f", the latest not after {j.time}"
            if j.time
            else ", broadcast up to 32 MiB, else shuffled"
        )
        for j in rows.joins
    ]
    lines += [
        f"  {h.name}: {f'of {h.lag} rows before' if h.lag else f'the last {h.length}'} {h.of} of each {h.by}, "
        f"in the order of {h.order}"
        for h in rows.histories
    ]
    lines += [
        f"  rows with {f.column} {f.op}{'' if f.value is None else f' {f.value}'}"
        for f in rows.filters
    ]
    if rows.sample:
        lines.append(f"  {rows.sample.negatives:g} of the rows with label 0")
    if rows.negatives:
        lines.append(
            f"  {rows.negatives.each} drawn rows of label 0 for each of label 1, with another "
            f"{rows.negatives.column}"
        )
    return ["rows:", *lines, ""] if lines else []


def _of_column(column: ColumnSpec) -> str:
    words = []
    for number, op in enumerate(column.ops):
        given = {
            f.name: getattr(op, f.name)
            for f in dataclasses.fields(op)
            if f.default is dataclasses.MISSING or getattr(op, f.name) != f.default
        }
        online = " (loader)" if column.online is not None and number >= column.online else ""
        words.append(
            op.name
            + (f"({', '.join(f'{k}={v}' for k, v in given.items())})" if given else "")
            + online
        )
    origin = "" if column.sources == (column.name,) else f" from {', '.join(column.sources)}"
    return f"  {column.name} ({column.role}){origin}: {' → '.join(words) or 'as it is'}"
