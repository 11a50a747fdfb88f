"""What is asked of a worker, by its address: a `RemoteJob` (which table and order) and a `Unit`, one read of an epoch.

A unit's rows follow from its address alone, so it does not matter who makes them, nor how often. A unit is one read,
not the windows that share reads: those may chain, and a read that was done here and one that was done elsewhere can
meet in one window. Both are JSON on the wire; nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from importlib import metadata
from typing import Any, ClassVar, NamedTuple, Self

import pyarrow as pa
from zlib_ng.zlib_ng import crc32

from sluice.common.extras import DISTRIBUTION
from sluice.etl.schema import digest
from sluice.ingest.columns import ColumnError
from sluice.ingest.errors import LoadingError
from sluice.ingest.read.reader import SourceError
from sluice.ingest.stages.shuffle import ReadTask


class RemoteError(LoadingError):
    """What workers elsewhere cannot do, or did wrong: the message names the worker and what would do."""


class WrongAnswer(Exception):
    """What came is not what was asked for, or not what was sent: the message says in what."""


KINDS: Mapping[str, type[Exception]] = {
    "source": SourceError,
    "column": ColumnError,
    "damaged": WrongAnswer,
}
"""The errors that cross as they are; any other one comes as a RemoteError."""


@cache  # it is part of every call, and read from a file
def package() -> str:
    return metadata.version(DISTRIBUTION)


def check_package(given: Any) -> None:
    """RemoteError, if the other side has another version."""
    if given != package():
        raise RemoteError(
            f"the worker has sluice {package()}, the loader {given}: install one version on both"
        )


@dataclass(frozen=True, kw_only=True)
class RemoteJob:
    """Which rows a loader reads, in which order and as what. A worker that finds anything else than this refuses it.
    Digests stand for the files (names, sizes, and what is known of their content), the plan of rows with all row groups
    (`order`), and the operators that make columns of what is stored (`made`). Only plain Parquet has `roles`: a feature
    table says them itself."""

    package: str
    version: str
    files: str
    split: str
    reader: str
    sample: str | None
    roles: Mapping[str, list[str]]
    hash: Mapping[str, int]
    plan: Mapping[str, Any]
    order: str
    columns: Mapping[str, str]
    """Each column, and the type of its numbers, or of the ids in its bags, in a batch."""
    bags: Mapping[str, float]
    fill: Mapping[str, float]
    made: str

    @cached_property
    def digest(self) -> str:
        return digest(asdict(self))

    @property
    def schema(self) -> pa.Schema:
        """That of every batch of it."""
        kinds = {name: pa.type_for_alias(kind) for name, kind in self.columns.items()}
        return pa.schema(
            [
                (name, pa.large_list(kind) if name in self.bags else kind)
                for name, kind in kinds.items()
            ]
        )

    @cached_property
    def json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of(cls, given: Any) -> Self:
        """A job as another program sent it. RemoteError if it is none of this version's."""
        if isinstance(given, dict):
            check_package(given.get("package"))
        if not isinstance(given, dict) or given.keys() != {field.name for field in fields(cls)}:
            raise RemoteError(
                "a job that lacks fields, or has unknown ones: install one version of sluice on both "
                "sides"
            )
        return cls(**given)


class Part(NamedTuple):
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
        return json.dumps([self.epoch, self.file, self.group, self.draw, self.parts])

    @classmethod
    def of(cls, task: ReadTask) -> Self:
        windows, read = task.schedule.windows, task.read
        return cls(
            task.schedule.epoch,
            read.file,
            read.group,
            read.draw,
            tuple(
                Part(
                    windows[p.window].stream,
                    windows[p.window].number,
                    p.start,
                    p.stop,
                    p.stop - p.start == windows[p.window].rows,
                )
                for p in read.parts
            ),
        )

    def request(self, job: RemoteJob, rank: str, loader: str) -> bytes:
        """A request by a loader of a job, which has this rank. Each holds the job: a worker that has just come, or has
        forgotten it, opens it."""
        return b"\n".join((job.json, json.dumps([rank, loader]).encode(), self.key.encode()))

    @classmethod
    def from_request(cls, data: bytes) -> tuple[RemoteJob, str, str, Self]:
        """The job, rank, loader and unit. RemoteError if it is no request."""
        try:
            job, (rank, loader), (*address, parts) = map(json.loads, data.split(b"\n"))
            epoch, file, group, draw = map(_number, address)
            unit = cls(
                epoch,
                file,
                group,
                draw,
                tuple(
                    Part(
                        _number(stream), _number(window), _number(start), _number(stop), bool(whole)
                    )
                    for stream, window, start, stop, whole in parts
                ),
            )
        except (TypeError, ValueError, RecursionError):
            raise RemoteError("a request that is none of this version of sluice") from None
        return RemoteJob.of(job), str(rank), str(loader), unit


def checksum(batch: pa.RecordBatch, job: RemoteJob, unit: Unit) -> int:
    """CRC-32 of a unit of a job, and of all values of the batch that was made of it, which has no empty ones. An answer
    to another request has another one."""
    found = crc32(f"{job.digest} {unit.key}".encode())
    for column in batch.columns:
        for part in column.buffers():
            found = crc32(part, found) if part is not None else found
    return found


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise ValueError(f"{value!r} is no number of a row")
    return value
