"""`describe_table` shows a feature table as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.etl.schema import Field
from sluice.etl.table.table import FeatureTable

_SHOWN_VERSIONS = 5
_SHOWN_COLUMNS = 60


def describe_table(table: FeatureTable) -> str:
    """Returns the table's versions, splits and columns as aligned text."""
    size = sum(f.bytes for f in table.files)
    title = (
        f"{table.uri}, version {table.version}: {table.rows:,} rows in {len(table.files)} files, "
        f"{size / 2**20:,.1f} MiB"
    )
    lines = [
        title,
        f"fingerprint: layout {table.fingerprint.layout}, vocabulary {table.fingerprint.vocabulary}",
        *(
            [f"learned from the rows of split {table.fitted_on!r}"]
            if table.records and table.record.state
            else []
        ),
        "",
    ]
    lines += aligned(
        [
            ("split", "rows", "files"),
            *((s, f"{table.rows_of(s):,}", str(len(table.files_of(s)))) for s in table.splits),
        ]
    )
    shown = table.fields[:_SHOWN_COLUMNS]
    lines += ["", *aligned([_HEAD, *(_of_column(table, f) for f in shown)])]
    if len(table.fields) > len(shown):
        lines.append(f"and {len(table.fields) - len(shown)} more")
    history = table.history()
    lines += [
        "",
        *aligned(
            [
                ("version", "at", "mode", "rows"),
                *((str(v.version), v.at, v.mode, f"{v.rows:,}") for v in history[:_SHOWN_VERSIONS]),
            ]
        ),
    ]
    if len(history) > _SHOWN_VERSIONS:
        lines.append(f"and {len(history) - _SHOWN_VERSIONS} older")
    return "\n".join(lines)


_HEAD = ("column", "role", "type", "ids", "width", "range", "nulls", "unseen", "bag", "psi")


def _of_column(table: FeatureTable, f: Field) -> tuple[str, ...]:
    """Returns the cells of a column, from the profile of the version's newest part."""
    record = table.record if table.records else None
    profile: Mapping[str, Any] = record.profile.get(f.name, {}) if record else {}
    moved = record.drift.get(f.name, {}) if record else {}
    rows = max(1, profile.get("rows", 0))
    span = f"{profile['least']:.4g} … {profile['largest']:.4g}" if "least" in profile else ""
    if f.role == "label" and "sum" in profile:
        span = f"rate {profile['sum'] / rows:.4f}"
    raw = record.raw_nulls.get(f.inputs[0] if f.inputs else f.name) if record else None
    nulls = raw if raw is not None else profile.get("nulls", 0) / rows
    bag = "" if f.bag is None else f"{f.bag[0]} / {f.bag[1]:.1f} / {f.bag[2]}"
    kind = f"by {f.transforms[0]}" if f.made else f.type
    return (
        f.name,
        f.role,
        kind,
        f"{f.cardinality:,}" if f.cardinality else "",
        str(f.width or ""),
        span,
        _percent(nulls),
        _percent(profile.get("unseen", 0) / rows),
        bag,
        f"{moved['psi']:.3f}" if moved else "",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share else ""


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Formats rows of texts as aligned columns, a line for each row."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
