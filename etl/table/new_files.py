"""`describe` checks a new file before it is published.

Spark's workers run it too, so it needs only pyarrow and numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow.parquet as pq

from sluice.common.errors import UsageError
from sluice.etl.schema import Field
from sluice.etl.table.data_files import arrow_schema
from sluice.etl.table.job_record import FileRecord
from sluice.etl.table.profile import Profile
from sluice.etl.table.store import TableStore


class CommitError(UsageError):
    """A commit that is not allowed, or files that differ from what the job intended to write."""


@dataclass(frozen=True, slots=True)
class NewFile:
    """A data file that is written and checked, but not published."""

    record: FileRecord
    profile: Profile


def describe(
    store: TableStore,
    path: str,
    fields: Sequence[Field],
    row_group_rows: int,
    buckets: Mapping[str, int] | None = None,
) -> NewFile:
    """Reads a file as it is in the store. Raises a CommitError if it does not have these fields and row groups.

    `buckets` is the number of ids of each column for values outside its vocabulary."""
    schema = arrow_schema(fields)
    with store.fs.open_input_file(store.path(path)) as file:
        footer = pq.ParquetFile(file)
        groups = tuple(
            footer.metadata.row_group(i).num_rows for i in range(footer.metadata.num_row_groups)
        )
        have = [(f.name, f.type) for f in footer.schema_arrow]
        want = [(f.name, f.type) for f in schema]
        if have != want:
            raise CommitError(f"{store.url(path)}: its columns are {have}, not {want}")
        profile = Profile.of(footer, fields, buckets or {})
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
    return NewFile(record, profile)
