"""Draws the pictures of docs/benchmarks.md from docs/pictures/tables.md: `python -m benchmarks.pictures`.

This module holds no figures. Each picture names a table of that page and its columns.
tests/benchmarks/test_pictures.py fails if a file in docs/pictures differs from its table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
TABLES = FOLDER / "tables.md"

WIDTH, LEFT, RIGHT = 480, 16, 16
LINE, BAR, DOT = 18, 9, 5
COLOURS = ("#0f766e", "#b45309", "#9ca3af")
"""Of the last series, the one before it, and the one before that."""
_NUMBER = re.compile(r"(?P<number>\d[\d,]*\.?\d*|\.\d+)(?: ?(?P<unit>[MGk])\b)?")
_UNITS = {None: 1.0, "k": 1e3, "M": 1e6, "G": 1e9}


class PictureError(ValueError):
    """The page has no such entry, table, column or figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What has one colour: the `nth` figure in the cells of a column, which is known by how its head begins."""

    name: str
    column: str
    nth: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture: each row of a table with a bar for each series, or with a dot where the axis is logarithmic."""

    file: str
    title: str
    entry: str
    """The heading above the table, its date first."""
    table: str
    """How the head of the table's first named column begins."""
    series: tuple[Series, ...]
    unit: str
    """Behind each figure; `{}` stands for it."""
    logarithmic: bool = False
    reference: float | None = None
    """A value at which a line is drawn."""
    leave_out: tuple[str, ...] = ()
    """Rows of the table that are not drawn, by how they begin."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Other names for rows of the table."""


PICTURES = (
    Picture(
        file="waiting",
        title="Share of the time that two ranks wait for their input (less is better)",
        entry="2026-11-21 · Tuning while two ranks train; the demo in one epoch",
        table="one worker",
        series=(
            Series(name="one worker a stage", column="waiting", nth=0),
            Series(name="best fixed setting", column="waiting", nth=1),
            Series(name="tuned", column="waiting", nth=2),
        ),
        unit="{} %",
    ),
    Picture(
        file="peers",
        title="Rows a second, each loader at the best of its settings (more is better)",
        entry="2026-11-29 · The race of decoders",
        table="best setting",
        series=(
            Series(name="million rows/s; each line is ten times the one before", column="rows/s"),
        ),
        unit="{} M",
        logarithmic=True,
        names={"tf.data; its AUTOTUNE": "tf.data, the best of a grid"},
    ),
    Picture(
        file="tuned",
        title="Rows/s of Sluice's auto ÷ those of other loaders, by what they have to do (more is better)",
        entry="2026-11-29 · The tuned race in full turns",
        table="auto",
        series=(
            Series(name="÷ tf.data with AUTOTUNE", column="÷ tf.data"),
            Series(name="÷ the best setting by hand of any other loader", column="÷ the best"),
        ),
        unit="× {}",
        reference=1.0,
    ),
    Picture(
        file="occasions",
        title="Rows/s of the tuned run ÷ a setting that stays as it was (more is better)",
        entry="2026-11-26 · After each of four changes, live, on the release",
        table="tuned settles at",
        series=(
            Series(name="in the first ten seconds", column="× frozen, first 10 s"),
            Series(name="once settled", column="× frozen, settled"),
        ),
        unit="× {}",
        reference=1.0,
        names={
            "a lookup of 4 ms a batch becomes four times as dear": "a lookup becomes four times as dear",
            "the next version's features need another lookup of 16 ms": "new features look up 16 ms more",
        },
    ),
    Picture(
        file="policies",
        title="Rows of a policy ÷ the best possible, in simulated pipelines (more is better)",
        entry="2026-11-20 · Five seeds of every policy in four minutes, and a planner that passes all scenarios "
        "(simulated)",
        table="scenarios: median",
        series=(
            Series(name="worst twentieth of all pipelines", column="5 %"),
            Series(name="median", column="all: median"),
        ),
        unit="{}",
        leave_out=("oracle",),
    ),
    Picture(
        file="etl",
        title="Seconds to make the same features of 8 M rows (less is better)",
        entry="2026-11-20 · The ETL job beside pandas, Polars, DuckDB and a loop over rows (alone on the machine)",
        table="0.5 M rows: s",
        series=(Series(name="seconds", column="8 M rows: s"),),
        unit="{} s",
        names={"Spark: fresh; its job alone": "Spark (ours), its start included"},
    ),
)


def figures(cell: str) -> list[float]:
    """The numbers in a cell, as `**.2 %**`, `3.96 M; 3.71 M` or `11,714` has them."""
    return [
        float(match["number"].replace(",", "")) * _UNITS[match["unit"]]
        for match in _NUMBER.finditer(cell)
    ]


def table_of(page: str, entry: str, head: str) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table in an entry whose first named column begins so."""
    _, heading, rest = f"\n{page}".partition(f"\n## {entry}\n")
    if not heading:
        raise PictureError(f"{TABLES.name} has no entry {entry!r}")
    lines = rest.partition("\n## ")[0].splitlines()
    for at, line in enumerate(lines):
        if line.startswith("|") and lines[at + 1 : at + 2] and lines[at + 1].startswith("|---"):
            columns = _cells(line)
            if columns[1].startswith(head):
                return columns, [_cells(row) for row in _block(lines[at + 2 :])]
    raise PictureError(f"{TABLES.name}, {entry!r}: no table with a column {head!r}")


def _block(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("|"):
            return
        yield line


def _cells(line: str) -> list[str]:
    return [
        cell.replace("**", "").replace("`", "").strip()
        for cell in line.strip().strip("|").split("|")
    ]


def values(picture: Picture, page: str) -> list[tuple[str, list[float]]]:
    """Each row's name, and its figure in each series."""
    columns, rows = table_of(page, picture.entry, picture.table)
    pairs = []
    for row in rows:
        if row[0].startswith(picture.leave_out):
            continue
        of_row = []
        for series in picture.series:
            at = next((n for n, name in enumerate(columns) if name.startswith(series.column)), None)
            if at is None:
                raise PictureError(f"{TABLES.name}, {picture.entry!r}: no column {series.column!r}")
            numbers = figures(row[at])
            if len(numbers) <= series.nth:
                raise PictureError(
                    f"{TABLES.name}, {picture.entry!r}: {row[0]!r} has no figure {series.nth + 1} in "
                    f"{columns[at]!r}"
                )
            of_row.append(numbers[series.nth])
        pairs.append((picture.names.get(row[0], row[0]), of_row))
    return pairs


def drawn(picture: Picture, page: str) -> str:
    """The picture as SVG: legible on a telephone, in any browser, without a script or a font of its own."""
    rows = values(picture, page)
    scale = 1e6 if picture.unit.endswith("M") else 1.0
    shown = [value / scale for _, of_row in rows for value in of_row]
    first, last = math.floor(math.log10(min(shown))), math.ceil(math.log10(max(shown)))
    most = max(*shown, picture.reference or 0.0) * 1.02

    def across(value: float) -> float:
        share = (
            (math.log10(value) - first) / (last - first) if picture.logarithmic else value / most
        )
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    colours = COLOURS[: len(picture.series)][::-1]
    title = _wrapped(picture.title, 58)
    top = 16 + LINE * (len(title) + len(picture.series))
    row_height = 32 + (2 * DOT if picture.logarithmic else BAR * len(picture.series))
    height = top + row_height * len(rows) + 24
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            'font-family="system-ui, sans-serif" font-size="13" fill="#1f2937">'
        ),
        f"<title>{escape(picture.title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    parts += [
        f'<text x="{LEFT}" y="{20 + LINE * n}" font-weight="600">{escape(line)}</text>'
        for n, line in enumerate(title)
    ]
    for n, (colour, series) in enumerate(zip(colours, picture.series, strict=True), len(title)):
        parts.append(
            f'<circle cx="{LEFT + DOT}" cy="{16 + LINE * n}" r="{DOT}" fill="{colour}"/>'
            f'<text x="{LEFT + 16}" y="{20 + LINE * n}" fill="#4b5563">{escape(series.name)}</text>'
        )
    marks = (
        [10.0**n for n in range(first, last + 1)]
        if picture.logarithmic
        else []
        if picture.reference is None
        else [picture.reference]
    )
    for x in map(across, marks):
        parts.append(
            f'<line x1="{x}" x2="{x}" y1="{top}" y2="{height - 24}" stroke="#9ca3af" stroke-dasharray="3 3"/>'
        )
    for n, (name, of_row) in enumerate(rows):
        y = top + row_height * n + 20
        weight = ' font-weight="600"' if name == "ours" or name.startswith("planner") else ""
        said = ", ".join(picture.unit.format(f"{value / scale:g}") for value in of_row)
        parts.append(
            f'<text x="{LEFT}" y="{y}"{weight}>{escape(name)}</text>'
            f'<text x="{WIDTH - RIGHT}" y="{y}" text-anchor="end" fill="#4b5563">{escape(said)}</text>'
        )
        for k, (colour, value) in enumerate(zip(colours, of_row, strict=True)):
            x, under = across(value / scale), y + 6
            if picture.logarithmic:
                under += DOT
                parts.append(
                    f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{under}" y2="{under}" stroke="#e5e7eb"/>'
                    f'<circle cx="{x}" cy="{under}" r="{DOT}" fill="{colour}"/>'
                )
            else:
                parts.append(
                    f'<rect x="{LEFT}" y="{under + BAR * k}" width="{max(1.0, x - LEFT):g}" '
                    f'height="{BAR - 1}" fill="{colour}"/>'
                )
    date = picture.entry.partition(" · ")[0]
    parts.append(
        f'<text x="{LEFT}" y="{height - 8}" font-size="11" fill="#6b7280">docs/pictures/tables.md, {date}</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


def _wrapped(text: str, most: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def main() -> None:
    page = TABLES.read_text()
    FOLDER.mkdir(exist_ok=True)
    for picture in PICTURES:
        path = FOLDER / f"{picture.file}.svg"
        path.write_text(drawn(picture, page))
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
