"""A fitted table that lies in files, as it is too large for a driver to collect: `Stored`, read by Arrow."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from etl.store import Store

_EVEN_ROWS = 1 << 20
SCHEMA = pa.schema([("value", pa.string()), ("count", pa.int64())])


class StateError(ValueError):
    """Fitted state that is missing, damaged or another spec's: its message says which and what to do."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Columns (value, count), in the order of their ids: the files one after the other, each from its first row on."""

    uri: str
    """Of the table that the files belong to."""
    parts: tuple[tuple[str, int], ...]
    """Path of each file, relative to the table, and its rows."""
    digest: str
    """Of the content, however it is cut into files: see `digest_of`."""

    @classmethod
    def of(cls, store: Store, paths: Iterable[str]) -> Stored:
        """Files as they lie there, read once through for their digest."""
        found = cls(uri=store.uri, parts=tuple((path, rows_of(store, path)) for path in paths), digest="")
        return replace(found, digest=digest_of(SCHEMA, found._row_groups()))

    @property
    def num_rows(self) -> int:
        return sum(rows for _, rows in self.parts)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All of it, in even pieces; StateError behind the last one if this is not what was written."""
        digest = hashlib.sha256(str(SCHEMA).encode())
        for batch in _even(self._row_groups()):
            digest.update(batch.serialize())
            yield batch
        if self.digest and digest.hexdigest() != self.digest:
            raise StateError(f"{Store(self.uri).url(self.parts[0][0])}: this part of the fitted state, or one beside "
                             "it, was changed since it was written; copy it here anew, or fit again")

    def check(self) -> None:
        """StateError if it is not what was written."""
        for _ in self.batches():
            pass

    def _row_groups(self) -> Iterator[pa.RecordBatch]:
        store = Store(self.uri)
        for path, rows in self.parts:
            try:
                with store.fs.open_input_file(store.path(path)) as file:
                    reader = pq.ParquetFile(file, page_checksum_verification=True)
                    if reader.metadata.num_rows != rows:
                        raise StateError(f"{store.url(path)}: holds {reader.metadata.num_rows} rows, but {rows} were "
                                         "written; fit again")
                    for group in range(reader.metadata.num_row_groups):
                        table = reader.read_row_group(group, columns=SCHEMA.names, use_threads=False)
                        yield from table.select(SCHEMA.names).cast(SCHEMA).to_batches()
            except (OSError, pa.ArrowException) as error:
                raise StateError(f"{store.url(path)}: the fitted state cannot be read ({error})") from None

    def read(self) -> pa.Table:
        return pa.Table.from_batches(list(self.batches()), SCHEMA).combine_chunks()

    def head(self, rows: int) -> pa.Table:
        """Its first rows: the most frequent values."""
        held: list[pa.RecordBatch] = []
        for batch in self.batches():
            held.append(batch)
            if sum(b.num_rows for b in held) >= rows:
                break
        return pa.Table.from_batches(held, SCHEMA).slice(0, rows).combine_chunks()

    def to_json(self) -> dict[str, Any]:
        return {"parts": [list(part) for part in self.parts], "digest": self.digest}

    @classmethod
    def from_json(cls, uri: str, about: Any) -> Stored:
        return cls(uri=uri, parts=tuple((str(path), int(rows)) for path, rows in about["parts"]),
                   digest=str(about["digest"]))


def rows_of(store: Store, path: str) -> int:
    """Of one Parquet file, by its footer."""
    with store.fs.open_input_file(store.path(path)) as file:
        return int(pq.ParquetFile(file).metadata.num_rows)


def digest_of(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> str:
    """SHA-256 of a table's content, whatever its batches and wherever it lies."""
    digest = hashlib.sha256(str(schema).encode())
    for batch in _even(batches):
        digest.update(batch.serialize())
    return digest.hexdigest()


def _even(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of one size, each copied: a slice would be written with what lies around it."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        while sum(b.num_rows for b in held) >= _EVEN_ROWS:
            whole = pa.concat_batches(held)
            yield pa.concat_batches([whole.slice(0, _EVEN_ROWS)])
            held = [whole.slice(_EVEN_ROWS)]
    if held and (rest := pa.concat_batches(held)).num_rows:
        yield rest
