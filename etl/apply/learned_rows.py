"""Decides whether a job may build on what a version learned. It may not if rows that were learned from would then be in
the test split."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

from sluice.etl.spec.spec import Spec
from sluice.etl.spec.table_section import TableSpec
from sluice.etl.table.fitted_state import FittedState
from sluice.etl.table.job_record import JobRecord


def learned_from_another_split(before: FittedState, spec: Spec) -> bool:
    """Returns whether a state was learned from other rows than those of the split that `spec` learns from."""
    return (
        bool(before.tables)
        and before.fitted_on != spec.table.training
        and len(spec.table.split) > 1
    )


def why_not(
    before: FittedState, text: str, spec: Spec, *, mode: str, update: bool, rows_moved: bool
) -> str | None:
    """Returns why `spec` may not build on the state of a version whose spec was `text`. With `rows_moved`, that
    version's rows had other keys. None: it may.

    A state that is only applied again may come from another split, but nothing can be added to it. An append has none
    of the rows that were learned from. In an overwrite, these rows must still be training rows.
    """
    if learned_from_another_split(before, spec):
        if not update:
            return None
        why = f"it was learned from the rows of split {before.fitted_on!r}, and --update-state would add to that"
    elif mode == "overwrite" and before.tables and (how := _left_out(text, spec, moved=rows_moved)):
        why = f"it was learned from training rows of which some would be tested on now: {how}"
    else:
        return None
    return f"{why}; learn it anew on split {spec.table.training!r}: give all of the input with --mode overwrite --refit"


def why_labels_leak(state: FittedState, parent: JobRecord, spec: Spec) -> str | None:
    """Returns why rows of `spec` could meet their own labels in the `state` that the version of `parent` learned. None:
    they cannot. A fold keeps a row apart from its own label. It must be as it was."""
    if state.tables.keys().isdisjoint(spec.learned_from_labels):
        return None
    before, rule = Spec.parse(parent.spec), parent.identity
    if rule is None or not spec.rule.is_same(rule):
        return "its rows are known by other columns now, and so lie in other folds"
    name, old = spec.label, before.label
    if old not in (name, spec.input.was.get(name)):
        return f"it was learned by column {old!r}, and the spec goes by {name!r}"
    return None


def _left_out(text: str, spec: Spec, *, moved: bool) -> str:
    """Returns how the training split lost rows compared with the spec of that text. Empty: it did not."""
    if moved and spec.table.split_time is None and spec.table.split_column is None:
        return "rows go to their splits by other keys"
    table = Spec.parse(text).table if text else TableSpec()  # a state may be kept without its spec
    before, now = _rule(table), _rule(spec.table)
    for name, old in before[0].items():
        if old != now[0][name]:
            return f"table.{name} was {old!r} and is {now[0][name]!r}"
    (first, end), (low, high) = before[1], now[1]
    if low > first or high < end:
        return f"split {spec.table.training!r} was from {first:g} to {end:g} and is from {low:g} to {high:g}"
    return ""


def _rule(table: TableSpec) -> tuple[dict[str, Any], tuple[float, float]]:
    """Returns what decides a row's split, and the begin and end of the training split in shares or times."""
    by = {
        "split_time": table.split_time,
        "split_column": table.split_column,
        "split_by": list(table.split_by),
    }
    if table.split_column:
        return by | {"split": table.training}, (0.0, 1.0)
    number = list(table.split).index(table.training)
    if table.split_time:
        bounds = [-math.inf, *table.split_from[1:], math.inf]
    else:
        bounds = [0.0, *accumulate(table.split.values())]
    return by, (bounds[number], bounds[number + 1])
