"""Whether a text column can order rows: `check_orders` refuses one whose texts do not sort as times do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sluice.etl.common.errors import InputError
from sluice.etl.spec.spec import Spec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SORTS = re.compile(r"0+|0000-00-00([ T]00:00(:00(\.0+)?)?)?Z?")
_FORMS = 3  # how many forms are shown, each by an example


def check_orders(frame: DataFrame, spec: Spec) -> None:
    """Checks, with Spark, each text column by which rows are put in order. The frame holds good rows as columns."""
    from pyspark.sql import functions as sql

    for key, name in _orders(spec):
        if spec.kinds.get(name) == "text" and name in spec.input.columns:
            cell = sql.col(f"`{name}`")
            form = sql.regexp_replace(cell, "[0-9]", "0").alias("form")
            rows = frame.where(cell.isNotNull()).groupBy(form).agg(sql.min(cell).alias("least")).orderBy("form").limit(
                _FORMS).collect()
            if (why := unsorted([(row["form"], row["least"]) for row in rows])) is not None:
                raise InputError(f"{key} = {name!r}: holds text that does not sort as times do ({why}); nothing was "
                                 "published; read the column as int or float, or write all its times alike, as in "
                                 "2024-01-31 10:00:00")


def _orders(spec: Spec) -> list[tuple[str, str]]:
    rows = spec.rows
    found = [("dedup.order", rows.dedup.order)] if rows.dedup and rows.dedup.order else []
    return [*found, *(("lag.order" if history.lag else "history.order", history.order) for history in rows.histories)]


def unsorted(forms: Sequence[tuple[str, str]]) -> str | None:
    """Says why texts of these forms (each digit written as 0), each given with an example, do not sort as times do;
    None if they do: digits alone, or a date and a time as ISO 8601 has them, all of one length."""
    strange = next((example for form, example in forms if not _SORTS.fullmatch(form)), None)
    if strange is not None:
        return f"{strange[:100]!r} is no time"
    if len(forms) > 1:
        return " and ".join(repr(example) for _, example in forms[:2]) + " are not written alike"
    return None
