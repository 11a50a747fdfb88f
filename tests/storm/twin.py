"""What a storm's loader has to deliver: by the one-thread twin of the rows plan (tests.ingest.twin), batch by batch."""

import functools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.ingest.row_order import chain
from tests.ingest import twin
from tests.product import OWN, DataFile, Field, ParquetFiles, RowsPlan
from tests.storm import store
from tests.storm.functions import FUNCTIONS, OVER_ROWS

_NUMBERS = {
    "label": pa.int8(),
    "x": pa.float32(),
    "y": pa.float64(),
    "a": pa.int32(),
    "b": pa.int64(),
    "c": pa.int8(),
}
_ROLES = {
    "label": "label",
    "x": "dense",
    "y": "dense",
    "a": "sparse",
    "b": "sparse",
    "c": "sparse",
    "bag": "id_list",
}


@dataclass(frozen=True)
class Small:
    """A table in memory."""

    source: ParquetFiles
    groups: Mapping[tuple[int, int], Mapping[str, Any]]
    """(file, row group) → column → its values."""


def table(name: str, columns: tuple[str, ...], files: tuple[tuple[int, ...], ...]) -> Small:
    """Rows are told apart by column `a`, which counts them."""
    groups: dict[tuple[int, int], Mapping[str, Any]] = {}
    listed, row = [], 0
    for number, counts in enumerate(files):
        made = []
        for group, rows in enumerate(counts):
            at = np.arange(row, row + rows)
            values: dict[str, Any] = {
                c: (at if c == "a" else at * 7919 % (2 if c == "label" else 97)) for c in columns
            }
            arrays = {c: pa.array(v).cast(_NUMBERS[c]) for c, v in values.items() if c in _NUMBERS}
            if "bag" in columns:
                values["bag"] = [list(range(n, n + n % 4)) for n in at.tolist()]
                arrays["bag"] = pa.array(values["bag"], pa.list_(pa.int32()))
            made.append(pa.table(arrays))
            groups[number, group] = values
            row += rows
        path = f"/storm/{name}/{number}.parquet"
        store.TABLES[path] = tuple(made)
        listed.append(DataFile(path=path, rows=sum(counts), bytes=0, row_group_rows=counts))
    schema = made[0].schema
    fields = tuple(
        Field(
            name=c,
            role=_ROLES[c],
            type=str(schema.field(c).type),
            layout="list" if c == "bag" else "scalar",
        )
        for c in columns
    )
    bags = {"bag": 1.5} if "bag" in columns else {}
    located = {file.path: OWN for file in listed}
    files = ParquetFiles(f"/storm/{name}", fields, tuple(listed), bags, located=located)
    return Small(files, groups)


TABLES = {
    "one": table("one", ("label", "x", "a"), ((4, 4, 4, 4),)),
    "many": table("many", ("label", "x", "y", "a", "b", "c"), ((5, 3), (1, 6), (2,))),
    "bags": table("bags", ("label", "x", "a", "bag"), ((6, 3), (2, 5))),
    "long": table("long", ("label", "x", "a", "b"), ((2,) * 6, (7, 3), (8,))),
}


@dataclass(frozen=True)
class Expected:
    """One batch."""

    dense: Any
    values: Any
    lengths: Any
    label: Any
    weight: Any
    rows: int
    checksum: int

    def differs(self, batch: Any) -> str | None:
        """In what, if it does."""
        for name in ("dense", "values", "lengths", "label", "weight"):
            got, wanted = getattr(batch, name).numpy(), getattr(self, name)
            if got.shape != wanted.shape or not (got == wanted).all():
                return f"{name}: {got.tolist()} where the twin has {wanted.tolist()}"
        if (batch.rows, batch.checksum) != (self.rows, self.checksum):
            return f"rows {batch.rows}, checksum {batch.checksum} where the twin has {self.rows}, {self.checksum}"
        return None


@functools.lru_cache(maxsize=4096)
def epoch(  # noqa: PLR0917
    name: str,
    plan: RowsPlan,
    number: int,
    rank: int,
    ranks: int,
    over_rows: tuple[str, ...],
    transforms: tuple[str, ...],
    broken: tuple[int, int] | None,
) -> tuple[Expected, ...]:
    """All batches of an epoch. `broken` is a row group whose rows are set aside, and so are rows that functions fail
    on."""
    small = TABLES[name]
    columns = [f.name for f in small.source.fields]
    batches = []
    for rows in twin.batches(plan, number, rank, ranks):
        there = [row if row is not None and row[:2] != broken else None for row in rows]
        batch = {c: _column(small, c, there) for c in columns if c != "bag"}
        bags = (
            [[] if row is None else small.groups[row[0], row[1]]["bag"][row[2]] for row in there]
            if "bag" in columns
            else None
        )
        for function in over_rows:
            _call(function, batch, bags, there)
        weight = np.array([row is not None for row in there], np.float32)
        checksum = zlib.crc32(batch["a"].tobytes())
        for transform in transforms:
            _apply(transform, batch, weight)
        dense = [batch[c] for c in columns if _ROLES[c] == "dense"]
        sparse = [c for c in columns if _ROLES[c] in ("sparse", "id_list")]
        values = [
            np.concatenate([np.array(b, np.int32) for b in bags])
            if c == "bag" and bags
            else batch[c]
            for c in sparse
        ]
        lengths = [
            np.array([len(b) for b in bags], np.int32)
            if c == "bag" and bags
            else np.ones(len(rows), np.int32)
            for c in sparse
        ]
        batches.append(
            Expected(
                np.stack(dense, axis=1),
                np.concatenate(values),
                np.concatenate(lengths),
                batch["label"],
                weight,
                sum(row is not None for row in rows),
                checksum,
            )
        )
    return tuple(batches)


def order_hash(batches: tuple[Expected, ...]) -> str:
    """Of an epoch."""
    digest = ""
    for step, batch in enumerate(batches):
        digest = chain(digest, step, batch.checksum)
    return digest


def _column(small: Small, name: str, rows: list[tuple[int, int, int] | None]) -> Any:
    kind = np.float32 if _ROLES[name] in ("dense", "label") else np.int32
    return np.array(
        [0 if row is None else small.groups[row[0], row[1]][name][row[2]] for row in rows], kind
    )


def _call(function: str, batch: dict[str, Any], bags: Any, there: list[Any]) -> None:
    """All columns are 0 in rows that it fails on: they are not there any more."""
    for n in np.flatnonzero((batch["a"] % 13 == 4) & (function == "picky")).tolist():
        there[n] = None
        for column in batch.values():
            column[n] = 0
        if bags:
            bags[n] = []
    is_there = np.array([row is not None for row in there])
    given = OVER_ROWS[function]({name: batch[name][is_there] for name in ("x", "a")})
    batch["x"][is_there] = given["x"]


def _apply(transform: str, batch: dict[str, Any], weight: Any) -> None:
    """Rows that the function fails on stay as they were, with weight 0."""
    if transform == "fragile":
        bad = batch["a"] % 11 == 5
        batch["x"] = np.where(bad, batch["x"], batch["x"] + np.float32(3))
        weight[bad] = 0
        return
    batch.update(FUNCTIONS[transform](dict(batch)) or {})
