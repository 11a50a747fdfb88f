"""docs/features.md names every key of a spec, and nothing else."""

import dataclasses
import re
from typing import get_args

from sluice.etl.ops.base import hints_of
from sluice.etl.spec.columns import ROLE_KINDS
from sluice.etl.spec.input_section import Input
from sluice.etl.spec.row_rules import SECTIONS, Filter
from sluice.etl.spec.spec import DRIFTS
from tests.etl.tables import column, write_spec
from tests.product import INPUT_TYPES, OPERATORS, Spec, TableSpec


def test_every_key_is_documented_and_every_example_reads(repo):
    page = (repo / "docs" / "features.md").read_text()
    prose = re.sub("```.*?```", "", page, flags=re.DOTALL)
    words = set(re.findall(r"[A-Za-z_!<>=]+", " ".join(re.findall(r"`([^`]+)`", prose))))
    table = {f.name for kind in (Input, TableSpec) for f in dataclasses.fields(kind)} - {
        "split_from",
        "times",
        "marks",
        "number_texts",
    }
    wanted = {
        *OPERATORS,
        *ROLE_KINDS,
        *get_args(hints_of(Input)["format"]),
        *INPUT_TYPES,
        *DRIFTS,
        *table,
        *SECTIONS,
        "warn",
        "refuse",
        *(word for op in get_args(hints_of(Filter)["op"]) for word in op.split()),
        *(f.name for op in OPERATORS.values() for f in dataclasses.fields(op)),
    }
    assert wanted - words == set()
    rows = page[page.index("## Operators") : page.index("## `[[transform]]`")].splitlines()
    named = {
        name
        for row in rows
        if row.startswith("| `")
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert named == set(OPERATORS)
    for spec in (repo / "features").glob("*.toml"):
        assert Spec.read(spec).columns


def test_the_transforms_of_the_page_are_what_a_spec_takes(repo):
    page = (repo / "docs" / "features.md").read_text()
    part = page[page.index("## `[[transform]]`") : page.index("## States")]
    text = "\n".join(re.findall(r"```toml\n(.*?)```", part, re.DOTALL))
    spec = Spec.parse(
        write_spec(
            "label:int I1:int I2:int C1:text C2:text tags:texts",
            column("I*", "dense", "fill"),
            column("C*", "sparse", "hash, size = 8"),
            column("tags", "id_list", "hash, size = 8"),
            text,
            form="json",
            table="",
        )
    )
    assert {
        key
        for line in part.splitlines()
        if line.startswith("| `")
        for key in re.findall(r"`(\w+)`", line.split("|")[1])
    } == {"name", "function", "op", "ops", "inputs", "outputs", "limit_s", "pure"}
    assert {transform.name: [o.name for o in transform.outputs] for transform in spec.transforms}[
        "ratio"
    ] == [
        "I1",
        "ratio",
        "group",
    ]
