"""What operators learned from data: `State`, one Arrow table for each fitted operator, named by what it holds."""

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

from etl.ops import Fitted
from etl.store import Store


class StateError(ValueError):
    """Fitted state that is missing, damaged or another spec's: its message says which and what to do."""


@dataclass(frozen=True, kw_only=True)
class State:
    """Keys are `column/number of the operator in its chain`."""

    spec: str = ""
    """Hash of what was fitted: the fitted operators, their parameters and inputs."""
    tables: Mapping[str, pa.Table] = field(default_factory=dict)
    chains: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What `spec` is the hash of, to show a difference by; see `Spec.chains`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", MappingProxyType(dict(sorted(self.tables.items()))))

    def __getitem__(self, key: str) -> pa.Table:
        try:
            return self.tables[key]
        except KeyError:
            there = ", ".join(self.tables) or "nothing"
            raise StateError(f"the fitted state holds nothing for {key!r} (it has {there}); "
                             "fit again, without --reuse-state") from None

    @cached_property
    def hash(self) -> str:
        """Names the state: the same content has the same name."""
        digest = hashlib.sha256(self.spec.encode())
        for key, table in self.tables.items():
            digest.update(f"\0{key}\0{table.schema}\0".encode())
            for batch in table.combine_chunks().to_batches():
                digest.update(batch.serialize())
        return digest.hexdigest()[:16]

    def packed(self) -> dict[str, bytes]:
        """As bytes that travel to workers."""
        packed = {}
        for key, table in self.tables.items():
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
            packed[key] = sink.getvalue().to_pybytes()
        return packed

    @classmethod
    def unpacked(cls, spec: str, packed: Mapping[str, bytes]) -> State:
        return cls(spec=spec, tables={key: pa.ipc.open_stream(content).read_all() for key, content in packed.items()})

    def updated(self, new: State, operators: Mapping[str, Fitted]) -> State:
        """This state with what `new` has besides: no value that is known changes what it becomes."""
        return State(spec=self.spec, tables={key: op.update(self[key], new[key]) for key, op in operators.items()},
                     chains=self.chains)

    def save(self, store: Store) -> str:
        """Writes the folder `_sluice/state/<hash>` and returns the hash."""
        folder = f"_sluice/state/{self.hash}"
        for key, table in self.tables.items():
            sink = io.BytesIO()
            pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
            store.write(f"{folder}/{quote(key, safe='')}.parquet", sink.getvalue())
        store.write_json(f"{folder}/state.json", {"spec": self.spec, "keys": list(self.tables),
                                                    "chains": dict(self.chains)})
        return self.hash

    @classmethod
    def load(cls, store: Store, name: str) -> State:
        folder = f"_sluice/state/{name}"
        try:
            about = store.read_json(f"{folder}/state.json")
            tables = {key: _read(store.read(f"{folder}/{quote(key, safe='')}.parquet"))
                      for key in about["keys"]}
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            raise StateError(f"{store.url(folder)}: the fitted state cannot be read ({error})") from None
        state = cls(spec=about["spec"], tables=tables, chains=about.get("chains", {}))
        if state.hash != name:
            raise StateError(f"{store.url(folder)}: the fitted state was changed since it was written; fit again")
        return state


def _read(content: bytes) -> pa.Table:
    return pq.ParquetFile(io.BytesIO(content), page_checksum_verification=True).read()
