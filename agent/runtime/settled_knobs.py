"""Keeps what a run has learned for the next one: `Registry`, one small JSON file per machine and schema.

It lives in a folder, or at any URI that pyarrow knows (`s3://…`, `file://…`), for instance next to the table. A file
appears in one step, so that two jobs may write at once: the last one wins. Files that are damaged, foreign or newer
are ignored, and a place that cannot be written is no reason to stop: `say` gets one line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.machine import Machine, cache_folder

FORMAT = 3
_SUFFIX = ".sluice.json"
_MOST_BYTES = 64 * 1024  # a larger file is not one of ours
_MOST_ENTRIES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobContext:
    """The place that a choice of knobs depends on: the machine, the schema, the size of rows."""

    machine: str
    schema: str
    row_bytes: float

    @property
    def name(self) -> str:
        """The same for all runs on such a machine and schema."""
        return hashlib.sha256(json.dumps([self.machine, self.schema]).encode()).hexdigest()[:32]

    def __post_init__(self) -> None:
        _positive("row_bytes", self.row_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryEntry:
    """A settled choice, where it was settled, and what was learned of the costs there."""

    context: KnobContext
    knobs: Knobs
    rows_per_s: float
    stages: Mapping[str, float] = field(default_factory=dict)
    """Stage → useful seconds a row."""
    learned: Mapping[str, Any] | None = None
    """What the policy knew of the stages, as its `learned` returns it; None if it learned that elsewhere, or
    nothing."""

    def __post_init__(self) -> None:
        _positive("rows_per_s", self.rows_per_s)
        for name, cost in self.stages.items():
            _positive(f"cost of {name}", cost)

    def scaled(self, other: KnobContext) -> RegistryEntry:
        """The entry for rows of another size: buffers and the cost of a row scale with it. All stages change alike, so
        workers stay."""
        size_ratio = other.row_bytes / self.context.row_bytes
        sizes = {
            n: max(1, round(size_ratio * getattr(self.knobs, n)))
            for n in ("read_ahead_bytes", "prefetch_bytes")
        }
        return replace(
            self,
            context=other,
            rows_per_s=self.rows_per_s / size_ratio,
            learned=None,
            knobs=replace(self.knobs, **sizes),
        )

    def distance(self, other: KnobContext) -> float:
        """How different another place is from this entry's; 0: they are alike."""
        return abs(math.log(other.row_bytes / self.context.row_bytes))

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            **asdict(self.context),
            "knobs": self.knobs.to_dict(),
            "rows_per_s": self.rows_per_s,
            "stages_s": dict(self.stages),
            "learned": None if self.learned is None else dict(self.learned),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RegistryEntry:
        context = KnobContext(
            machine=str(values["machine"]),
            schema=str(values["schema"]),
            row_bytes=values["row_bytes"],
        )
        return cls(
            context=context,
            knobs=Knobs.from_dict(values["knobs"]),
            rows_per_s=values["rows_per_s"],
            stages=dict(values["stages_s"]),
            learned=None if values["learned"] is None else dict(values["learned"]),
        )


class Registry:
    """The stored entries: call `recall` before a run, and `remember` after it."""

    def __init__(
        self,
        place: str | os.PathLike[str] | None = None,
        *,
        say: Callable[[str], None] = lambda line: None,
        most: int = _MOST_ENTRIES,
    ) -> None:
        """`place` is a folder or a URI; by default a folder in the user's cache."""
        self.place = str(cache_folder() / "registry" if place is None else place)
        self._say, self._most = say, most

    @property
    def local_folder(self) -> Path:
        """A local folder of this host: the registry's, if that is a folder."""
        return cache_folder() / "registry" if "://" in self.place else Path(self.place)

    def recall(self, context: KnobContext, limits: Limits) -> RegistryEntry | None:
        """The choice settled for this place. For an unknown schema, it is that of the nearest one on this machine,
        scaled by bytes a row. It is kept within `limits`; None if nothing is known."""
        entries = [e for e in self._entries() if e.context.machine == context.machine]
        if not entries:
            return None
        best = min(entries, key=lambda e: (e.context.schema != context.schema, e.distance(context)))
        best = best if best.context.schema == context.schema else best.scaled(context)
        return replace(best, knobs=limits.clamp(best.knobs))

    def remember(self, entry: RegistryEntry) -> bool:
        """Writes an entry; returns whether that worked."""
        try:
            system, folder = self._open()
            system.create_dir(folder, recursive=True)
            path, temporary = f"{folder}/{_name(entry)}", f"{folder}/.{uuid.uuid4().hex}"
            try:
                with system.open_output_stream(temporary) as stream:
                    stream.write(json.dumps(entry.to_dict(), indent=1).encode())
                system.move(temporary, path)
            except OSError:
                with contextlib.suppress(OSError):
                    system.delete_file(temporary)
                raise
            self._trim(system, folder)
        except (OSError, ValueError) as error:  # pyarrow's errors are among these
            self._say(f"the registry at {self.place} could not be written: {_line(error)}")
            return False
        return True

    def _entries(self) -> Iterator[RegistryEntry]:
        try:
            system, folder = self._open()
            files = _files(system, folder)
        except (OSError, ValueError) as error:
            self._say(f"the registry at {self.place} could not be read: {_line(error)}")
            return
        for info in files:
            try:
                yield _read(system, info)
            except FileNotFoundError:  # another job has removed it to make room
                continue
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                self._say(f"{info.path} is ignored: {_line(error)}")

    def _trim(self, system: Any, folder: str) -> None:
        """Removes the oldest files, unless another job has done so already."""
        files = sorted(_files(system, folder), key=lambda info: info.mtime_ns or 0)
        for info in files[: max(0, len(files) - self._most)]:
            with contextlib.suppress(FileNotFoundError):
                system.delete_file(info.path)

    def _open(self) -> tuple[Any, str]:
        from pyarrow import fs

        if "://" not in self.place:
            return fs.LocalFileSystem(), str(Path(self.place).absolute())
        system, folder = fs.FileSystem.from_uri(self.place)
        return system, folder.rstrip("/")


def machine_fingerprint(machine: Machine) -> str:
    """A name for machines of one kind: the processor's model and the cores that may be used."""
    return f"{machine.model()}, {machine.cores():g} cores"


def _name(entry: RegistryEntry) -> str:
    return entry.context.name + _SUFFIX


def _files(system: Any, folder: str) -> list[Any]:
    from pyarrow import fs

    return [
        info
        for info in system.get_file_info(fs.FileSelector(folder, allow_not_found=True))
        if info.is_file and info.path.endswith(_SUFFIX)
    ]


def _read(system: Any, info: Any) -> RegistryEntry:
    if (info.size or 0) > _MOST_BYTES:
        raise ValueError(f"{info.size} bytes are too many")
    with system.open_input_stream(info.path) as stream:
        values = json.loads(stream.read())
    if values["format"] != FORMAT:
        raise ValueError(f"format {values['format']!r} is not {FORMAT}")
    entry = RegistryEntry.from_dict(values)
    if not info.path.endswith(_name(entry)):
        raise ValueError("its name does not fit what it holds")
    return entry


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name}: {value!r} is not a positive number")
