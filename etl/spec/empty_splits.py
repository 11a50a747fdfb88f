"""`empty_splits` names splits without rows, and the likely cause."""

from __future__ import annotations

from collections.abc import Mapping

from sluice.etl.spec.table_section import TableSpec


def empty_splits(table: TableSpec, rows: Mapping[str, int]) -> list[str]:
    """Returns one line for each split without rows, with its likely cause and what to do. `rows` holds the number of
    rows of the other splits."""
    names = list(table.split)
    fullest = max(rows, key=rows.__getitem__, default=None)
    there = (
        f"{rows[fullest]:,} of {sum(rows.values()):,} rows lie in {fullest!r}"
        if fullest
        else "there are no rows"
    )
    found = []
    for number, name in enumerate(names):
        if rows.get(name):
            continue
        if name == table.unlabelled:
            why = "every row has its label; leave out table.unlabelled, or hand in rows without one"
        elif table.split_time is not None:
            end = (
                f" to below {table.split_from[number + 1]:.15g}"
                if number + 1 < len(table.split_from)
                else " on"
            )
            why = (
                f"no row's {table.split_time!r} is from {table.split_from[number]:.15g}{end}; set table.split to "
                "values that lie within the data, or hand in the rows of that time, too"
            )
        elif table.split_column is not None:
            why = f"no row's {table.split_column!r} is {name!r}; look for how that column spells it"
        elif table.split_by:
            why = (
                f"too few different values of {', '.join(table.split_by)} for a share of {table.split[name]:g}; "
                "take a larger share, or more rows"
            )
        else:
            why = f"too few rows for a share of {table.split[name]:g}; take a larger share, or more rows"
        found.append(f"split {name!r} is empty ({there}): {why}")
    return found
