"""Writes and reads the folder of a training or bench run.

- config.json: the options of the run
- events.jsonl: decisions, their effects, epochs, checkpoints, faults
- metrics.jsonl: the measurements of the loader and the trainer
- looks.jsonl: what the policy was asked, and its choices (`sluice.agent.report.looks`)
- checkpoints/: the checkpoints of the trainer
- report.html: the page made from the other files
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import threading
import time
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, TextIO

from sluice.agent.report.format import seconds
from sluice.agent.whole_file import replace_file
from sluice.common.errors import UsageError

LOCK = "lock"
FORMAT = 1
_AWAY = 0.1
"""A look whose consumer was away for a larger share of the time does not count."""
MOST_LOOK_BYTES = 100 * 10**6
"""The size of looks.jsonl. A look a second takes some 5 MB an hour."""
_FILES = ("events", "metrics", "looks")
_OF_ONE_RANK = ("loader", "effect")
_RATES = ("rows_per_s", "demand_rows_per_s", "rows_per_s_before", "rows_per_s_after")
_URI = re.compile(r"^([a-z][a-z0-9+.-]+):/+", re.IGNORECASE)
"""Matches the beginning of a URI, also of one that a Path has shortened to one slash."""

Line = Mapping[str, Any]
"""An event, a measurement or a part of one, as JSON."""


class RunError(UsageError):
    """A run folder that cannot be used or read. The message names the path and what to do."""


class RunFolder:
    """A run folder that this process writes.

    When a call returns, its line is completely written. If the disk is full, the call raises OSError and writes
    nothing. The lock is a kernel lock (flock), so a crash frees it. Several threads may write safely."""

    def __init__(self, path: Path, lock: TextIO, last: float, clock: Callable[[], float]) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock_file = lock
        self._last = last
        self._clock = clock
        self.begin()
        self._mutex = threading.Lock()
        self._files = {name: _append_to(path / f"{name}.jsonl") for name in _FILES}

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        config: Line,
        resume: bool = False,
        clock: Callable[[], float] = time.monotonic,
        differences: str = "",
    ) -> RunFolder:
        """Creates the folder, or continues it with `resume`. Its clock then continues from the last line.

        Raises RunError if the folder is in use, is not a run folder, or holds a run and `resume` is not set. The
        message then has the `differences` to that run."""
        path = Path(path)
        check(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
        except OSError as error:
            raise RunError(
                f"{path}: cannot be made ({error.strerror}); choose another folder for the run"
            ) from None
        try:
            os.ftruncate(lock.fileno(), 0)
            os.write(lock.fileno(), f"{os.getpid()}\n".encode())
            if not resume and has_run(path):
                go_on = ", or go on with it by --resume" if config.get("kind") == "train" else ""
                raise RunError(
                    f"{path}: already holds a run{differences}; choose another folder{go_on}"
                )
            if not resume:
                # A run that failed early may have left these files.
                for name in _FILES:
                    (path / f"{name}.jsonl").unlink(missing_ok=True)
            (path / "checkpoints").mkdir(exist_ok=True)
            last = max(
                (
                    float(line.get("at", 0.0))
                    for name in ("events", "metrics")
                    for line in read_lines(path / f"{name}.jsonl")
                ),
                default=0.0,
            )
            replace_file(
                path / "config.json",
                json.dumps({"format": FORMAT, **_plain(config)}, indent=2) + "\n",
            )
            return cls(path, lock, last, clock)
        except OSError as error:
            lock.close()
            raise RunError(
                f"{path}: cannot be written ({error.strerror}); choose another folder for the run"
            ) from None
        except BaseException:
            lock.close()
            raise

    def begin(self) -> None:
        """Counts the time from now on, after the last line of an earlier run, before anything is written."""
        self._begun = self._clock() - self._last

    def event(self, event: Line) -> None:
        """Writes a line in events.jsonl, with `at` (seconds since the start) added."""
        self._write("events", event)

    def metric(self, metric: Line) -> None:
        """Writes a line in metrics.jsonl, with `at` added."""
        self._write("metrics", metric)

    def look(self, look: Line) -> None:
        """Writes a line in looks.jsonl, with `at` added. Raises RunError once that file holds 100 MB."""
        if os.fstat(self._files["looks"].fileno()).st_size > MOST_LOOK_BYTES:
            raise RunError(f"{self.path / 'looks.jsonl'}: holds {MOST_LOOK_BYTES // 10**6} MB")
        self._write("looks", look)

    def _write(self, name: str, line: Line) -> None:
        with self._mutex:
            stamped = {"at": round(self._clock() - self._begun, 3), **_plain(line)}
            _append(self._files[name], json.dumps(stamped) + "\n")

    def close(self) -> None:
        """Frees the folder for others. May be called twice."""
        with self._mutex:
            for file in self._files.values():
                file.close()
            self._lock_file.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run folder to read: finished, interrupted or still being written. Rates are of all ranks together."""

    path: Path
    config: Line
    events: tuple[Line, ...]
    metrics: tuple[Line, ...]
    name: str = "the run"
    """What a sentence calls it: the run, or a part of it."""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Run:
        """Returns the run in a folder. Raises RunError if it cannot be read."""
        path = Path(path)
        if not (path / "config.json").is_file():
            raise RunError(f"{path}: no run folder (it has no config.json)")
        try:
            config = json.loads((path / "config.json").read_text())
        except ValueError as error:
            raise RunError(f"{path / 'config.json'}: is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise RunError(f"{path / 'config.json'}: holds no JSON object")
        if config.get("format", FORMAT) != FORMAT:
            raise RunError(
                f"{path / 'config.json'}: format {config['format']!r} is not {FORMAT}; "
                "read it with the version that wrote it"
            )
        events, metrics = (
            tuple(read_lines(path / f"{name}.jsonl")) for name in ("events", "metrics")
        )
        starts = [event for event in events if event.get("kind") == "start"]
        return cls(
            path=path,
            config=config,
            events=tuple(_of_all(line, config, starts) for line in events),
            metrics=tuple(_of_all(line, config, starts) for line in metrics),
        )

    @property
    def ranks(self) -> int:
        """The number of ranks of a training run. It is 1 for any other run."""
        return _ranks(self.config)

    def parts(self) -> list[Run]:
        """Returns the lines of each start as a run of its own. Each resume begins a new part."""
        starts = [float(event["at"]) for event in self.of("start")]
        if len(starts) < 2:
            return [self]
        return [
            replace(
                self,
                events=_between(self.events, starts, number),
                metrics=_between(self.metrics, starts, number),
                name=f"part {number} of {len(starts)} (from {seconds(start)} on)",
            )
            for number, start in enumerate(starts, 1)
        ]

    def looks(self) -> list[Line]:
        """Returns the looks at the loader without those during an evaluation."""
        return [look for look in self.of("loader") if look.get("away", 0.0) <= _AWAY]

    def of(self, kind: str) -> list[Line]:
        """Returns the events and metrics of one kind, in order of time."""
        return sorted(
            (line for line in (*self.events, *self.metrics) if line.get("kind") == kind),
            key=lambda line: float(line.get("at", 0.0)),
        )


def start_or_resume(folder: str | os.PathLike[str], config: Line) -> RunFolder:
    """Creates the folder of a run, or continues it if it has a run of the same data, split, batch size and seed, on any
    number of ranks. Raises RunError as `RunFolder.create` does, with the settings that differ."""
    before = Run.read(folder).config if (Path(folder) / "config.json").is_file() else {}
    differing = [
        f"{name} is {before.get(name)!r} there and {config.get(name)!r} here"
        for name in ("kind", "data", "split", "batch_size", "seed")
        if before.get(name) != config.get(name)
    ]
    return RunFolder.create(
        folder, config, resume=not differing, differences=f" that differs ({'; '.join(differing)})"
    )


def _between(lines: Sequence[Line], starts: Sequence[float], number: int) -> tuple[Line, ...]:
    """Returns the lines after start `number`. Those before the first start are part of the first."""
    return tuple(line for line in lines if max(1, bisect(starts, line.get("at", 0.0))) == number)


def _ranks(config: Line) -> int:
    ranks = config.get("ranks")
    return ranks if config.get("kind") == "train" and isinstance(ranks, int) else 1


def _of_all(line: Line, config: Line, starts: Sequence[Line]) -> Line:
    """Returns the line with the rates of all ranks at its time. The agent measures the mean rank."""
    if line.get("kind") not in _OF_ONE_RANK:
        return line
    counts = [s["ranks"] for s in starts if "ranks" in s and s["at"] <= line.get("at", 0.0)]
    ranks = _ranks({**config, "ranks": counts[-1]} if counts else config)
    return {**line, **{name: line[name] * ranks for name in _RATES if line.get(name) is not None}}


def check(path: Path) -> None:
    """Raises RunError for a URI, a file, or a folder with other content."""
    if match := _URI.match(str(path)):
        raise RunError(
            f"{match[1]}://{str(path)[match.end() :]}: a run folder cannot be in an object store, because a run "
            "appends to files, locks and renames them; name a folder of this host or of a shared file "
            "system. The table and the registry may be in a bucket. A checkpoint that checkpoints/LATEST "
            "names is complete and can be copied to one"
        )
    if path.exists() and not path.is_dir():
        raise RunError(f"{path}: is a file; choose a folder for the run")
    held = {entry.name for entry in path.iterdir()} if path.exists() else set()
    if held and not held & {LOCK, "config.json"}:
        raise RunError(
            f"{path}: is not empty and no run folder (it holds {sorted(held)[0]!r}); choose another"
        )


def check_unused(path: Path) -> None:
    """Raises RunError if a process writes in this folder."""
    if (path / LOCK).exists():
        _lock(path).close()


def has_run(path: Path) -> bool:
    """Returns whether the run has measured or saved anything. If not, another run may use the folder."""
    return any((path / "checkpoints").glob("*")) or bool(read_lines(path / "metrics.jsonl"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a JSON lines file, or [] if there is no file. An incomplete last line is skipped.

    Any other line that is not an object raises RunError with its number."""
    if not path.exists():
        return []
    whole, _, _torn = path.read_text(errors="replace").rpartition("\n")
    read = []
    for number, text in enumerate(whole.splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            raise RunError(f"{path}, line {number}: is no JSON object: {text[:60]!r}")
        read.append(line)
    return read


def _lock(path: Path) -> TextIO:
    """Locks the folder and returns the open lock file. Raises RunError if another process has it."""
    file = open(path / LOCK, "a+", encoding="ascii")  # noqa: SIM115  held open for as long as the run lasts
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise RunError(
            f"{path}: in use by process {holder}; wait for it or choose another folder"
        ) from None
    return file


def _append_to(path: Path) -> FileIO:
    """Opens a file for appending. Removes an incomplete last line first."""
    if path.exists():
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)
    return FileIO(path, "a")


def _append(file: FileIO, line: str) -> None:
    """Writes the whole line, or raises OSError and writes nothing."""
    data, before = line.encode(), os.fstat(file.fileno()).st_size
    try:
        while data:
            data = data[file.write(data) :]
    except OSError as error:
        os.ftruncate(file.fileno(), before)
        raise OSError(error.errno, error.strerror, str(file.name)) from None


def _plain(value: Any) -> Any:
    """Returns a value for strict JSON. Infinities and NaN become null. Paths and other objects become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()  # numpy's numbers
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
