"""Keeps what a run has learned for the next run: `SavedState`, in a file of its own or in a `Registry`.

A state is a small JSON file. A registry has one for each machine and schema. It is a folder, or any URI that pyarrow
knows (`s3://…`, `file://…`), for example next to the table. A file appears in one step, so two runs may write at once,
and the last one wins. Damaged, foreign and newer files are ignored. If the place cannot be written, `say` gets one line
and the run goes on.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sluice.agent.whole_file import replace_file
from sluice.common import checked_json
from sluice.common.number_checks import is_number
from sluice.common.stores import Place
from sluice.common.suggest import BY_WAY
from sluice.ingest.knobs import KnobError, Knobs, Limits
from sluice.ingest.machine import Machine, cache_folder

_OBJECT_STORES = ("s3", "gcs", "abfs")
"""The file systems in which a file appears when it is complete."""
FORMAT = 4
_SUFFIX = ".sluice.json"
_MOST_BYTES = 64 * 1024  # A larger file is not an entry of a registry.
_MOST_ENTRIES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobContext:
    """What the best knobs depend on: the machine, the schema and the size of rows."""

    machine: str
    schema: str
    row_bytes: float

    @property
    def name(self) -> str:
        """A name that is the same for all runs on such a machine and schema."""
        return hashlib.sha256(json.dumps([self.machine, self.schema]).encode()).hexdigest()[:32]

    def __post_init__(self) -> None:
        _check_positive("row_bytes", self.row_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The best knobs of a run, their context, and what the policy learned about costs."""

    context: KnobContext
    knobs: Knobs
    rows_per_s: float
    policy: str = ""
    """The name of the policy that chose them."""
    learned: Mapping[str, Any] | None = None
    """The result of the policy's `learned`. None if it learned nothing, or in another context."""

    def __post_init__(self) -> None:
        _check_positive("rows_per_s", self.rows_per_s)

    def scaled(self, other: KnobContext) -> SavedState:
        """Returns the entry for rows of another size.

        Buffers and the cost of a row scale with the size. Workers stay, because all stages change by the same ratio."""
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
        """Returns how much the row size of another context differs from this entry's. 0: not at all."""
        return abs(math.log(other.row_bytes / self.context.row_bytes))

    @classmethod
    def parse(cls, text: str | bytes) -> SavedState:
        """Returns the state of a file. Raises ValueError, KeyError or TypeError if it is none."""
        values, _ = checked_json.read(text)
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']!r} is not {FORMAT}. {BY_WAY}")
        return cls(
            context=KnobContext(
                machine=str(values["machine"]),
                schema=str(values["schema"]),
                row_bytes=values["row_bytes"],
            ),
            knobs=Knobs.from_dict(values["knobs"]),
            rows_per_s=values["rows_per_s"],
            policy=values["policy"],
            learned=values["learned"],
        )

    @property
    def text(self) -> str:
        """The state in the form that `parse` reads."""
        values = {
            "format": FORMAT,
            **asdict(self.context),
            "knobs": self.knobs.to_dict(),
            "rows_per_s": self.rows_per_s,
            "policy": self.policy,
            "learned": self.learned,
        }
        return checked_json.write(values)

    @classmethod
    def load(cls, path: str, limits: Limits) -> SavedState:
        """Returns the state of a file. Raises KnobError, which names the file, also for knobs outside `limits`."""
        try:
            state = cls.parse(Path(path).read_bytes())
            state = replace(state, knobs=limits.check(state.knobs))
        except OSError as error:
            raise KnobError(f"{path}: the knobs cannot be read: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise KnobError(f"{path}: is no file of --save-knobs: {_one_line(error)}") from None
        return state

    def save(self, path: str) -> None:
        """Writes the state to a file in one step."""
        replace_file(Path(path), self.text + "\n")


def check_writable(path: str) -> None:
    """Raises KnobError if `SavedState.save` would fail. Leaves no file behind."""
    try:
        with tempfile.TemporaryFile(dir=Path(path).parent):
            if Path(path).is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        raise KnobError(
            f"{path}: the knobs cannot be written: {error.strerror}; choose another file"
        ) from None


def is_file_name(text: str) -> bool:
    """Returns whether the value of `--knobs` is the name of a file and not a list of settings."""
    return text.endswith((".json", ".toml")) or ("=" not in text and Path(text).is_file())


class Registry:
    """The stored entries. Call `recall` before a run, and `remember` after it."""

    def __init__(
        self,
        place: str | os.PathLike[str] | None = None,
        *,
        say: Callable[[str], None] = lambda line: None,
        most: int = _MOST_ENTRIES,
    ) -> None:
        """`place` is a folder or a URI. The default is a folder in the user's cache."""
        self.place = str(cache_folder() / "registry" if place is None else place)
        self._say = say
        self._most = most

    def recall(self, context: KnobContext, limits: Limits) -> SavedState | None:
        """Returns the entry for this context, with knobs within `limits`. None if the machine is unknown.

        For an unknown schema, it is the entry with the nearest row size on this machine, scaled to this row size."""
        entries = [e for e in self._entries() if e.context.machine == context.machine]
        if not entries:
            return None
        best = min(entries, key=lambda e: (e.context.schema != context.schema, e.distance(context)))
        best = best if best.context.schema == context.schema else best.scaled(context)
        return replace(best, knobs=limits.clamp(best.knobs))

    def remember(self, entry: SavedState) -> bool:
        """Writes an entry. Returns whether that worked."""
        try:
            system, folder = self._open()
            _write(system, folder, _file_name(entry), entry.text.encode())
        except (OSError, ValueError) as error:  # These include pyarrow's errors.
            self._say(f"the registry at {self.place} could not be written: {_one_line(error)}")
            return False
        with contextlib.suppress(OSError):  # the next run removes old files
            self._trim(system, folder)
        return True

    def _entries(self) -> Iterator[SavedState]:
        """Yields all readable entries."""
        try:
            system, folder = self._open()
            files = _files(system, folder)
        except (OSError, ValueError) as error:
            self._say(f"the registry at {self.place} could not be read: {_one_line(error)}")
            return
        for info in files:
            try:
                yield _read(system, info)
            except FileNotFoundError:
                # Another run has removed the file, because there were too many.
                continue
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                self._say(f"{info.path} is ignored: {_one_line(error)}")

    def _trim(self, system: Any, folder: str) -> None:
        """Removes the oldest files if there are too many. Another run may do so at the same time."""
        files = sorted(_files(system, folder), key=lambda info: info.mtime_ns or 0)
        for info in files[: max(0, len(files) - self._most)]:
            with contextlib.suppress(FileNotFoundError):
                system.delete_file(info.path)

    def _open(self) -> tuple[Any, str]:
        """Returns the file system of the place, and the folder there."""
        system, folder = Place.of(self.place).files()
        return system, folder.rstrip("/")


def machine_fingerprint(machine: Machine) -> str:
    """Returns a name for machines of one kind: the processor's model and the cores that may be used."""
    return f"{machine.model()}, {machine.cores():g} cores"


def _file_name(entry: SavedState) -> str:
    return entry.context.name + _SUFFIX


def _files(system: Any, folder: str) -> list[Any]:
    from pyarrow import fs

    return [
        info
        for info in system.get_file_info(fs.FileSelector(folder, allow_not_found=True))
        if info.is_file and info.path.endswith(_SUFFIX)
    ]


def _write(system: Any, folder: str, name: str, content: bytes) -> None:
    """Writes a file that others see complete or not at all."""
    path = f"{folder}/{name}"
    if system.type_name in _OBJECT_STORES:
        with system.open_output_stream(path) as stream:
            stream.write(content)
        return
    system.create_dir(folder, recursive=True)
    temporary = f"{folder}/.{uuid.uuid4().hex}"
    try:
        with system.open_output_stream(temporary) as stream:
            stream.write(content)
        system.move(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            system.delete_file(temporary)
        raise


def _read(system: Any, info: Any) -> SavedState:
    """Returns the entry of a file. Raises ValueError if the file is not an entry."""
    if (info.size or 0) > _MOST_BYTES:
        raise ValueError(f"{info.size} bytes are too many")
    with system.open_input_stream(info.path) as stream:
        entry = SavedState.parse(stream.read())
    if not info.path.endswith(_file_name(entry)):
        raise ValueError("its name does not fit what it holds")
    return entry


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _check_positive(name: str, value: Any) -> None:
    if not is_number(value) or not value:
        raise ValueError(f"{name}: {value!r} is not a positive number")
