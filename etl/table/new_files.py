"""`describe` checks a job's files before they are published.

Spark's workers run it too, so it needs only pyarrow and numpy.
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
"""Calls a function with every path, in order: `map`, or a function that uses a cluster."""


class CommitError(UsageError):
    """A commit that is not allowed, or files that differ from what the job intended to write."""


def describe(
    store: TableStore,
    job: str,
    fields: Sequence[Field],
    row_group_rows: int,
    *,
    map_each: Each = map,
    buckets: Mapping[str, int] | None = None,
) -> tuple[tuple[FileRecord, ...], Profile]:
    """Returns the records of a job's files, and their profile. Checks the files' footers.

    `buckets` is the number of ids of each column for values outside its vocabulary."""
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
