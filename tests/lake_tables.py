"""Tables of Delta and Iceberg, and folders with partitions in their names, as other programs write them."""

import json
import threading
import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake

KINDS = ("delta", "delta by name", "delta by id", "iceberg", "folders")


def clicks(seed: int, rows: int = 300) -> pa.Table:
    """Rows with a label, numbers, texts, a day and an hour."""
    chance = np.random.default_rng(seed)
    return pa.table(
        {
            "click": pa.array(chance.integers(0, 2, rows), pa.int32()),
            "price": pa.array(chance.random(rows), pa.float32()),
            "user": [f"u{n}" for n in chance.integers(0, 50, rows)],
            "day": [f"2026-01-0{n}" for n in chance.integers(1, 4, rows)],
            "hour": pa.array(chance.integers(0, 3, rows), pa.int32()),
            "at": pa.array(
                1_750_000_000_000_000 + chance.integers(0, 10**12, rows),
                pa.timestamp("us", "UTC"),
            ),
        }
    )


def make(kind: str, folder: Path, *parts: pa.Table, **catalog: str) -> str:
    """Writes parts, one commit each, partitioned by day and hour. Returns the name by which the table is opened."""
    folder.mkdir(exist_ok=True)
    if kind == "iceberg":
        table = iceberg(folder, parts[0].schema, **catalog)
        with table.update_spec() as spec:
            spec.add_identity("day")
            spec.add_identity("hour")
        for part in parts:
            table.append(part)
        table.catalog.close()
        return newest(table)
    for number, part in enumerate(parts):
        if kind == "folders":
            pq.write_to_dataset(
                part,
                folder,
                partition_cols=["day", "hour"],
                basename_template=f"{number}-{{i}}.parquet",
            )
            continue
        mapping = {"delta by name": "name", "delta by id": "id"}.get(kind)
        write_deltalake(
            folder,
            part,
            mode="append",
            partition_by=["day", "hour"],
            configuration={"delta.columnMapping.mode": mapping} if mapping and not number else None,
        )
    return str(folder)


def start_threads_of_iceberg() -> None:
    """Starts all threads that pyiceberg keeps for the whole process."""
    from pyiceberg.utils.concurrent import ExecutorFactory

    pool = ExecutorFactory.get_or_create()
    together = threading.Barrier(pool._max_workers)
    for waiting in [pool.submit(together.wait) for _ in range(pool._max_workers)]:
        waiting.result()


def iceberg(folder: Path, schema: pa.Schema, **options: str):
    """An empty table in a catalog in this folder."""
    from pyiceberg.catalog.sql import SqlCatalog

    where = {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}
    catalog = SqlCatalog("here", **{**where, **options})
    catalog.create_namespace_if_not_exists("lake")
    return catalog.create_table("lake.clicks", schema=schema)


def newest(table) -> str:
    """The path of the newest metadata file."""
    return str(table.metadata_location).removeprefix("file://")


def change_delta_schema(folder: str, change) -> None:
    """Commits a version whose columns `change` has edited, as an engine that renames columns does."""
    version = DeltaTable(folder).version()
    log = Path(folder, "_delta_log")
    actions = [
        json.loads(line)
        for number in range(version + 1)
        for line in (log / f"{number:020}.json").read_text().splitlines()
    ]
    metadata = next(action["metaData"] for action in reversed(actions) if "metaData" in action)
    schema = json.loads(metadata["schemaString"])
    schema["fields"] = change(schema["fields"])
    metadata |= {"schemaString": json.dumps(schema), "id": str(uuid.uuid4())}
    (log / f"{version + 1:020}.json").write_text(json.dumps({"metaData": metadata}) + "\n")
