"""Finds runs that ended without a word, as those do that the kernel kills for memory: `UnfinishedRuns`.

Each run keeps a file with the knobs in force next to its registry. It is locked by the run, and the kernel frees that
lock however the run ends; a run that ends by itself removes the file. So a file of the same place that can be locked
tells which knobs were in force when an earlier run was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sluice.agent.runtime.core_sharing import boot_name
from sluice.ingest.knobs import KnobError, Knobs

_SUFFIX = ".running.json"


class UnfinishedRuns:
    """The runs of one place on this host. A folder that cannot be used is no reason to stop: `say` gets one line."""

    def __init__(self, folder: Path, place: str, *, say: Callable[[str], None]) -> None:
        """`place` names what a choice of knobs depends on, as the registry's files do."""
        self._folder = folder / boot_name()
        self._place = place
        self._say = say
        self._file: int | None = None  # this run's, open and locked while the run lasts

    def killed(self) -> Knobs | None:
        """The knobs in force when an earlier run of this place was killed: of several those with the most workers.
        Their files are removed."""
        left = [
            knobs
            for path in self._folder.glob(f"{self._place}.*{_SUFFIX}")
            if (knobs := _left(path)) is not None
        ]
        return max(left, key=lambda knobs: knobs.total_workers, default=None)

    @contextmanager
    def running(self, knobs: Knobs) -> Iterator[None]:
        """A context as long as the run, which begins with these knobs."""
        path = self._folder / f"{self._place}.{os.getpid()}-{uuid.uuid4().hex[:8]}{_SUFFIX}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            hidden = path.with_suffix(".new")
            self._file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self.note(knobs)
            hidden.rename(path)  # seen by others only once it is locked
        except OSError as error:
            self._say(
                f"with which knobs a run is killed is not noted, as {self._folder} cannot be used: {error}"
            )
        try:
            yield
        finally:
            if self._file is not None:
                with contextlib.suppress(OSError):
                    path.unlink()
                os.close(self._file)
                self._file = None

    def note(self, knobs: Knobs) -> None:
        """Notes the knobs that are in force from now on."""
        if self._file is not None:
            with contextlib.suppress(
                OSError
            ):  # a full disk: what was noted before stays, or nothing readable
                os.ftruncate(
                    self._file, os.pwrite(self._file, json.dumps(knobs.to_dict()).encode(), 0)
                )


def _left(path: Path) -> Knobs | None:
    """The knobs in a file whose run is dead, and the file is removed; None if the run lives, or if the file is
    damaged."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            return Knobs.from_dict(json.loads(file.read()))
    except (
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        KnobError,
    ):  # a lock that is held is an OSError, too
        return None
