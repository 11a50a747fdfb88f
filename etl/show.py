"""`describe_table` shows a feature table as text, `draw_table` as one HTML page that opens offline."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from sluice.common.text_table import aligned
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


_HEAD = ("column", "role", "type", "ids", "width", "range", "nulls", "unseen", "top", "bag", "psi")


def _of_column(table: FeatureTable, f: Field) -> tuple[str, ...]:
    """Returns the cells of a column, from the profile of the version's newest part."""
    record = table.record if table.records else None
    found: Mapping[str, Any] = record.profile.get(f.name, {}) if record else {}
    moved = record.drift.get(f.name, {}) if record else {}
    rows = max(1, found.get("rows", 0))
    span = f"{found['least']:.4g} … {found['largest']:.4g}" if "least" in found else ""
    if f.role == "label" and "sum" in found:
        span = f"rate {found['sum'] / rows:.4f}"
    raw = record.raw_nulls.get(f.inputs[0] if f.inputs else f.name) if record else None
    nulls = raw if raw is not None else found.get("nulls", 0) / rows
    top = max(found.get("top", {"": 0}).values()) / rows
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
        _percent(found.get("unseen", 0) / rows),
        _percent(top),
        bag,
        f"{moved['psi']:.3f}" if moved else "",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share else ""


_STYLE = """body{font:14px system-ui,sans-serif;margin:2em auto;max-width:1200px;color:#222;background:#fff}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .7em;text-align:left;border-bottom:1px solid #ddd}
td:nth-child(n+4){text-align:right;font-variant-numeric:tabular-nums}svg{display:block}.warn{background:#fde8c8}
@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}td,th{border-color:#444}.warn{background:#5a4010}}"""
_DRIFTED = 0.25


def draw_table(table: FeatureTable) -> str:
    """Returns an HTML page with the columns of `describe_table` and their distributions. Marks columns that
    drifted from the version before."""
    record = table.record if table.records else None
    rows = []
    for f in table.fields:
        found = record.profile.get(f.name, {}) if record else {}
        moved = record.drift.get(f.name, {}).get("psi", 0.0) if record else 0.0
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in _of_column(table, f))
        mark = ' class="warn"' if moved >= _DRIFTED else ""
        rows.append(f"<tr{mark}>{cells}<td>{_bars(found.get('bins', {}))}</td></tr>")
    head = "".join(f"<th>{name}</th>" for name in (*_HEAD, "distribution"))
    splits = ", ".join(f"{html.escape(s)} {table.rows_of(s):,}" for s in table.splits)
    versions = "".join(
        f"<tr><td>{v.version}</td><td>{v.at}</td><td>{v.mode}</td><td>{v.rows:,}</td></tr>"
        for v in table.history()
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(table.uri)}</title>"
        f"<style>{_STYLE}</style><h1>{html.escape(table.uri)}</h1>"
        f"<p>Version {table.version}, {table.rows:,} rows ({splits}) in {len(table.files)} files.</p>"
        f"<table><tr>{head}</tr>{''.join(rows)}</table><h2>Versions</h2>"
        f"<table><tr><th>version<th>at<th>mode<th>rows</tr>{versions}</table></html>"
    )


def _bars(bins: Mapping[str, int]) -> str:
    names = sorted(bins, key=_place)
    if not names:
        return ""
    most, width = max(bins.values()), max(3, min(12, 240 // len(names)))
    bars = ""
    for number, name in enumerate(names):
        tall = max(1, round(30 * bins[name] / most))
        bars += (
            f'<rect x="{number * width}" y="{32 - tall}" width="{width - 1}" height="{tall}" fill="#4878a8">'
            f"<title>{html.escape(name)}: {bins[name]:,}</title></rect>"
        )
    return f'<svg width="{width * len(names)}" height="32" role="img" aria-label="distribution">{bars}</svg>'


def _place(name: str) -> tuple[int, float]:
    """Returns the sort key of a bin: null and unseen come first, then the others by number."""
    number = name.split()[-1].lstrip("-")
    return (1, float(name.split()[-1])) if number.isdigit() else (0, float(name == "unseen"))
