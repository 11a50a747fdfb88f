"""A small log of clicks, the same from each seed on every machine, and the table that `sluice etl` makes of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.frozen.commands import call

SPEC = """
[input]
format = "json"
columns = ["click:int", "user:int", "item:int", "price:float", "age:float", "shop:text", "tags:texts", "weight:float"]

[table]
split = {train = 0.7, validation = 0.15, test = 0.15}
row_group_rows = 64
file_rows = 300

[[column]]
name = "click"
role = "label"

[[column]]
name = "price"
role = "dense"
ops = [{op = "fill", value = 0}, {op = "log", shift = 1}]

[[column]]
name = "age"
role = "dense"
ops = [{op = "fill_mean"}, {op = "standardise", online = true}]

[[column]]
name = "user"
role = "sparse"
ops = [{op = "hash", size = 60}]

[[column]]
name = "item"
role = "sparse"
ops = [{op = "modulus", size = 30, online = true}]

[[column]]
name = "shop"
role = "sparse"
ops = [{op = "categorify", min_count = 2}]

[[column]]
name = "tags"
role = "id_list"
ops = [{op = "categorify"}]
"""
WEIGHTED = (
    SPEC
    + """
[[column]]
name = "weight"
role = "weight"
ops = [{op = "fill", value = 1}]
"""
)
"""The same with the rows' weights as a column."""


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Returns raw rows; some values are missing."""
    draw = random.Random(f"clicks {seed}")
    drawn = []
    for _ in range(count):
        row: dict[str, Any] = {
            "user": draw.randrange(500),
            "item": draw.randrange(10**6),
            "price": round(draw.uniform(0, 99), 2),
            "age": round(draw.uniform(18, 80), 1),
            "shop": f"s{int(draw.expovariate(0.1))}",
            "tags": [f"t{draw.randrange(12)}" for _ in range(draw.randrange(4))],
            "weight": round(draw.uniform(0.5, 4), 2),
        }
        row = {name: value for name, value in row.items() if draw.random() < 0.95}
        drawn.append(
            {"click": int(draw.random() < 0.2 + 0.4 * (row.get("shop", "s0") < "s2")), **row}
        )
    return drawn


def make_table(folder: Path, *, count: int, seed: int = 0, spec: str = SPEC) -> Path:
    """Makes a table of so many rows with the local engine, in a new folder."""
    folder.mkdir(parents=True)
    (folder / "spec.toml").write_text(spec)
    (folder / "rows.json").write_text("".join(f"{json.dumps(row)}\n" for row in rows(count, seed)))
    call(
        "etl",
        "--engine",
        "local",
        "--spec",
        folder / "spec.toml",
        "--input",
        folder / "rows.json",
        "--output",
        folder / "table",
    )
    return folder / "table"
