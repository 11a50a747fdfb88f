"""Synthetic rows in other shapes than Criteo's, for the example specs: Avazu's, sessions of users, and a very wide one.

Each shape is a function of (rows, seed) and has a planted click model, so that a trainer has something to learn.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from sluice.etl.ops.hashing import mix
from sluice.etl.synth.criteo import BestAUC

Floats = npt.NDArray[np.float64]
FORMATS = {"avazu": "csv", "sessions": "json", "wide": "parquet"}
WIDE_NUMBERS = 900
WIDE_IDS = 94
WIDE_LISTS = 5
_DAYS, _FIRST_DAY = 10, 21  # days of October 2014
_NO_DEVICE = "a99f214a"
_GENRES = ("drama", "comedy", "crime", "war", "music", "sport", "news")


def synthesize_shape(shape: str, target: Path, *, rows: int, seed: int = 0) -> dict[str, float]:
    """Writes one file in the format that the shape's spec reads; returns rows, bytes, label_rate, bayes_auc."""
    table, probability = _MAKERS[shape](rows, seed)
    target.parent.mkdir(parents=True, exist_ok=True)
    if FORMATS[shape] == "csv":
        pyarrow.csv.write_csv(
            table, target, pyarrow.csv.WriteOptions(quoting_style="none", quoting_header="none")
        )
    elif FORMATS[shape] == "json":
        with open(target, "w", encoding="utf-8") as file:
            file.writelines(
                json.dumps({k: v for k, v in row.items() if v is not None}, ensure_ascii=False)
                + "\n"
                for row in table.to_pylist()
            )
    else:
        pq.write_table(table, target, compression="zstd")
    best = BestAUC()
    best.add(probability)
    label = table["click"].to_numpy()
    return {
        "rows": rows,
        "bytes": target.stat().st_size,
        "label_rate": round(float(label.mean()), 4),
        "bayes_auc": round(best.value, 4),
    }


def _effect(ids: npt.NDArray[np.int64], seed: int, spread: float) -> Floats:
    """Returns a weight for each value. Equal values have equal weights."""
    bits = mix(ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed + 1))
    return ((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53 - 0.5) * 2 * spread


def _ranks(generator: np.random.Generator, values: int, count: int) -> npt.NDArray[np.int64]:
    """Draws long-tailed, log-uniform ranks."""
    ranks = np.exp(generator.random(count) * np.log(values + 1)).astype(np.int64) - 1
    return np.asarray(np.minimum(ranks, values - 1))


def _hexadecimal(ids: npt.NDArray[np.int64], salt: int) -> list[str]:
    return [
        f"{v:08x}"
        for v in (
            mix(ids.astype(np.uint64) + np.uint64(salt * 1_000_003)) >> np.uint64(32)
        ).tolist()
    ]


def _drawn(generator: np.random.Generator, logit: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    probability = 1.0 / (1.0 + np.exp(-logit))
    return (generator.random(len(logit)) < probability).astype(np.int8), probability


def _avazu(rows: int, seed: int) -> tuple[pa.Table, Floats]:
    """Makes ten days of clicks like Avazu's. Ids have 64 bits. -1 in C20 and one device id mean a missing value."""
    generator = np.random.Generator(np.random.Philox(seed))
    hour = np.sort(generator.integers(0, _DAYS * 24, rows))
    names = {
        "site_id": 3000,
        "site_domain": 2000,
        "site_category": 25,
        "app_id": 4000,
        "app_domain": 300,
        "app_category": 30,
        "device_id": 200_000,
        "device_ip": 500_000,
        "device_model": 5000,
    }
    ranks = {name: _ranks(generator, size, rows) for name, size in names.items()}
    banner = _ranks(generator, 7, rows)
    numbers = {
        f"C{14 + i}": _ranks(generator, size, rows)
        for i, size in enumerate((2500, 8, 9, 430, 4, 68, 170, 60))
    }
    logit = (
        -1.6
        + _effect(ranks["site_id"], seed, 1.2)
        + _effect(ranks["app_id"], seed + 1, 0.9)
        + _effect(banner, seed + 2, 0.5)
        + _effect(numbers["C14"], seed + 3, 0.8)
        + 0.4 * np.sin(hour % 24 / 24 * 2 * np.pi)
    )
    click, probability = _drawn(generator, logit)
    device = [
        _NO_DEVICE if lost else text
        for lost, text in zip(
            generator.random(rows) < 0.8, _hexadecimal(ranks["device_id"], 7), strict=True
        )
    ]
    table: dict[str, Any] = {
        "id": pa.array(mix(np.arange(rows, dtype=np.uint64) + np.uint64(seed * 977))),
        "click": click,
        "hour": [f"1410{_FIRST_DAY + h // 24:02}{h % 24:02}" for h in hour.tolist()],
        "C1": 1000 + _ranks(generator, 13, rows),
        "banner_pos": banner,
    }
    for number, name in enumerate(names):
        table[name] = device if name == "device_id" else _hexadecimal(ranks[name], number)
    table |= {
        "device_type": _ranks(generator, 5, rows),
        "device_conn_type": _ranks(generator, 4, rows),
        **numbers,
    }
    table["C20"] = np.where(generator.random(rows) < 0.45, -1, 100_000 + numbers["C20"])
    return pa.table(table), probability


def _sessions(rows: int, seed: int) -> tuple[pa.Table, Floats]:
    """Users who return. Each sees items in time order and likes those of one kind."""
    generator = np.random.Generator(np.random.Philox(seed))
    user, item = _ranks(generator, max(4, rows // 12), rows), _ranks(generator, 3000, rows)
    at = 1_760_000_000 + np.sort(generator.integers(0, 14 * 86_400, rows))
    kind, taste = item % 7, user % 7
    logit = -1.0 + 1.6 * (kind == taste) + _effect(item, seed, 0.8) + _effect(user, seed + 5, 0.5)
    click, probability = _drawn(generator, logit)
    many = generator.integers(0, 5, rows)
    tags = [
        [f"tag{(i * 7 + j * 13) % 101}" for j in range(n)]
        for i, n in zip(item.tolist(), many.tolist(), strict=True)
    ]
    genres = [
        "|".join(_GENRES[(k + j) % 7] for j in range(n % 3 + 1))
        for k, n in zip(kind.tolist(), many.tolist(), strict=True)
    ]
    price = np.round(np.exp(generator.normal(3, 1, rows)), 2)
    zones = np.array(["Europe/Berlin", "America/New_York", "Asia/Tokyo"])[user % 3]
    return pa.table(
        {
            "user": [f"u{u}" for u in user.tolist()],
            "item": [f"i{i}" for i in item.tolist()],
            "at": at,
            "zone": zones.tolist(),
            "tags": tags,
            "liked_tags": [t[:2] for t in tags[1:] + tags[:1]],
            "genres": genres,
            "price": pa.array(price, mask=generator.random(rows) < 0.1),
            "click": click.astype(np.int64),
        }
    ), probability


def _wide(rows: int, seed: int) -> tuple[pa.Table, Floats]:
    """Makes rows of a thousand columns: numbers, ids and lists. Most of them have no influence on the label."""
    generator = np.random.Generator(np.random.Philox(seed))
    numbers = generator.normal(size=(WIDE_NUMBERS, rows))
    ids = [_ranks(generator, 50 + 20 * i, rows) for i in range(WIDE_IDS)]
    click, probability = _drawn(
        generator, -0.5 + numbers[0] - 0.7 * numbers[1] + _effect(ids[0], seed, 1.0)
    )
    table: dict[str, Any] = {"click": click.astype(np.int64)}
    for i in range(WIDE_NUMBERS):
        table[f"F{i + 1}"] = pa.array(numbers[i], mask=generator.random(rows) < 0.02 * (i % 5))
    table |= {f"C{i + 1}": [f"v{v}" for v in column.tolist()] for i, column in enumerate(ids)}
    for i in range(WIDE_LISTS):
        lengths = generator.integers(0, 6, rows)
        values = _ranks(generator, 200, int(lengths.sum()))
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        table[f"L{i + 1}"] = pa.ListArray.from_arrays(
            pa.array(offsets, pa.int32()), pa.array([f"w{v}" for v in values.tolist()], pa.string())
        )
    return pa.table(table), probability


_MAKERS: dict[str, Callable[[int, int], tuple[pa.Table, Floats]]] = {
    "avazu": _avazu,
    "sessions": _sessions,
    "wide": _wide,
}
