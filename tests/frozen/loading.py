"""The order and the bytes of batches: of drawn settings of a loader, with resumes, and of the ways to read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sluice import BagColumn, Batch, Errors, Knobs, Loader, Order, Reading
from tests.frozen import clicks
from tests.frozen.digest import digest
from tests.product import UsageError

CASES = 16
TENSORS = ("dense", "values", "lengths", "label", "weight")
REFUSED = "refused"


def record(folder: Path) -> dict[str, Any]:
    """Makes tables in the folder, and returns what loaders make of them."""
    table = clicks.make_table(folder / "plain", count=3000)
    weighted = clicks.make_table(folder / "weighted", count=1500, seed=1, spec=clicks.WEIGHTED)
    files = _write_files(folder / "files")
    drawn = {f"case {number:02}": _case(number, table, weighted) for number in range(CASES)}
    return {"drawn": drawn, "ways": _ways(table, files, folder)}


def _case(number: int, table: Path, weighted: Path) -> dict[str, Any]:
    """Loads two epochs on every rank, and resumes in the middle of the second one on other ranks."""
    draw = random.Random(f"loader {number}")
    ranks, later = draw.choice([1, 1, 2, 4]), draw.choice([1, 2, 4])
    source = weighted if draw.random() < 0.3 else table
    if source == weighted:
        draw.random()  # so that all later draws stay as they were in 0.2.0
    order = Order(
        shuffle=draw.random() < 0.85,
        last=draw.choice(["drop", "pad"]),
        window_rows=draw.choice([None, 32, 100, 256]),
        streams=draw.choice([None, None, 1, 2, 4, 8]),
    )
    how: dict[str, Any] = {
        "batch_size": draw.choice([16, 48, 50, 64, 96, 128, 200]),
        "seed": draw.randrange(100),
        "order": order,
        "split": draw.choice(["train", "train", "validation", "test"]),
        "read_ahead_epochs": draw.choice([1, 3]),
        "reading": Reading(reader=draw.choice(["arrow", "petastorm"])),
        "knobs": Knobs(workers={"decode": draw.randint(1, 4)}),
    }
    asked = {
        "table": source.parent.name,
        "ranks": [ranks, later],
        "batch_size": how["batch_size"],
        "seed": how["seed"],
        "split": how["split"],
        "reader": how["reading"].reader,
        "shuffle": order.shuffle,
        "last": order.last,
        "window_rows": order.window_rows,
        "streams": order.streams,
    }
    case: dict[str, Any] = {"asked": " ".join(f"{name}={value}" for name, value in asked.items())}
    epochs = _on_ranks(ranks, lambda rank: _two_epochs(source, rank, ranks, how))
    if epochs == REFUSED:
        return case | {"orders": REFUSED}
    case |= {
        "orders": [order_hash for epoch in epochs for order_hash in epoch["orders"]],
        "batches": [epoch["batches"] for epoch in epochs],
        "state": epochs[0]["state"],
    }
    case["resumed"] = _on_ranks(
        later, lambda rank: _resumed(source, rank, later, how, case["state"])
    )
    return case


def _on_ranks(ranks: int, work: Callable[[int], Any]) -> Any:
    """Returns what each rank makes, or `REFUSED` if the loader refuses the settings."""
    try:
        return [work(rank) for rank in range(ranks)]
    except UsageError:
        return REFUSED


def _two_epochs(source: Path, rank: int, ranks: int, how: dict[str, Any]) -> dict[str, Any]:
    sums: list[str] = []
    orders: list[str | None] = []
    state = ""
    with Loader(str(source), rank=rank, ranks=ranks, tuning="fixed", **how) as loader:
        middle = len(loader) // 2
        for epoch in range(2):
            for batch in loader:
                sums.append(bytes_of(batch))
                if (epoch, batch.step + 1) == (1, middle):
                    state = json.dumps(loader.state_dict(), sort_keys=True)
            orders.append(loader.order_hash)
    return {"orders": orders, "batches": digest(*sums), "state": state}


def _resumed(source: Path, rank: int, ranks: int, how: dict[str, Any], state: str) -> str:
    with Loader(str(source), rank=rank, ranks=ranks, tuning="fixed", **how) as loader:
        loader.load_state_dict(json.loads(state))
        return digest(*map(bytes_of, loader))


def bytes_of(batch: Batch) -> str:
    """Returns the hash of a batch: its place, the types, the shapes and the bytes of its tensors."""
    arrays = [getattr(batch, name).numpy() for name in TENSORS]
    return digest([batch.epoch, batch.step, batch.rows], *_arrays(arrays))


def _arrays(arrays: Iterable[np.ndarray[Any, Any]]) -> list[Any]:
    return [
        part
        for array in arrays
        for part in ([str(array.dtype), list(array.shape)], array.tobytes())
    ]


# ---- the ways to read


def double_price(batch: dict[str, Any]) -> None:
    """A transform: it writes into the batch."""
    batch["price"] *= 2


def refuse_some(batch: dict[str, Any]) -> None:
    """A transform that fails on some rows, and on a batch with such a row."""
    if (batch["price"] > 4.5).any():
        raise ValueError("too dear")


def _ways(table: Path, files: str, folder: Path) -> dict[str, Any]:
    """Loads one epoch in each way that the documentation shows."""
    roles = {"label": "clicked", "dense": ["price", "is_new"], "sparse": ["user%1000", "tags%100"]}
    plain: dict[str, Any] = {"roles": roles, "fill": 0.5}
    errors = Errors(on_error="quarantine", quarantine=folder / "aside.jsonl", max_rate=1.0)
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "as numpy": (str(table), {"as_": "numpy"}),
        "as dict": (str(table), {"as_": "dict"}),
        "transform": (str(table), {"transforms": [double_price]}),
        "quarantine": (str(table), {"transforms": [refuse_some], "errors": errors}),
        "plain files": (files, plain),
        "plain files, hashed": (
            files,
            {
                "roles": {"label": "clicked", "dense": "price", "sparse": ["shop"]},
                "hash": {"shop": 50},
                "fill": 0,
            },
        ),
        "plain files, guessed": (files, {"hash": {"shop": 50}, "fill": 0}),
    }
    loaded_ways: dict[str, Any] = {}
    for name, (source, how) in ways.items():
        with Loader(
            source,
            batch_size=64,
            seed=5,
            tuning="fixed",
            order=Order(last="pad", window_rows=100),
            **how,
        ) as loader:
            sums = [_any_form(batch) for batch in loader]
            loaded_ways[name] = {
                "order": loader.order_hash,
                "batches": digest(*sums),
                "columns": [*loader.dense_names, *loader.sparse_names],
                "cardinalities": dict(loader.cardinalities),
            }
            if name == "quarantine":
                loaded_ways[name]["aside"] = loader.quarantined["rows_set_aside"]
    return loaded_ways


def _any_form(batch: Any) -> str:
    if isinstance(batch, Batch):
        return bytes_of(batch)
    parts: list[Any] = []
    for name in batch:
        column = batch[name]
        if isinstance(column, BagColumn):
            arrays = [np.asarray(column.values), np.asarray(column.lengths)]
        else:
            arrays = [np.asarray(column)]
        parts += [name, *_arrays(arrays)]
    return digest(*parts)


def _write_files(folder: Path) -> str:
    """Writes plain Parquet: numbers with gaps, texts and lists."""
    folder.mkdir()
    for part in range(2):
        rows = clicks.rows(400, seed=10 + part)
        pq.write_table(
            pa.table(
                {
                    "clicked": pa.array([row["click"] for row in rows], pa.int8()),
                    "price": pa.array([row.get("price") for row in rows], pa.float64()),
                    "is_new": pa.array([row.get("age", 0) < 30 for row in rows], pa.bool_()),
                    "user": pa.array([row.get("user", 0) for row in rows], pa.int64()),
                    "shop": pa.array([row.get("shop") for row in rows], pa.string()),
                    "tags": pa.array(
                        [[int(tag[1:]) for tag in row.get("tags", ())] for row in rows],
                        pa.list_(pa.int32()),
                    ),
                }
            ),
            folder / f"part-{part}.parquet",
            row_group_size=150,
        )
    return str(folder / "*.parquet")
