"""A job's files before they are published: `describe` examines each.

Spark's workers run this too, so it needs nothing but pyarrow and numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq

from sluice.common.errors import UsageError
from sluice.etl.schema import Field
from sluice.etl.table.data_files import arrow_schema, folder_of
from sluice.etl.table.job_record import FileRecord
from sluice.etl.table.profile import Profile
from sluice.etl.table.store import TableStore

Each = Callable[[Callable[[str], Any], Sequence[str]], Iterable[Any]]
"""Calls a function on every path, in order: `map`, or one that spreads the calls over a cluster."""


class CommitError(UsageError):
    """A commit that cannot be asked for, or files that are not what the job meant to write."""


def describe(
    store: TableStore,
    job: str,
    fields: Sequence[Field],
    row_group_rows: int,
    *,
    map_each: Each = map,
    buckets: Mapping[str, int] | None = None,
) -> tuple[tuple[FileRecord, ...], Profile]:
    """Returns every file of a job, its footer checked against what the job was to write, and the profile of all of
    them.

    `buckets` are the ids of each column that stand for values out of its vocabulary."""
    paths = [p for p in store.files(folder_of(job)) if p.endswith(".parquet")]
    look = partial(_describe, store.uri, tuple(fields), row_group_rows, dict(buckets or {}))
    found = [
        (FileRecord.from_json(file), Profile(profile)) for file, profile in map_each(look, paths)
    ]
    profile = Profile.joined([profile for _, profile in found])
    return tuple(file for file, _ in found if file.rows), profile


def _describe(
    uri: str, fields: Sequence[Field], row_group_rows: int, buckets: Mapping[str, int], path: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    store, schema = TableStore(uri), arrow_schema(fields)
    with store.fs.open_input_file(store.path(path)) as file:
        footer = pq.ParquetFile(file)
        groups = tuple(
            footer.metadata.row_group(i).num_rows for i in range(footer.metadata.num_row_groups)
        )
        have = [(f.name, f.type) for f in footer.schema_arrow]
        want = [(f.name, f.type) for f in schema]
        if have != want:
            raise CommitError(f"{store.url(path)}: its columns are {have}, not {want}")
        profile = Profile.of(footer, fields, buckets)
    if any(rows != row_group_rows for rows in groups[:-1]) or (
        groups and groups[-1] > row_group_rows
    ):
        raise CommitError(
            f"{store.url(path)}: its row groups have {groups} rows, not {row_group_rows} each"
        )
    split = next((part[6:] for part in path.split("/") if part.startswith("split=")), "")
    if not split:
        raise CommitError(f"{store.url(path)}: it lies in no split's folder")
    partition = next(
        (unquote(part[10:]) for part in path.split("/") if part.startswith("partition=")), None
    )
    record = FileRecord(
        path=path,
        rows=sum(groups),
        bytes=store.size(path) or 0,
        split=split,
        row_group_rows=groups,
        sha256=store.digest(path),
        partition=partition,
    )
    return asdict(record), profile.columns
