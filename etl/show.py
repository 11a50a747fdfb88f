"""A feature table for a person: `describe_table`."""

from __future__ import annotations

from etl.table import FeatureTable

_SHOWN_VERSIONS = 5


def describe_table(table: FeatureTable) -> str:
    """Versions, splits and columns, aligned."""
    size = sum(f.bytes for f in table.files)
    title = (f"{table.uri}, version {table.version}: {table.rows:,} rows in {len(table.files)} files, "
             f"{size / 2**20:,.1f} MiB")
    lines = [title, f"fingerprint: layout {table.fingerprint.layout}, vocabulary {table.fingerprint.vocabulary}", ""]
    lines += _aligned([("split", "rows", "files"),
                       *((s, f"{table.rows_of(s):,}", str(len(table.files_of(s)))) for s in table.splits)])
    lines += ["", *_aligned([("column", "role", "type", "ids", "width"),
                             *((f.name, f.role, f.type, f"{f.cardinality:,}" if f.cardinality else "",
                                str(f.width or "")) for f in table.fields)])]
    history = table.history()
    lines += ["", *_aligned([("version", "at", "mode", "rows"),
                             *((str(v.version), v.at, v.mode, f"{v.rows:,}") for v in history[:_SHOWN_VERSIONS])])]
    if len(history) > _SHOWN_VERSIONS:
        lines.append(f"and {len(history) - _SHOWN_VERSIONS} older")
    return "\n".join(lines)


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows]
