"""`FittedState`: what operators learned from data, one table for each fitted operator.

`FileBackedState` is such a table in files, for one that is too large for memory."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias
from urllib.parse import quote

import pyarrow as pa

from sluice.common.errors import UsageError
from sluice.etl.table.store import TableStore

_EVEN_ROWS = 1 << 20
FORGOTTEN = "\x1bforgotten "
"""How a text begins that stands in a vocabulary in place of a forgotten value. No input has such a text, because the
rest of it is random. So the ids of other values stay, and no value gets the forgotten id."""
SCHEMA = pa.schema([("value", pa.string()), ("count", pa.int64())])

UNDECIDED = "undecided"
"""A column of a table with sums whose values are counted again before an operator learns. No version keeps it."""


class StateError(UsageError):
    """Fitted state that is missing, damaged or of another spec. The message says which and what to do."""


@dataclass(frozen=True, kw_only=True)
class FileBackedState:
    """A table (value, count) in files. The rows of the files, one file after the other, are in the order of ids."""

    uri: str
    """The URI of the table that the files belong to."""
    parts: tuple[tuple[str, int], ...]
    """The path of each file, relative to the table, and its number of rows."""
    digest: str
    """The digest of the content, for any cut into files: see `digest_of`."""

    @classmethod
    def of(cls, store: TableStore, paths: Iterable[str]) -> FileBackedState:
        """Describes existing files. Reads them once for their digest."""
        state = cls(
            uri=store.uri, parts=tuple((path, rows_of(store, path)) for path in paths), digest=""
        )
        return replace(state, digest=digest_of(SCHEMA, state.row_groups()))

    @property
    def num_rows(self) -> int:
        return sum(rows for _, rows in self.parts)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yields all rows in batches of one size. Raises StateError after the last batch if the content has changed."""
        digest = hashlib.sha256(str(SCHEMA).encode())
        for batch in _rebatch(self.row_groups()):
            digest.update(batch.serialize())
            yield batch
        if self.digest and digest.hexdigest() != self.digest:
            raise StateError(
                f"{TableStore(self.uri).url(self.parts[0][0])}: this part of the fitted state, or one next to "
                "it, has changed since it was written; copy it again, or fit again"
            )

    def check(self) -> None:
        """Raises StateError if the content has changed."""
        for _ in self.batches():
            pass

    def row_groups(self) -> Iterator[pa.RecordBatch]:
        """Yields all rows as the files have them. Does not check the digest."""
        store = TableStore(self.uri)
        for path, rows in self.parts:
            try:
                with store.parquet(path) as reader:
                    if reader.metadata.num_rows != rows:
                        raise StateError(
                            f"{store.url(path)}: holds {reader.metadata.num_rows} rows, but {rows} were "
                            "written; fit again"
                        )
                    for group in range(reader.metadata.num_row_groups):
                        table = reader.read_row_group(
                            group, columns=SCHEMA.names, use_threads=False
                        )
                        yield from table.select(SCHEMA.names).cast(SCHEMA).to_batches()
            except (OSError, pa.ArrowException) as error:
                raise StateError(
                    f"{store.url(path)}: the fitted state cannot be read ({error})"
                ) from None

    def read(self) -> pa.Table:
        return pa.Table.from_batches(list(self.batches()), SCHEMA).combine_chunks()

    def head(self, rows: int) -> pa.Table:
        """Returns the first rows, which hold the most frequent values."""
        held: list[pa.RecordBatch] = []
        for batch in self.batches():
            held.append(batch)
            if sum(b.num_rows for b in held) >= rows:
                break
        return pa.Table.from_batches(held, SCHEMA).slice(0, rows).combine_chunks()

    def to_json(self) -> dict[str, Any]:
        return {"parts": [list(part) for part in self.parts], "digest": self.digest}

    @classmethod
    def from_json(cls, uri: str, about: Any) -> FileBackedState:
        return cls(
            uri=uri,
            parts=tuple((str(path), int(rows)) for path, rows in about["parts"]),
            digest=str(about["digest"]),
        )


Learnt: TypeAlias = pa.Table | FileBackedState
"""What one operator has learned."""


def rows_of(store: TableStore, path: str) -> int:
    """Returns the number of rows of a Parquet file, from its footer."""
    with store.parquet(path) as file:
        return int(file.metadata.num_rows)


def digest_of(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> str:
    """Returns the SHA-256 of a table's content. It does not depend on the cut into batches."""
    digest = hashlib.sha256(str(schema).encode())
    for batch in _rebatch(batches):
        digest.update(batch.serialize())
    return digest.hexdigest()


def _rebatch(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the same rows in batches of one size. Copies each: a slice is serialized with the rows around it."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        while sum(b.num_rows for b in held) >= _EVEN_ROWS:
            whole = pa.concat_batches(held)
            yield pa.concat_batches([whole.slice(0, _EVEN_ROWS)])
            held = [whole.slice(_EVEN_ROWS)]
    if held and (rest := pa.concat_batches(held)).num_rows:
        yield rest


@contextlib.contextmanager
def _errors_named(store: TableStore, folder: str) -> Iterator[None]:
    """Raises a StateError with the folder of a state that cannot be read."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
        raise StateError(
            f"{store.url(folder)}: the fitted state cannot be read ({error})"
        ) from None


Packed = dict[str, bytes | FileBackedState]
"""A state in the form that is sent to workers. They read tables in files themselves."""


@dataclass(frozen=True, kw_only=True)
class FittedState:
    """The tables that fitted operators learned. Keys are `column/number of the operator in its chain`."""

    spec: str = ""
    """The hash of the fitted operators, their parameters and inputs."""
    tables: Mapping[str, Learnt] = field(default_factory=dict)
    """The tables. Tables in files are read only when they are needed."""
    chains: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The plain values behind the hash `spec`, which messages compare: see `Spec.chains`."""
    fitted_on: str | None = None
    """The split that was learned from. None if nothing was learned."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", MappingProxyType(dict(sorted(self.tables.items()))))

    def __getitem__(self, key: str) -> pa.Table:
        """Returns the table of that key. Reads its files if it has any."""
        stored = self.kept(key)
        return stored.read() if isinstance(stored, FileBackedState) else stored

    def kept(self, key: str) -> Learnt:
        try:
            return self.tables[key]
        except KeyError:
            there = ", ".join(self.tables) or "nothing"
            raise StateError(
                f"the fitted state holds nothing for {key!r} (it has {there}); "
                "fit again, without --reuse-state"
            ) from None

    @property
    def stored(self) -> dict[str, FileBackedState]:
        return {
            key: table for key, table in self.tables.items() if isinstance(table, FileBackedState)
        }

    @cached_property
    def hash(self) -> str:
        """The name of the state. Equal content has an equal name everywhere."""
        digest = hashlib.sha256(self.spec.encode())
        if self.fitted_on is not None:
            digest.update(f"\0fitted on {self.fitted_on}\0".encode())
        for key, table in self.tables.items():
            content = (
                table.digest
                if isinstance(table, FileBackedState)
                else digest_of(table.schema, table.to_batches())
            )
            digest.update(f"\0{key}\0{content}\0".encode())
        return digest.hexdigest()[:16]

    def packed(self) -> Packed:
        packed: Packed = {}
        for key, table in self.tables.items():
            if isinstance(table, FileBackedState):
                packed[key] = table
                continue
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
            packed[key] = sink.getvalue().to_pybytes()
        return packed

    @classmethod
    def unpacked(cls, spec: str, packed: Packed) -> FittedState:
        return cls(
            spec=spec,
            tables={
                key: part
                if isinstance(part, FileBackedState)
                else pa.ipc.open_stream(part).read_all()
                for key, part in packed.items()
            },
        )

    def save(self, store: TableStore) -> str:
        """Writes the folder `_sluice/state/<hash>` and returns the hash."""
        folder = f"_sluice/state/{self.hash}"
        small = {
            key: table
            for key, table in self.tables.items()
            if not isinstance(table, FileBackedState)
        }
        for key, table in small.items():
            store.write_table(f"{folder}/{quote(key, safe='')}.parquet", table)
        store.write_json(
            f"{folder}/state.json",
            {
                "spec": self.spec,
                "fitted_on": self.fitted_on,
                "keys": list(small),
                "chains": dict(self.chains),
                "stored": {key: table.to_json() for key, table in self.stored.items()},
            },
        )
        return self.hash

    @classmethod
    def load(cls, store: TableStore, name: str) -> FittedState:
        folder = f"_sluice/state/{name}"
        with _errors_named(store, folder):
            about = store.read_json(f"{folder}/state.json")
            tables: dict[str, Learnt] = {
                key: store.read_table(f"{folder}/{quote(key, safe='')}.parquet")
                for key in about["keys"]
            }
            tables |= {
                key: FileBackedState.from_json(store.uri, described)
                for key, described in about["stored"].items()
            }
            state = cls(
                spec=about["spec"],
                tables=tables,
                chains=about["chains"],
                fitted_on=about["fitted_on"],
            )
        if state.hash != name:
            raise StateError(
                f"{store.url(folder)}: the fitted state was changed since it was written; fit again"
            )
        return state

    @staticmethod
    def learned_from(store: TableStore, name: str) -> str:
        """Returns `fitted_on` of a saved state, without reading its tables."""
        folder = f"_sluice/state/{name}"
        with _errors_named(store, folder):
            return str(store.read_json(f"{folder}/state.json")["fitted_on"])

    @staticmethod
    def files(store: TableStore, name: str) -> set[str]:
        """Returns all files that a saved state needs, relative to the table. Empty if there is no such state."""
        folder = f"_sluice/state/{name}"
        files = set(store.files(folder))
        if f"{folder}/state.json" in files:
            about = store.read_json(f"{folder}/state.json")
            files |= {f"{folder}/{quote(key, safe='')}.parquet" for key in about["keys"]}
            files |= {path for stored in about["stored"].values() for path, _ in stored["parts"]}
        return files
