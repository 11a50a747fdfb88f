"""Synthetic rows of the example specs that are not Criteo's: Avazu's, sessions of users, and a very wide one."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from sluice.etl.ops.hashing import mix
from sluice.etl.spec.spec import Spec

FEATURES = Path(__file__).resolve().parents[2] / "features"
_GENRES = ("drama", "comedy", "crime", "war", "music", "sport", "news")


def synthesize_shape(shape, target, *, rows, seed=0):
    """Writes one file in the format that the shape's spec reads. A third of the rows are clicks, by chance."""
    draw = np.random.default_rng(seed)
    columns = {"click": (draw.random(rows) < 0.3).astype(np.int64), **_MAKERS[shape](draw, rows)}
    table = pa.table(columns).select(list(Spec.read(FEATURES / f"{shape}.toml").input.columns))
    if FORMATS[shape] == "csv":
        options = pyarrow.csv.WriteOptions(quoting_style="none", quoting_header="none")
        pyarrow.csv.write_csv(table, target, options)
    elif FORMATS[shape] == "parquet":
        pq.write_table(table, target)
    else:
        lines = ({k: v for k, v in row.items() if v is not None} for row in table.to_pylist())
        target.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines))


def _ranks(draw, values, count):
    """Draws long-tailed, log-uniform ranks."""
    ranks = np.exp(draw.random(count) * np.log(values + 1)).astype(np.int64) - 1
    return np.minimum(ranks, values - 1)


def _avazu(draw, rows):
    """Makes ten days of clicks like Avazu's. Ids have 64 bits. -1 in C20 and one device id mean a missing value."""
    hours = np.sort(draw.integers(0, 240, rows)).tolist()
    names = "site_id site_domain site_category app_id app_domain app_category device_id device_ip"
    texts = {
        name: [f"{v:08x}" for v in _ranks(draw, 3000, rows)]
        for name in [*names.split(), "device_model"]
    }
    lost = zip(draw.random(rows) < 0.8, texts["device_id"], strict=True)
    texts["device_id"] = ["a99f214a" if missing else text for missing, text in lost]
    sizes = {"C1": 13, "banner_pos": 7, "device_type": 5, "device_conn_type": 4, "C14": 2500}
    sizes |= {f"C{n}": 60 for n in range(15, 22)}
    numbers = {name: _ranks(draw, size, rows) for name, size in sizes.items()}
    return {
        "id": mix(np.arange(rows, dtype=np.uint64)),
        "hour": [f"1410{21 + h // 24}{h % 24:02}" for h in hours],
        **texts,
        **numbers,
        "C20": np.where(draw.random(rows) < 0.45, -1, 100_000 + numbers["C20"]),
    }


def _sessions(draw, rows):
    """Makes users who return. Each sees items in time order."""
    user, item = _ranks(draw, max(4, rows // 12), rows), _ranks(draw, 3000, rows)
    many = draw.integers(0, 5, rows).tolist()
    tags = [
        [f"tag{(i * 7 + j * 13) % 101}" for j in range(n)]
        for i, n in zip(item.tolist(), many, strict=True)
    ]
    return {
        "user": [f"u{u}" for u in user],
        "item": [f"i{i}" for i in item],
        "at": 1_760_000_000 + np.sort(draw.integers(0, 14 * 86_400, rows)),
        "zone": np.array(["Europe/Berlin", "America/New_York", "Asia/Tokyo"])[user % 3],
        "tags": tags,
        "liked_tags": [t[:2] for t in tags[1:] + tags[:1]],
        "genres": ["|".join(draw.choice(_GENRES, n % 3 + 1)) for n in many],
        "price": pa.array(
            np.round(np.exp(draw.normal(3, 1, rows)), 2), mask=draw.random(rows) < 0.1
        ),
    }


def _wide(draw, rows):
    """Makes rows of a thousand columns: numbers, ids and lists."""
    numbers = {
        f"F{n}": pa.array(draw.normal(size=rows), mask=draw.random(rows) < 0.02 * (n % 5))
        for n in range(1, 901)
    }
    ids = {f"C{n}": [f"v{v}" for v in _ranks(draw, 50 + 20 * n, rows)] for n in range(1, 95)}
    lists = {
        f"L{n}": [[f"w{v}" for v in _ranks(draw, 200, draw.integers(6))] for _ in range(rows)]
        for n in range(1, 6)
    }
    return numbers | ids | lists


FORMATS = {"avazu": "csv", "sessions": "json", "wide": "parquet"}
_MAKERS = {"avazu": _avazu, "sessions": _sessions, "wide": _wide}
