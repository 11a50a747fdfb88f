"""Finds the knobs of runs that were killed, for example by the kernel because of their memory: `UnfinishedRuns`.

Each run keeps a file with its present knobs in its registry's folder. The run locks the file, and the kernel frees the
lock however the run ends. A run that ends by itself removes the file. So a file that can be locked belongs to a killed
run, and has the knobs of that moment.
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
    """The runs of one context on this host. If the folder cannot be used, `say` gets one line and the run goes on."""

    def __init__(self, folder: Path, context: str, *, say: Callable[[str], None]) -> None:
        """`context` is the name of a `KnobContext`: the machine and the schema."""
        self._folder = folder / boot_name()
        self._context = context
        self._say = say
        self._file: int | None = None  # This run's file, open and locked while the run lasts.

    def killed(self) -> Knobs | None:
        """Returns the knobs of a killed run, and removes the files of all killed runs of this context.

        If several runs were killed, these are the knobs with the most workers. None: no run was killed."""
        found = [
            knobs
            for path in self._folder.glob(f"{self._context}.*{_SUFFIX}")
            if (knobs := _take_knobs(path)) is not None
        ]
        return max(found, key=lambda knobs: knobs.total_workers, default=None)

    @contextmanager
    def running(self, knobs: Knobs) -> Iterator[None]:
        """Keeps this run's file while the context lasts. The run starts with these knobs."""
        path = self._folder / f"{self._context}.{os.getpid()}-{uuid.uuid4().hex[:8]}{_SUFFIX}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            hidden = path.with_suffix(".new")
            self._file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self.note(knobs)
            hidden.rename(path)  # Other runs see the file only after it is locked.
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
        """Writes the knobs that are in force from now on to this run's file."""
        if self._file is not None:
            # If the disk is full, the file keeps the earlier knobs, or becomes unreadable and is ignored.
            with contextlib.suppress(OSError):
                os.ftruncate(
                    self._file, os.pwrite(self._file, json.dumps(knobs.to_dict()).encode(), 0)
                )


def _take_knobs(path: Path) -> Knobs | None:
    """Returns the knobs in the file of a killed run, and removes the file.

    Returns None if the run still runs, or if the file is damaged."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            return Knobs.from_dict(json.loads(file.read()))
    except (OSError, ValueError, TypeError, AttributeError, KnobError):
        # A lock that another process holds is an OSError.
        return None
