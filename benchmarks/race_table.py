"""Writes the tables of both races from docs/pictures/tables.md: `python -m benchmarks.race_table`.

README.md has the table of the tuned race, docs/peers.md that of the loaders at their best settings. This module holds
no figures. tests/benchmarks/test_race_table.py fails if a page differs from those tables.
"""

from __future__ import annotations

from benchmarks.pictures import ROOT, TABLES, figures, table_of

ENTRY = "2026-11-29 · The race of decoders"
TUNED = "2026-11-29 · The tuned race in full turns"
BEGIN, END = "<!-- written by benchmarks.race_table -->\n", "<!-- end of the written part -->\n"
_HEAD = (
    "",
    "Sluice is … times as fast",
    "tuned while it runs",
    "memory limit",
    "exact order, resumable",
    "resumes on more or fewer ranks",
)
_LOADERS = (
    ("torch DataLoader by hand", ("no", "no", "your code", "your code")),
    ("Grain", ("no", "queue lengths", "yes", "your code")),
    ("SPDL", ("no", "queue lengths", "your code", "your code")),
    ("tf.data", ("workers, buffers", "its buffers", "on one host", "no")),
    ("petastorm", ("no", "queue lengths", "order by seed, no resume", "no")),
    ("mosaicml-streaming", ("no", "disk cache", "yes", "yes")),
    ("LanceDB", ("no", "queue lengths", "yes", "yes")),
    ("Ray Data", ("workers, hosts", "object store", "no", "no")),
    ("Hugging Face, its memory-mapped Arrow", ("no", "left to the kernel", "yes", "your code")),
    ("litData", ("no", "disk cache", "yes", "yes")),
)
"""How a loader's row begins, and what it can do."""


def written(tables: str) -> str:
    """Returns the table as Markdown. A ratio is bold where ours is faster."""
    columns, rows = table_of(tables, ENTRY, "best setting")
    ratio_at = next(n for n, name in enumerate(columns) if name.startswith("ours is as fast"))
    rate_at = columns.index("rows/s")
    ours = next(row for row in rows if row[0] == "ours")
    able = "workers, processes, buffers | whole process tree | yes | yes"
    lines = [
        "| " + " | ".join(_HEAD) + " |",
        "|---" * len(_HEAD) + "|",
        f"| **Sluice** | {ours[rate_at]} rows/s | {able} |",
    ]
    for name, properties in _LOADERS:
        row = next(row for row in rows if row[0].startswith(name))
        ratio = figures(row[ratio_at])[0]
        text = f"**{ratio:.2f}**" if ratio > 1 else f"{ratio:.2f}"
        lines.append("| " + " | ".join((name, text, *properties)) + " |")
    return "\n".join(lines) + "\n"


def tuned(tables: str) -> str:
    """Returns the table of the tuned race as Markdown."""
    columns, rows = table_of(tables, TUNED, "auto")
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


PAGES = {ROOT / "README.md": tuned, ROOT / "docs" / "peers.md": written}


def main() -> None:
    for page, table in PAGES.items():
        before, _, rest = page.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        page.write_text(before + BEGIN + table(TABLES.read_text()) + END + after)


if __name__ == "__main__":
    main()
