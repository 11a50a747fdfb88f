"""The memory of a program and of all that it starts: a control group where one can be made, else it is watched."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sluice.common.control_groups import MemoryGroup
from sluice.ingest.machine import Machine

_TOPS = ((2, Path("/sys/fs/cgroup")), (1, Path("/sys/fs/cgroup/memory")))
_LIMITS = {1: "memory.limit_in_bytes", 2: "memory.max"}
_KILLS = {1: "memory.oom_control", 2: "memory.events"}
_NUMBERS = itertools.count()
_LOOK_S = 0.1
UNLIMITED = sys.maxsize // 2**12 * 2**12


def control_group(limit: int) -> MemoryGroup | None:
    """A new control group with that limit. None: none can be made here."""
    for version, top in _TOPS:
        folder = top / f"sluice-race-{os.getpid()}-{next(_NUMBERS)}"
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / _LIMITS[version]).exists():
            (folder / _LIMITS[version]).write_text(str(limit))
            return MemoryGroup(version, folder, limit)
        folder.rmdir()
    return None


class Memory:
    """Limits one program, and says how much it used at most and whether it was killed for it."""

    def __init__(self, limit: int = 0) -> None:
        self.limit, self.peak, self.killed = limit or UNLIMITED, 0, False
        self.group = control_group(self.limit)
        self._ended = threading.Event()

    def command(self, words: Sequence[str]) -> list[str]:
        """The command that starts these words inside of the group."""
        if self.group is None:
            return list(words)
        enter = 'echo $$ > "$0"/cgroup.procs && exec "$@"'
        return ["sh", "-c", enter, str(self.group.folder), *words]

    def watch(self, pid: int) -> None:
        self._pid = pid
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self.look()
            if self.group is None and self.peak > self.limit:
                self.killed = True
                with suppress(ProcessLookupError):
                    os.killpg(self._pid, signal.SIGKILL)

    def look(self) -> None:
        used = self.group.charged() if self.group else Machine(pid=self._pid).memory_used()
        self.peak = max(self.peak, used or 0)

    def close(self) -> None:
        """Ends all that is left in the group, and removes it."""
        self._ended.set()
        self._watcher.join()
        if self.group is None:
            return
        folder = self.group.folder
        kills = re.search(r"oom_kill (\d+)", (folder / _KILLS[self.group.version]).read_text())
        self.killed = bool(kills and int(kills[1]))
        while left := (folder / "cgroup.procs").read_text().split():
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            time.sleep(_LOOK_S)
        folder.rmdir()
