"""What is asked of a worker, by its address: a `RemoteJob` (which table and order) and a `Unit`, one read of an epoch.

A unit's rows follow from its address alone, so it does not matter who makes them, nor how often. A unit is one read,
not the windows that share reads: those may chain, and a read that was done here and one that was done elsewhere can
meet in one window. Both are JSON on the wire; nothing is unpickled.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from typing import Any, ClassVar, Self

import pyarrow as pa
from zlib_ng.zlib_ng import crc32

from sluice.etl.schema import DataFile
from sluice.ingest.errors import LoadingError
from sluice.ingest.row_order import RowsPlan
from sluice.ingest.stages.shuffle import ReadTask

MOST_BYTES = 2**20
"""The longest request: a job's plain Parquet may have thousands of columns."""
_PLAN = ("batch_size", "seed", "streams", "window_rows", "shuffle", "last")


class RemoteError(LoadingError):
    """What workers elsewhere cannot do, or did wrong: the message names the worker and what would do."""


def digest(value: Any) -> str:
    """A short hash of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


@functools.cache  # it is part of every call, and read from a file
def package() -> str:
    return metadata.version("sluice")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteJob:
    """Which rows a loader reads, in which order and as what. A worker that finds anything else than this refuses it."""

    package: str
    version: str
    """The table's."""
    files: str
    """Digest of the files' names and sizes."""
    split: str
    reader: str
    sample: str
    roles: Mapping[str, list[str]]
    """Of plain Parquet: the columns by their roles; empty for a feature table, which says so itself."""
    hash: Mapping[str, int]
    plan: Mapping[str, Any]
    order: str
    """Digest of the plan of rows, with the row groups of all files."""
    floats: tuple[str, ...]
    ids: tuple[str, ...]
    bags: Mapping[str, float]
    fill: Mapping[str, float]
    made: str
    """Digest of the operators that make columns of what is stored."""

    @property
    def digest(self) -> str:
        return digest(asdict(self))

    @property
    def schema(self) -> pa.Schema:
        """That of every batch of it."""
        kinds = [(self.floats, pa.float32()), (self.ids, pa.int32()), (self.bags, pa.large_list(pa.int32()))]
        return pa.schema([pa.field(name, kind) for names, kind in kinds for name in names])

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """A job as another program sent it. RemoteError if it is none of this version's."""
        given = _parsed(data)
        if isinstance(given, dict) and given.get("package") != package():
            raise RemoteError(f"the worker has sluice {package()}, the loader {given.get('package')}: install one "
                              "version on both")
        names = {field.name for field in fields(cls)}
        if not isinstance(given, dict) or given.keys() != names:
            raise RemoteError("a job that lacks fields, or has unknown ones: install one version of sluice on both "
                              "sides")
        return cls(**{**given, "floats": tuple(given["floats"]), "ids": tuple(given["ids"])})

    def differences(self, other: RemoteJob) -> list[str]:
        """What another job has otherwise, in words."""
        mine, its = asdict(self), asdict(other)
        return [f"{name}: {its[name]!r} there, {value!r} here" for name, value in mine.items() if its[name] != value]


@dataclass(frozen=True, slots=True)
class Part:
    """The rows `start` to `stop` of a row group, which all lie in one window: the whole window, or some of it."""

    stream: int
    window: int
    start: int
    stop: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Unit:
    """One read of an epoch."""

    counted: ClassVar[str] = "units"
    kind: ClassVar[str] = "read"
    epoch: int
    file: int
    group: int
    draw: int
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        return sum(part.stop - part.start for part in self.parts)

    @property
    def said(self) -> str:
        return f"file {self.file}, row group {self.group}"

    @property
    def key(self) -> str:
        """What is the same wherever it is asked for."""
        return self.request("", "", "").decode()

    @classmethod
    def of(cls, task: ReadTask) -> Self:
        windows, read = task.schedule.windows, task.read
        return cls(task.schedule.epoch, read.file, read.group, read.draw, tuple(
            Part(windows[p.window].stream, windows[p.window].number, p.start, p.stop,
                 p.stop - p.start == windows[p.window].rows) for p in read.parts))

    def request(self, job: str, rank: str, loader: str) -> bytes:
        """A request by a loader of its job, which has this rank."""
        parts = [[p.stream, p.window, p.start, p.stop, int(p.whole)] for p in self.parts]
        return json.dumps([job, rank, loader, self.epoch, self.file, self.group, self.draw, parts]).encode()

    @classmethod
    def from_request(cls, data: bytes) -> tuple[str, str, str, Self]:
        """The digest of the job, rank and loader, and the unit. RemoteError if it is no request."""
        try:
            job, rank, loader, epoch, file, group, draw, parts = _parsed(data)
            unit = cls(_number(epoch), _number(file), _number(group), _number(draw), tuple(
                Part(_number(stream), _number(window), _number(start), _number(stop), bool(_number(whole)))
                for stream, window, start, stop, whole in parts))
        except (TypeError, ValueError):
            raise RemoteError("a request that is none of this version of sluice") from None
        return str(job), str(rank), str(loader), unit

    def check(self, groups: tuple[tuple[int, ...], ...]) -> int:
        """The rows of its row group. RemoteError if the table has no such rows."""
        if self.file >= len(groups) or self.group >= len(groups[self.file]):
            raise RemoteError(f"file {self.file}, row group {self.group}: the table has none")
        rows = groups[self.file][self.group]
        if any(part.start > part.stop or part.stop > rows for part in self.parts):
            raise RemoteError(f"file {self.file}, row group {self.group} has {rows} rows, and others were asked for")
        return rows


def plan_of(plan: RowsPlan) -> dict[str, Any]:
    """What a plan of rows was made with, besides the table."""
    return {name: getattr(plan, name) for name in _PLAN}


def files_digest(files: Iterable[DataFile]) -> str:
    """A digest of the files' own names and sizes, wherever they lie: hosts may have them under different paths."""
    return digest([[file.path.rpartition("/")[2].partition("?")[0], file.bytes] for file in files])


def checksum(batch: pa.RecordBatch) -> int:
    """CRC-32 of all values of a batch."""
    found = 0
    for column in batch.columns:
        for part in (column.offsets, column.values) if pa.types.is_large_list(column.type) else (column,):
            found = crc32(part.to_numpy().data, found)
    return found


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise ValueError(f"{value!r} is no number of a row")
    return value


def _parsed(data: bytes) -> Any:
    if len(data) > MOST_BYTES:
        raise RemoteError(f"a request of {len(data)} bytes, of {MOST_BYTES} at most")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise RemoteError("a request that is no JSON") from None
