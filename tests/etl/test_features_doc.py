"""docs/features.md names every key of a spec, and nothing else."""

from __future__ import annotations

import dataclasses
import re

from sluice.etl.ops import OPERATORS
from sluice.etl.spec.columns import ROLE_KINDS
from sluice.etl.spec.row_rules import FILTERS, SECTIONS
from sluice.etl.spec.spec import DRIFTS, FORMATS, INPUT_TYPES, Input, Spec, TableSpec


def test_every_key_is_documented_and_every_example_reads(repo):
    page = (repo / "docs" / "features.md").read_text()
    words = set(re.findall(r"[A-Za-z_!<>=]+", " ".join(re.findall(r"`([^`]+)`", page))))
    table = {f.name for f in dataclasses.fields(TableSpec)} - {"split_from"}
    wanted = {*OPERATORS, *ROLE_KINDS, *FORMATS, *INPUT_TYPES, *DRIFTS, *table, *SECTIONS, "warn", "refuse",
              *(f.name for f in dataclasses.fields(Input)), *(word for f in FILTERS for word in f.split()),
              *(f.name for op in OPERATORS.values() for f in dataclasses.fields(op))}
    assert wanted - words == set()
    rows = page[page.index("## Operators"):page.index("## States")].splitlines()
    named = {name for row in rows if row.startswith("| `") for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(OPERATORS)
    for spec in (repo / "features").glob("*.toml"):
        assert Spec.read(spec).columns
