"""Compares two versions of a feature table, column by column, for a model trained on the older one: `TableDiff`."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow.compute as pc

from sluice.etl.spec.columns import ColumnSpec
from sluice.etl.spec.spec import Spec
from sluice.etl.table.fitted_state import FORGOTTEN, FittedState
from sluice.etl.table.job_record import MORE, JobRecord, shares
from sluice.etl.table.table import FeatureTable


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDiff:
    """The differences between two versions. Sparse columns in none of the lists keep their tables as they are."""

    before: int
    after: int
    added: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    grown: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Column → rows of its table before and now. Its ids are stable, so old rows stay and new rows are appended."""
    anew: Mapping[str, str] = field(default_factory=dict)
    """Column → why its table is made again although the name stayed."""
    dense_added: tuple[str, ...] = ()
    dense_dropped: tuple[str, ...] = ()
    dense_changed: Mapping[str, str] = field(default_factory=dict)
    """Dense column → how its numbers differ. Its weights stay."""
    lost: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Column → share of its values that are missing or could not be read, before and now, where it has changed."""

    def keeps(self, column: str) -> bool:
        """Returns whether the weights of a present column are still valid."""
        return not (column in self.added or column in self.anew or column in self.dense_added)

    @property
    def text(self) -> str:
        """The differences as text, one line for each."""
        lines = [f"new column {name!r}: a new table" for name in self.added]
        lines += [f"column {name!r} is gone, and its table with it" for name in self.dropped]
        lines += [
            f"column {name!r}: {old:,} rows become {new:,}"
            for name, (old, new) in self.grown.items()
        ]
        lines += [f"column {name!r} begins anew: {why}" for name, why in self.anew.items()]
        lines += [f"new dense column {name!r}" for name in self.dense_added]
        lines += [f"dense column {name!r} is gone" for name in self.dense_dropped]
        lines += [f"dense column {name!r}: {why}" for name, why in self.dense_changed.items()]
        lines += [
            f"column {name!r}: {new:.1%} of its values are missing or cannot be read, {old:.1%} before"
            for name, (old, new) in self.lost.items()
        ]
        head = f"version {self.before} of the table becomes {self.after}"
        return f"{head}: the same columns" if not lines else "\n  ".join([f"{head}:", *lines])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def between(before: FeatureTable, after: FeatureTable) -> TableDiff:
    """Compares two versions of a table. Reads the fitted states of both if they may differ."""
    old = {f.name: f.cardinality or 0 for f in before.fields if f.role in ("sparse", "id_list")}
    new = {f.name: f.cardinality or 0 for f in after.fields if f.role in ("sparse", "id_list")}
    dense = [tuple(f.name for f in table.fields if f.role == "dense") for table in (before, after)]
    has_specs = before.record.spec and after.record.spec
    specs = [table.spec() for table in (before, after)] if has_specs else []
    columns = [{made.name: made for made in spec.columns} for spec in specs] or [{}, {}]
    same_state = before.record.state == after.record.state
    states = (None, None) if same_state else (before.state(), after.state())
    anew: dict[str, str] = {}
    dense_changed: dict[str, str] = {}
    in_both = [*(n for n in new if n in old), *(n for n in dense[1] if n in dense[0])]
    last_transform = {
        output.name: number
        for number, transform in enumerate(after.transforms)
        for output in transform.outputs
    }
    # The inputs of a transform are compared before its outputs.
    rules = [{f.name: f.values_rule for f in table.fields} for table in (before, after)]
    for name in sorted(in_both, key=lambda name: last_transform.get(name, -1)):
        reason = _transformed_otherwise(name, before, after, {*anew, *dense_changed})
        if not reason and name in columns[0] and name in columns[1]:
            reason = explain_difference(specs[0], specs[1], name)
            if not reason and rules[0][name] != rules[1][name]:
                reason = "another release converted the values that it is made from, or learned its ranges"
            if not reason and not _ids_stay(columns[1][name], *states):
                reason = (
                    "its vocabulary was learned anew, so its ids mean other values"
                    if name in new
                    else "its numbers are scaled by what was learned anew"
                )
        if name not in new:
            dense_changed |= {name: reason} if reason else {}
        elif reason:
            anew[name] = reason
        elif new[name] < old[name]:
            anew[name] = f"{old[name]:,} rows became {new[name]:,}, so its ids cannot be the same"
    grown = {
        n: (old[n], rows) for n, rows in new.items() if n in old and n not in anew and rows > old[n]
    }
    return TableDiff(
        before=before.version,
        after=after.version,
        added=tuple(n for n in new if n not in old),
        dropped=tuple(n for n in old if n not in new),
        grown=grown,
        anew=anew,
        dense_added=tuple(n for n in dense[1] if n not in dense[0]),
        dense_dropped=tuple(n for n in dense[0] if n not in dense[1]),
        dense_changed=dense_changed,
        lost=_lost(before.record, after.record),
    )


def _transformed_otherwise(
    name: str, before: FeatureTable, after: FeatureTable, changed: Container[str]
) -> str:
    """Returns why the transforms give a column another meaning. Empty: they do not. `changed` are columns whose values
    have another meaning."""
    old, new = (
        [
            transform
            for field in table.fields
            for transform in table.transforms
            if field.name == name and transform.name in field.transforms
        ]
        for table in (before, after)
    )
    if [transform.described for transform in old] != [transform.described for transform in new]:
        return "its transforms make it in another way"
    changed_inputs = sorted(
        column
        for transform in new
        for column in transform.inputs
        if column != name and column in changed
    )
    return (
        f"a transform makes it of {changed_inputs[0]!r}, which has changed"
        if changed_inputs
        else ""
    )


def _lost(before: JobRecord, after: JobRecord) -> dict[str, tuple[float, float]]:
    """Returns the columns in which the newest jobs of both versions lost different shares of values."""
    old, new = (shares(record.raw_nulls, record.unread) for record in (before, after))
    return {
        name: (old[name], new[name])
        for name in sorted(new)
        if name in old and abs(new[name] - old[name]) >= MORE
    }


def _ids_stay(column: ColumnSpec, before: FittedState | None, after: FittedState | None) -> bool:
    """Whether everything that a column's operators had learned is still there, with the same ids."""
    if before is None or after is None:
        return True
    for key, _, _ in column.fitted:
        old, new = before[key], after[key]
        if "value" not in old.column_names:
            if not old.equals(new):
                return False
        else:
            values = new["value"].slice(0, old.num_rows)
            is_kept = pc.or_(pc.equal(values, old["value"]), pc.starts_with(values, FORGOTTEN))
            if len(values) < old.num_rows or not pc.all(is_kept).as_py():
                return False
    return True


def explain_difference(before: Spec, after: Spec, column: str) -> str:
    """Returns why equal values of a column of both specs differ in meaning. Empty: they do not."""
    old, new = (
        (made.role, made.ops, [_describe(spec, before, name) for name in made.sources])
        for spec in (before, after)
        for made in spec.columns
        if made.name == column
    )
    if old[:2] != new[:2]:
        return "the spec makes it in another way"
    if old != new:
        return (
            "the spec takes its values from another place (input column, type, format of times or "
            "numbers, join, lag or history)"
        )
    return ""


def _describe(spec: Spec, before: Spec, name: str) -> tuple[Any, ...]:
    """Describes a column of the input, of a join, a history or a lag, in the names of the version before. `was` in
    `spec` refers to these."""
    for join in spec.rows.joins:
        if name in join.columns:
            on = [_describe(spec, before, key) for key in join.on]
            time = (
                (_describe(spec, before, join.time), join.their_time, join.their_format)
                if join.time
                else ()
            )
            keys = join.their_on or join.on
            return "join", join.path, on, keys, name, join.columns[name], time, join.decimal
    for past in spec.rows.histories:
        if name == past.name:
            made = [_describe(spec, before, column) for column in (past.of, past.by, past.order)]
            return "history", made, past.lag, past.difference, past.positive
    source, earlier = spec.input, before.input
    kind = source.with_place[name]
    marks = (source.decimal, source.thousands) if kind in ("int", "float") else ()
    was = source.name_before(earlier, name)
    return "input", was, kind, source.times.get(name), marks
