"""Gives this process and its children a smaller share of the cores, on purpose: `CoreShare`. The ranks of a host share
what is left.

This is done by a control group's quota where one can be made (version 2 or 1; it takes root), otherwise by affinity,
which can allow no less than one core.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from sluice.ingest.machine import Machine

_PERIOD_US = 100_000
_TRIES, _WAIT_S = 20, 0.05


class CoreShare:
    def __init__(
        self, groups: Path = Path("/sys/fs/cgroup"), *, launcher: int | None = None
    ) -> None:
        """Processes of one `launcher` (its pid) have the cores together."""
        self._machine = Machine()
        self._groups = groups
        self._launcher = launcher
        self._group: Path | None = None
        self._cores: float | None = None
        self._affinity = os.sched_getaffinity(0)

    def set(self, cores: float) -> str:
        """Limits the cores, and says in words what was done."""
        before, self._cores = self._machine.cores() if self._cores is None else self._cores, cores
        if self._quota(cores):
            return f"a quota of {_counted(cores)} instead of {before:g}"
        kept = set(sorted(self._affinity)[: max(1, round(cores))])
        _pin(self._machine.tree(), kept)
        return f"{_counted(len(kept))} instead of {before:g}"

    def restore(self) -> None:
        """Gives back the cores that were there before."""
        _pin(self._machine.tree(), self._affinity)
        if self._group is not None:
            for pid in self._machine.tree():
                with contextlib.suppress(OSError):
                    (self._group.parent / "cgroup.procs").write_text(str(pid))
            for _ in range(_TRIES):  # a process that ends at this moment is still in the group
                try:
                    self._group.rmdir()
                    break
                except OSError as error:
                    if error.errno != errno.EBUSY or self._others_are_in(self._group):
                        break
                    time.sleep(_WAIT_S)

    def _others_are_in(self, group: Path) -> bool:
        """Whether a rank of the same launcher still needs the group; the last one removes it."""
        with contextlib.suppress(OSError):
            return self._launcher is not None and bool((group / "cgroup.procs").read_text().strip())
        return False

    def _quota(self, cores: float) -> bool:
        """Sets the quota of a group of our own, and says whether that worked. Processes in a group's middle are not
        allowed in version 2, so only the root group, or version 1, will do."""
        if self._group is None:
            self._group = self._made()
        if self._group is None:
            return False
        quota = round(cores * _PERIOD_US)
        if (self._group / "cpu.max").exists():
            (self._group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        else:
            (self._group / "cpu.cfs_quota_us").write_text(str(quota))
        return True

    def _made(self) -> Path | None:
        for parent, limit in (
            (self._groups, "cpu.max"),
            (self._groups / "cpu", "cpu.cfs_quota_us"),
        ):
            group = parent / f"sluice-{self._launcher or os.getpid()}"
            try:
                group.mkdir(exist_ok=self._launcher is not None)
            except OSError:
                continue
            try:
                if not (group / limit).exists():
                    raise OSError(f"{group} has no {limit}")
                for pid in self._machine.tree():
                    (group / "cgroup.procs").write_text(str(pid))
            except OSError:
                with contextlib.suppress(OSError):
                    group.rmdir()
                continue
            return group
        return None


def _counted(cores: float) -> str:
    return f"{cores:g} {'core' if cores == 1 else 'cores'}"


def _pin(pids: Iterable[int], cores: set[int]) -> None:
    """Pins all threads of these processes; some may have ended in the meantime."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            for thread in psutil.Process(pid).threads():
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(thread.id, cores)
