"""What a pipeline reads elsewhere by: `WorkerReads`; `remote_reads` makes it of what a user names."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import pyarrow as pa

from sluice.ingest.columns import Columns
from sluice.ingest.memory.governor import Charge
from sluice.ingest.read.parquet_files import ParquetFiles
from sluice.ingest.read.reader import RowGroupReader, SourceError
from sluice.ingest.remote.asking import Asking
from sluice.ingest.remote.calls import Call, source_digest
from sluice.ingest.remote.client import Connection
from sluice.ingest.remote.fleet import Fleet, LocalFleet
from sluice.ingest.remote.maker import job_of
from sluice.ingest.remote.unit import RemoteError, RemoteJob, Unit
from sluice.ingest.row_order import RowsPlan
from sluice.ingest.stages.shuffle import Decoded, ReadRows, ReadTask, WindowPiece
from sluice.ingest.stages.transform import Arrays

if TYPE_CHECKING:
    from sluice.etl.table.table import FeatureTable

_MOST_LOCAL = 256


class Received(Decoded):
    """What a worker answered for a read: the rows of its parts, one part after the other."""

    def __init__(self, task: ReadTask, unit: Unit, batch: pa.RecordBatch, charge: Charge):
        super().__init__(task, pa.Table.from_batches([batch]), charge, final=True)
        self._parts = unit.parts

    def pieces(self) -> list[WindowPiece]:
        ends = [*accumulate(part.stop - part.start for part in self._parts)]
        return [WindowPiece(self, end - part.stop + part.start, end, in_order=part.whole)
                for end, part in zip(ends, self._parts, strict=True)]


class WorkerReads:
    """Reads row groups, and calls functions, by workers elsewhere (`ingest.stages.completed_windows.RemoteWork`)."""

    def __init__(self, fleet: Fleet, groups: RowGroupReader):
        self._fleet, self._groups, self._asking = fleet, groups, Asking(fleet)
        self.requests, self.use = fleet.requests, fleet.use
        self._sources: dict[str, str] = {}
        self._at_the_end: int | None = None
        self._pid = os.getpid()

    def read(self, task: ReadTask, charge: Charge) -> ReadRows:
        unit = Unit.of(task)
        try:
            return Received(task, unit, self._asking.get(unit), charge)
        except SourceError as error:
            if self._groups.rescue is None:
                raise
            return Decoded(task, self._groups.rescue.group(error, task.read, self._groups.schema), charge)

    def call(self, function: str, arrays: Arrays, where: str) -> Arrays:
        rows = max((array.shape[0] for array in arrays.values()), default=0)
        if function not in self._sources:
            self._sources[function] = source_digest(function)
        found: Arrays = self._asking.get(Call(function, self._sources[function], arrays, where, rows))
        return found

    def watch(self, charge: Callable[[int], None]) -> None:
        self._fleet.charge = charge

    @property
    def pids(self) -> list[int]:
        return self._fleet.pids

    def stats(self) -> dict[str, Any]:
        counts = self._asking.counts
        with self._fleet.changed:
            return {"workers": len(self._fleet.workers) if self._at_the_end is None else self._at_the_end,
                    **{name: counts[name] for name in ("units", "calls", "bytes", "retries", "hedges", "late")},
                    "starting": self._fleet.starting, "core_s": round(self._fleet.core_s(), 3),
                    **self._fleet.scale}

    def close(self) -> None:
        """Ends all waiting, and the workers that are this process's own. Does nothing in a fork of it."""
        if os.getpid() == self._pid:
            if self._at_the_end is None:
                self._at_the_end = len(self._fleet.workers)
            self._asking.close()
            self._fleet.close()


def remote_reads(workers: str, source: FeatureTable | ParquetFiles, *, plan: RowsPlan, split: str, columns: Columns,
                 reader: str, sample: str | None, groups: RowGroupReader, local_only: Mapping[str, Any], rank: str,
                 functions: Sequence[str]) -> WorkerReads:
    """Reads by the `workers` that a user names, for one loader. What is in `local_only` cannot be done elsewhere; the
    `functions` can. A loader's `rank` says which rows of a job it wants."""
    for what, given in local_only.items():
        if given:
            raise RemoteError(f"workers={workers!r}: {what} is of this process alone; leave one of the two out")
    job = job_of(source, plan=plan, split=split, columns=columns, reader=reader, sample=sample)
    kind, _, rest = workers.partition(":")
    table = [file.path for file in source.files] if isinstance(source, ParquetFiles) else str(source.uri)
    if kind == "local":
        if not rest.isdigit() or not 1 <= int(rest) <= _MOST_LOCAL:
            raise RemoteError(f"workers={workers!r}: {rest!r} is no number of workers from 1 to {_MOST_LOCAL}")
        return WorkerReads(LocalFleet(int(rest), job, table, functions), groups)
    if workers.startswith("ray://"):
        from sluice.ingest.remote.on_ray import RayFleet

        return WorkerReads(RayFleet(workers.removeprefix("ray://"), job, table, functions), groups)
    return WorkerReads(Fleet(_connections(workers, job, (rank, secrets.token_hex(8)))), groups)


def _connections(workers: str, job: RemoteJob, asker: tuple[str, str]) -> list[Connection]:
    """Connections to `HOST:PORT,…?token=FILE[&ca=FILE]`."""
    named, _, query = workers.partition("?")
    addresses, options = named.split(","), parse_qs(query)
    if "token" not in options or options.keys() - {"token", "ca"}:
        raise RemoteError(f"workers={workers!r}: write local:4, ray://HOST:PORT, or HOST:PORT,HOST:PORT?token=FILE, "
                          "with &ca=FILE for TLS")
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise RemoteError(f"workers={workers!r}: {address!r} is no HOST:PORT, and neither is it local:N")
    try:
        token = Path(options["token"][0]).read_text("utf-8").strip()
        authority = Path(options["ca"][0]).read_bytes() if "ca" in options else None
    except OSError as error:
        raise RemoteError(f"workers={workers!r}: {error.filename}: {error.strerror}") from None
    return [Connection(address, token, job, authority=authority, asker=asker) for address in addresses]
