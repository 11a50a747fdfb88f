"""Two tables of the same rows: ids that Spark made, and the numbers of which the loader is to make them."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from sluice import FeatureTable
from tests.dlrm import clicks_table

COLUMNS = {**clicks_table.COLUMNS, "user": "text", "price": "float", "count": "int"}
FEATURES = (
    clicks_table.FEATURES
    + """
[[column]]
name = "user"
role = "sparse"
ops = [{op = "modulus", size = 4000000007, online = true}]

[[column]]
name = "count"
role = "sparse"
ops = [{op = "modulus", size = 7, online = true}]

[[column]]
name = "price"
role = "sparse"
ops = [{op = "bucketize", boundaries = [0.1, 0.3, 0.7, 0.9, 16777217], online = true}]

[[column]]
name = "filled"
from = "price"
role = "sparse"
ops = [{op = "fill", value = 0.7}, {op = "log", online = true}, {op = "quantiles", buckets = 9, online = true}]

[[column]]
name = "parts"
from = "price"
role = "sparse"
ops = [{op = "quantiles", buckets = 5, online = true}]
"""
)
USERS = (
    "18446744073709551615",
    "9223372036854775808",
    "9223372036854775807",
    "-9223372036854775808",
    "-9223372036854775807",
    "-1",
    "-0",
    "007",
    None,
    "",
    "12a",
    "99999999999999999999",
    "123456789012345",
)
PRICES = (
    0.1,
    0.3,
    0.7,
    0.9,
    16777217.0,
    16777216.0,
    float("inf"),
    float("-inf"),
    float("nan"),
    None,
)


def raw_rows(rows: int) -> pa.Table:
    raw = clicks_table.raw_rows(rows)
    prices = np.random.default_rng(1).integers(0, 12, rows) / 10
    return (
        raw.append_column(
            "user",
            pa.array(
                [USERS[n] if n < len(USERS) else str(n * 7919 - 999) for n in np.arange(rows) % 40],
                pa.string(),
            ),
        )
        .append_column(
            "price",
            pa.array(
                [
                    PRICES[n] if n < len(PRICES) else float(prices[at])
                    for at, n in enumerate(np.arange(rows) % 30)
                ],
                pa.float64(),
            ),
        )
        .append_column(
            "count", pa.array([None if n % 5 == 0 else n - 99 for n in range(rows)], pa.int64())
        )
    )


def tables(folder: Path, rows: int) -> tuple[FeatureTable, FeatureTable]:
    """By Spark, and left to the loader."""
    text, raw = clicks_table.spec_text(COLUMNS, FEATURES), raw_rows(rows)
    head, *columns = text.split("[[column]]")
    spark = "[[column]]".join(
        [
            head,
            *(c.replace(", online = true", "") if 'role = "sparse"' in c else c for c in columns),
        ]
    )
    return clicks_table.write(folder / "spark", raw, text=spark), clicks_table.write(
        folder / "left", raw, text=text
    )
