"""What a column's values are made of, down to the input: `explain_difference` and `Lineage`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sluice.etl.spec.columns import ColumnSpec
from sluice.etl.spec.spec import Spec


def explain_difference(before: Spec, after: Spec, column: str) -> str:
    """Returns why equal values of a column of both specs differ in meaning. Empty: they do not."""
    old, new = (
        Lineage(spec=spec, before=before).describe(made)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Describes the columns of a spec in the names of the version before."""

    spec: Spec
    before: Spec
    """The spec of the version before, which `was` in `spec` refers to."""

    def describe(self, column: ColumnSpec) -> tuple[Any, ...]:
        """Returns the role and the operators of a column, and what each of its sources is made of."""
        return column.role, column.ops, tuple(map(self._describe_source, column.sources))

    def _describe_source(self, name: str) -> tuple[Any, ...]:
        """Describes a column of the input, of a join, a history or a lag."""
        for join in self.spec.rows.joins:
            if name in join.columns:
                on = tuple(map(self._describe_source, join.on))
                time = (self._describe_source(join.time), join.their_time) if join.time else ()
                keys = join.their_on or join.on
                return "join", join.path, on, keys, name, join.columns[name], time, join.decimal
        for past in self.spec.rows.histories:
            if name == past.name:
                made = tuple(map(self._describe_source, (past.of, past.by, past.order)))
                return "history", made, past.lag, past.difference, past.positive
        source = self.spec.input
        kind = source.with_place[name]
        marks = (source.decimal, source.thousands) if kind in ("int", "float") else ()
        # The name that the column had in the version before. A rename that stood there before says nothing new.
        was, earlier = source.was.get(name, name), self.before.input
        if name in earlier.columns and earlier.was.get(name) == was:
            was = name
        return "input", was, kind, source.times.get(name), marks
