"""What operators learned from data: `State`, one table for each fitted operator, named by what it holds."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from etl.store import Store
from etl.stored import StateError, Stored, digest_of

__all__ = ["Packed", "State", "StateError", "Stored"]

Packed = dict[str, bytes | Stored]
"""A state as it travels to workers; what is stored they read themselves."""


@dataclass(frozen=True, kw_only=True)
class State:
    """Keys are `column/number of the operator in its chain`."""

    spec: str = ""
    """Hash of what was fitted: the fitted operators, their parameters and inputs."""
    tables: Mapping[str, pa.Table | Stored] = field(default_factory=dict)
    """Stored: it lies in files, and only who needs it reads it."""
    chains: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What `spec` is the hash of, to show a difference by; see `Spec.chains`."""
    fitted_on: str | None = None
    """The split whose rows were learned from; None: those of all splits, as in tables of older programs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", MappingProxyType(dict(sorted(self.tables.items()))))

    def __getitem__(self, key: str) -> pa.Table:
        """The table, read from its files if it lies in some."""
        found = self.kept(key)
        return found.read() if isinstance(found, Stored) else found

    def kept(self, key: str) -> pa.Table | Stored:
        try:
            return self.tables[key]
        except KeyError:
            there = ", ".join(self.tables) or "nothing"
            raise StateError(f"the fitted state holds nothing for {key!r} (it has {there}); "
                             "fit again, without --reuse-state") from None

    @property
    def stored(self) -> dict[str, Stored]:
        return {key: table for key, table in self.tables.items() if isinstance(table, Stored)}

    @cached_property
    def hash(self) -> str:
        """Names the state: the same content has the same name, wherever its tables lie."""
        digest = hashlib.sha256(self.spec.encode())
        if self.fitted_on is not None:
            digest.update(f"\0fitted on {self.fitted_on}\0".encode())
        for key, table in self.tables.items():
            found = table.digest if isinstance(table, Stored) else digest_of(table.schema, table.to_batches())
            digest.update(f"\0{key}\0{found}\0".encode())
        return digest.hexdigest()[:16]

    def packed(self) -> Packed:
        packed: Packed = {}
        for key, table in self.tables.items():
            if isinstance(table, Stored):
                packed[key] = table
                continue
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
            packed[key] = sink.getvalue().to_pybytes()
        return packed

    @classmethod
    def unpacked(cls, spec: str, packed: Packed) -> State:
        return cls(spec=spec, tables={key: found if isinstance(found, Stored) else pa.ipc.open_stream(found).read_all()
                                      for key, found in packed.items()})

    def save(self, store: Store) -> str:
        """Writes the folder `_sluice/state/<hash>` and returns the hash."""
        folder = f"_sluice/state/{self.hash}"
        small = {key: table for key, table in self.tables.items() if not isinstance(table, Stored)}
        for key, table in small.items():
            sink = io.BytesIO()
            pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
            store.write(f"{folder}/{quote(key, safe='')}.parquet", sink.getvalue())
        store.write_json(f"{folder}/state.json", {
            "spec": self.spec, "fitted_on": self.fitted_on, "keys": list(small), "chains": dict(self.chains),
            "stored": {key: table.to_json() for key, table in self.stored.items()}})
        return self.hash

    @classmethod
    def load(cls, store: Store, name: str) -> State:
        folder = f"_sluice/state/{name}"
        try:
            about = store.read_json(f"{folder}/state.json")
            tables: dict[str, pa.Table | Stored] = {
                key: _read(store.read(f"{folder}/{quote(key, safe='')}.parquet")) for key in about["keys"]}
            tables |= {key: Stored.from_json(store.uri, found) for key, found in about["stored"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
            raise StateError(f"{store.url(folder)}: the fitted state cannot be read ({error})") from None
        state = cls(spec=about["spec"], tables=tables, chains=about.get("chains", {}),
                    fitted_on=about.get("fitted_on"))
        if state.hash != name:
            raise StateError(f"{store.url(folder)}: the fitted state was changed since it was written; fit again")
        return state

    @staticmethod
    def learned_from(store: Store, name: str) -> str | None:
        """`fitted_on` of a saved state, without its tables."""
        folder = f"_sluice/state/{name}"
        try:
            found = store.read_json(f"{folder}/state.json").get("fitted_on")
        except (OSError, ValueError, AttributeError) as error:
            raise StateError(f"{store.url(folder)}: the fitted state cannot be read ({error})") from None
        return None if found is None else str(found)

    @staticmethod
    def files(store: Store, name: str) -> set[str]:
        """All that a saved state needs, relative to the table; none if it is not there."""
        folder = f"_sluice/state/{name}"
        found = set(store.files(folder))
        if f"{folder}/state.json" in found:
            about = store.read_json(f"{folder}/state.json")
            found |= {path for stored in about["stored"].values() for path, _ in stored["parts"]}
        return found


def _read(content: bytes) -> pa.Table:
    return pq.ParquetFile(io.BytesIO(content), page_checksum_verification=True).read()
