"""Lets a loader make the columns of a spec without a job: `recipes_of_spec`. It rejects what only a job can do."""

from __future__ import annotations

from collections.abc import Mapping

from sluice.etl.ops import Fitted
from sluice.etl.ops.user_function import Python
from sluice.etl.spec.spec import Spec
from sluice.ingest.columns import ColumnError
from sluice.ingest.knobs import nearest
from sluice.ingest.plain.recipe import Recipe
from sluice.ingest.plain.roles import ROLES
from sluice.ingest.plain.row_selection import RowSelection, splits_by_key

_JOB = "make a table of it by `sluice etl --spec`, and load that"


def recipes_of_spec(
    spec: Spec, types: Mapping[str, str], lacking: Mapping[str, str], form: str = "parquet"
) -> tuple[Recipe, ...]:
    """Returns the recipes of the model's columns, in the spec's order. `types` has the types of the files' columns.
    Files may lack optional columns. `form` is the format of the source."""
    _check_rows(spec, form)
    for name in spec.input.columns:
        if name not in types and name not in spec.input.optional:
            where = (
                f"{lacking[name]}: no column {name!r}, which other files have"
                if name in lacking
                else f"the files have no column {name!r}, which its input.columns name{nearest(name, types)}"
            )
            raise ColumnError(
                f"{spec.name}: {where}; if it may be missing, add it to input.optional as well"
            )
    found = []
    for column in spec.columns:
        if column.role not in ROLES:
            continue
        for op in column.ops:
            if isinstance(op, Fitted):
                raise ColumnError(
                    f"{spec.name}: column {column.name!r}: {op.name} learns from the data, which a "
                    f"loader of plain files does not; use hash, modulus or bucketize, or {_JOB}"
                )
            if isinstance(op, Python):
                raise ColumnError(
                    f"{spec.name}: column {column.name!r}: python is for jobs; name {op.function!r} as "
                    "the function of a [[transform]]"
                )
        found.append(
            Recipe(
                name=column.name,
                role=column.role,
                sources=column.sources,
                operators=column.ops,
                kinds=tuple(spec.input.columns[name] for name in column.sources),
            )
        )
    return tuple(found)


def selection_of(spec: Spec, split: str) -> RowSelection | None:
    """Returns the selection of a split's rows. None if all rows are in one split."""
    table = spec.table
    if split not in table.split:
        raise ColumnError(f"{spec.name}: table.split has no {split!r}{nearest(split, table.split)}")
    if len(table.split) == 1 and not table.split_column:
        return None
    if splits_by_key(spec) and not (table.split_by or table.key):
        raise ColumnError(
            f"{spec.name}: a row's split hashes all its columns, which a loader would have to read "
            "twice; name the columns that decide as table.key or table.split_by, or a time as "
            "table.split_time, or write split = {train = 1}"
        )
    return RowSelection(spec, split)


def _check_rows(spec: Spec, form: str) -> None:
    rows = spec.rows
    there = {
        "[dedup]": rows.dedup,
        "[[join]]": rows.joins,
        "[[history]] or [[lag]]": rows.histories,
        "[[filter]]": rows.filters,
        "[sample]": rows.sample,
        "[negatives]": rows.negatives,
    }
    if spec.input.format not in ("parquet", form):
        raise ColumnError(
            f"{spec.name}: input.format is {spec.input.format!r}, and this loader reads {form}; {_JOB}"
        )
    for_jobs = {
        "a format of input.columns": bool(spec.input.times),
        "input.place": bool(spec.input.place),
    }
    for key, is_asked in for_jobs.items():
        if is_asked:
            raise ColumnError(f"{spec.name}: {key} is for jobs; {_JOB}")
    for section, asked in there.items():
        if asked:
            raise ColumnError(
                f"{spec.name}: {section} changes which rows there are, which only a job can do; {_JOB}"
            )
