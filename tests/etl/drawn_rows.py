"""Rows that are drawn for any spec, such as the examples in features/."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from tests.product import Spec


def draw_rows(path: Path, text: str, *, rows: int, seed: int = 0) -> pa.Table:
    """Writes a file in the format that the spec reads, and returns its rows.

    `hour` and `at` are times in their order, as in the examples. Whole numbers and texts are long-tailed."""
    spec, draw = Spec.parse(text), np.random.default_rng(seed)
    made: dict[str, object] = {}
    for name, kind in spec.input.columns.items():
        ranks = np.exp(draw.random(rows) * 7).astype(int)
        gaps = draw.random(rows) < 0.1
        if name == spec.label:
            made[name] = draw.integers(0, 2, rows)
        elif name == "hour":
            hours = np.sort(draw.integers(0, 240, rows)).tolist()
            made[name] = [int(f"1410{21 + hour // 24}{hour % 24:02}") for hour in hours]
        elif name == "at":
            made[name] = 1_760_000_000 + np.sort(draw.integers(0, 10**6, rows))
        elif kind == "int":
            made[name] = ranks
        elif kind == "float":
            made[name] = pa.array(draw.normal(size=rows), mask=gaps)
        elif kind == "text":
            made[name] = pa.array([f"v{rank}" for rank in ranks], mask=gaps)
        else:
            made[name] = [[f"w{rank + n}" for n in range(rank % 4)] for rank in ranks.tolist()]
    table = pa.table(made)
    if spec.input.format == "csv":
        plain = pyarrow.csv.WriteOptions(quoting_style="none", quoting_header="none")
        pyarrow.csv.write_csv(table, path, plain)
    elif spec.input.format == "json":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
    else:
        pq.write_table(table, path)
    return table
