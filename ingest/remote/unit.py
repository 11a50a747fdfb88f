"""A request to a remote worker: a `RemoteJob` (the table and the order of its rows) and a `Unit` (one read).

Job and unit together determine the rows, so any worker can make them, any number of times. A unit is one read and not
one window. A window may combine reads that were done here with reads of remote workers. Both are sent as JSON, and
nothing is unpickled.
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
from sluice.ingest.errors import LoadingError, SourceError
from sluice.ingest.flow.decoded import ReadTask


class RemoteError(LoadingError):
    """Something that remote workers cannot do, or did wrong. The message names the worker and says what to do."""


class WrongAnswer(Exception):
    """An answer is not what was requested, or was damaged on its way. The message says how."""


KINDS: Mapping[str, type[Exception]] = {
    "source": SourceError,
    "column": ColumnError,
    "damaged": WrongAnswer,
}
"""The errors that keep their type when they are sent. All others become a RemoteError."""


@cache  # every request holds it, and it is read from a file
def package() -> str:
    return metadata.version(DISTRIBUTION)


def check_package(given: Any) -> None:
    """Raises RemoteError if the other side has another version of sluice."""
    if given != package():
        raise RemoteError(
            f"the worker has sluice {package()}, the loader {given}; install the same version on both"
        )


@dataclass(frozen=True, kw_only=True)
class RemoteJob:
    """Which rows a loader reads, in which order, and in which columns. A worker refuses a job that differs from what it
    finds itself.

    Three fields are digests: `files` (names, sizes and known content), `plan` (with its row groups) and `made` (the
    operators that make columns). Only plain Parquet has `roles`, because a feature table holds its own."""

    package: str
    version: str
    files: str
    split: str
    roles: Mapping[str, list[str]]
    hash: Mapping[str, int]
    batch_size: int
    seed: int
    order: Mapping[str, Any]
    plan: str
    columns: Mapping[str, str]
    """Each column, and the type in a batch of its numbers or of the ids in its bags."""
    bags: Mapping[str, float]
    fill: Mapping[str, float]
    history: Mapping[str, Any] | None
    made: str

    @cached_property
    def digest(self) -> str:
        return digest(asdict(self))

    @cached_property
    def kinds(self) -> Mapping[str, pa.DataType]:
        """The type of each column's numbers, or of the ids in its bags."""
        return {name: pa.type_for_alias(kind) for name, kind in self.columns.items()}

    @cached_property
    def schema(self) -> pa.Schema:
        """The schema of every batch of the job."""
        return pa.schema(
            [
                (name, pa.large_list(kind) if name in self.bags else kind)
                for name, kind in self.kinds.items()
            ]
        )

    @cached_property
    def json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of(cls, given: Any) -> Self:
        """Parses a job that another program sent. RemoteError if it does not fit this version of sluice."""
        if isinstance(given, dict):
            check_package(given.get("package"))
        if not isinstance(given, dict) or given.keys() != {field.name for field in fields(cls)}:
            raise RemoteError(
                "a job lacks fields or has unknown ones; install the same version of sluice on both "
                "sides"
            )
        return cls(**given)


class Part(NamedTuple):
    """The rows `start` to `stop` of a row group, which all lie in one window. `full`: they are all rows of the
    window."""

    stream: int
    window: int
    start: int
    stop: int
    full: bool


@dataclass(frozen=True, slots=True)
class Unit:
    """One read of an epoch."""

    counted: ClassVar[str] = "units"
    kind: ClassVar[str] = "read"
    epoch: int
    file: int
    group: int
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        return sum(part.stop - part.start for part in self.parts)

    @property
    def description(self) -> str:
        return f"file {self.file}, row group {self.group}"

    @property
    def key(self) -> str:
        """The unit as a text."""
        return json.dumps([self.epoch, self.file, self.group, self.parts])

    @classmethod
    def of(cls, task: ReadTask) -> Self:
        windows, read = task.schedule.windows, task.read
        return cls(
            task.schedule.epoch,
            read.file,
            read.group,
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

    def sum(self, job: RemoteJob) -> int:
        """CRC-32 of the job and the unit. The answer to another request has another one."""
        return crc32(f"{job.digest} {self.key}".encode())

    def request(self, job: RemoteJob) -> bytes:
        """Encodes a request. Each request holds the job, so that a new worker, or one that has forgotten the job, can
        open it."""
        return b"\n".join((job.json, self.key.encode()))

    @classmethod
    def from_request(cls, data: bytes) -> tuple[RemoteJob, Self]:
        """Decodes a request into its job and unit. RemoteError if it is not a valid request."""
        try:
            job, (*address, parts) = map(json.loads, data.split(b"\n"))
            epoch, file, group = map(_number, address)
            unit = cls(
                epoch,
                file,
                group,
                tuple(Part._make((*map(_number, rows), bool(full))) for *rows, full in parts),
            )
        except (TypeError, ValueError, RecursionError):
            raise RemoteError(
                "a request that this version of sluice cannot read; install the same version on both sides"
            ) from None
        return RemoteJob.of(job), unit


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise ValueError(f"{value!r} is not a row's number")
    return value
