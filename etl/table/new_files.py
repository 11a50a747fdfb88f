"""`write_file` writes a data file, with its digest and its profile."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sluice.common.errors import UsageError
from sluice.etl.schema import Field
from sluice.etl.spec.nested_columns import is_text
from sluice.etl.table.data_files import arrow_schema, with_dictionaries
from sluice.etl.table.job_record import FileRecord
from sluice.etl.table.profile import Profile
from sluice.etl.table.store import TableStore

_MOST_SHARE = 0.9
_MOST_DICTIONARY_BYTES = 2**30
"""Above this, Arrow would store the rest of a column chunk as values. The first rows have decided that already."""


class CommitError(UsageError):
    """A commit that is not allowed, or files that differ from what the job intended to write."""


@dataclass(frozen=True, slots=True)
class NewFile:
    """A data file that is written, but not published."""

    record: FileRecord
    profile: Profile


class _DigestedFile(io.RawIOBase):
    """A file that is being written, with the digest and the number of its bytes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.digest = hashlib.sha256()
        self.bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self.digest.update(content)
        self._stream.write(content)
        self.bytes += len(content)
        return len(content)


def write_file(
    store: TableStore,
    path: str,
    row_groups: Iterable[pa.Table],
    fields: Sequence[Field],
    *,
    split: str,
    speed: bool = False,
    buckets: Mapping[str, int] | None = None,
) -> NewFile:
    """Writes a file with these row groups, and a checksum for each page. Raises a CommitError if the store has not all
    of its bytes. With `speed`, it has the layout for loading.

    `buckets` is the number of ids of each column for values outside its vocabulary."""
    schema = arrow_schema(fields)
    texts = with_dictionaries(schema)  # the loader's operators then see each value once
    rows, profiles = list[int](), list[Profile]()
    small = {"compression": "lz4", "use_dictionary": texts, "write_page_checksum": True}
    groups = (group.select(schema.names).cast(schema) for group in row_groups)
    first = next(groups, schema.empty_table())
    store.fs.create_dir(store.path(path).rsplit("/", 1)[0], recursive=True)
    with store.fs.open_output_stream(store.path(path)) as stream:
        sink = _DigestedFile(stream)
        with pq.ParquetWriter(
            pa.PythonFile(sink, mode="w"),
            schema,
            store_schema=False,
            **(speed_layout(first, texts) if speed else small),
        ) as writer:
            for table in chain([first] if len(first) else [], groups):
                writer.write_table(table, row_group_size=max(1, table.num_rows))
                rows.append(table.num_rows)
                profiles.append(Profile.of(table, fields, buckets or {}))
    if (size := store.size(path)) != sink.bytes:
        raise CommitError(
            f"{store.url(path)}: has {size} bytes, and {sink.bytes} were written; nothing was published; look at the "
            "store, and run the job again"
        )
    record = FileRecord(
        path=path,
        rows=sum(rows),
        bytes=sink.bytes,
        split=split,
        row_group_rows=tuple(rows),
        sha256=sink.digest.hexdigest(),
    )
    return NewFile(record, Profile.joined(profiles))


def speed_layout(first: pa.Table, texts: Collection[str] | None = None) -> dict[str, Any]:
    """Returns the options by which a file with these first rows is written for loading.

    Nothing is compressed. Columns have dictionaries where indices and dictionary take fewer bytes. If `texts` is given,
    of the columns of texts just these have one."""
    return {
        "compression": "none",
        "use_dictionary": [
            name
            for name, column in zip(first.column_names, first.columns, strict=True)
            if (
                _is_repetitive(column)
                if texts is None or not is_text(column.type)
                else name in texts
            )
        ],
        "dictionary_pagesize_limit": _MOST_DICTIONARY_BYTES,
        "write_page_checksum": True,
    }


def _is_repetitive(column: pa.ChunkedArray) -> bool:
    """Whether a dictionary shrinks a column of numbers or texts to less than _MOST_SHARE of its bytes."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return True
    if is_text(kind):  # it has a length of 4 bytes in Parquet, as it has an offset in Arrow
        values = pc.unique(column.drop_null())
        distinct, dictionary, plain = len(values), values.nbytes, column.nbytes
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        width = max(4, kind.bit_width // 8)  # of the values that Parquet stores
        distinct = pc.count_distinct(column).as_py()
        dictionary, plain = distinct * width, len(column) * width
    else:
        return False
    bits = max(1, distinct - 1).bit_length()
    return bool(len(column) * bits / 8 + dictionary < _MOST_SHARE * plain)
