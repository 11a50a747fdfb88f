"""Counts how many of the drawn faults tests find, by room and by operator (`print_share`)."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_MOST_EQUIVALENT = 0.1


def read_results(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file of results: first the seed, then the faults. A line that was cut is left out."""
    text = path.read_text() if path.exists() else ""
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        path.write_text(text)
    return [json.loads(line) for line in text.splitlines()]


def read_equivalents(path: Path) -> dict[str, str]:
    """Returns fault → why no test can find it, from the file beside the results."""
    beside = path.with_suffix(".equivalents.toml")
    if not beside.exists():
        return {}
    entries = tomllib.loads(beside.read_text())["equivalent"]
    return {entry["fault"]: entry["because"] for entry in entries}


def count(
    lines: Iterable[dict[str, Any]], equivalents: dict[str, str]
) -> dict[tuple[str, str], Counter[str]]:
    """Returns the counts by ("room", name), by ("operator", name) and of all. A fault that only a later run found, for
    which tests were written, counts as `later`. One that fails at import does not count."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    first = {}
    last = {}
    for line in lines:
        first.setdefault(line["fault"], line)
        last[line["fault"]] = line
    unknown = [name for name in equivalents if last.get(name, {}).get("status") != "survived"]
    if unknown:
        raise SystemExit(f"not equivalent, for it did not survive or was not drawn: {unknown[0]}")
    for name, line in first.items():
        status = line["status"]
        if name in equivalents:
            status = "equivalent"
        elif status == "survived" and last[name]["status"] == "found":
            status = "later"
        for key in (("room", line["room"]), ("operator", line["operator"]), ("all", "all")):
            counts.setdefault(key, Counter())[status] += 1
    return counts


def print_share(paths: Sequence[Path], *, survivors: bool = False) -> None:
    """Prints the table. Fails if more than a tenth of the faults are said to be equivalent."""
    lines, equivalents = [], {}
    for path in paths:
        head, *more = read_results(path)
        lines += [{**line, "fault": f"{head['seed']}: {line['fault']}"} for line in more]
        equivalents |= {
            f"{head['seed']}: {name}": why for name, why in read_equivalents(path).items()
        }
    counts = count(lines, equivalents)
    print(
        "| | drawn | equivalent | found | found later | survived | share found |\n|---|---|---|---|---|---|---|"
    )
    for (_, name), some in sorted(counts.items(), key=lambda pair: (pair[0][0] != "room", pair[0])):
        drawn = some.total() - some["fails at import"]
        fresh = drawn - some["equivalent"]
        share = f"{100 * some['found'] / fresh:.0f} %" if fresh else "–"
        numbers = (drawn, *(some[key] for key in ("equivalent", "found", "later", "survived")))
        print("|", " | ".join(map(str, (name, *numbers, share))), "|")
    everything = counts.get(("all", "all"), Counter())
    print(f"\n{everything['fails at import']} more failed at import and were drawn again.")
    if survivors:
        for line in {line["fault"]: line for line in lines}.values():
            if line["status"] == "survived" and line["fault"] not in equivalents:
                print(f"\n{line['fault']} ({line['tests']} tests run, {line['left']} left)")
                print(f"  - {line['old']}\n  + {line['new']}")
    drawn = everything.total() - everything["fails at import"]
    if everything["equivalent"] > _MOST_EQUIVALENT * drawn:
        raise SystemExit(
            f"{everything['equivalent']} of {drawn} faults are said to be equivalent: more than a tenth"
        )
