"""Limits the cores of this process and its children, to inject a fault: `CoreShare`. The ranks of a host share the
remaining cores.

It uses the quota of a new control group if it can make one (version 1 or 2, as root). Otherwise it uses affinity, which
cannot allow less than one core.
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
        """All processes of one `launcher` (a process id) share the cores."""
        self._machine = Machine()
        self._groups = groups
        self._launcher = launcher
        self._group: Path | None = None
        self._cores: float | None = None
        self._affinity = os.sched_getaffinity(0)

    def set(self, cores: float) -> str:
        """Limits the cores. Returns a text that says what was done."""
        before, self._cores = self._machine.cores() if self._cores is None else self._cores, cores
        if self._quota(cores):
            return f"a quota of {_describe_cores(cores)} instead of {before:g}"
        kept = set(sorted(self._affinity)[: max(1, round(cores))])
        _pin(self._machine.tree(), kept)
        return f"{_describe_cores(len(kept))} instead of {before:g}"

    def restore(self) -> None:
        """Removes the limit."""
        _pin(self._machine.tree(), self._affinity)
        if self._group is not None:
            for pid in self._machine.tree():
                with contextlib.suppress(OSError):
                    (self._group.parent / "cgroup.procs").write_text(str(pid))
            for _ in range(_TRIES):  # a process that is just ending is still in the group
                try:
                    self._group.rmdir()
                    break
                except OSError as error:
                    if error.errno != errno.EBUSY or self._others_are_in(self._group):
                        break
                    time.sleep(_WAIT_S)

    def _others_are_in(self, group: Path) -> bool:
        """Whether other ranks of the launcher still need the group. The last rank removes it."""
        with contextlib.suppress(OSError):
            return self._launcher is not None and bool((group / "cgroup.procs").read_text().strip())
        return False

    def _quota(self, cores: float) -> bool:
        """Sets the quota of a group of our own. Returns whether that worked. In version 2, only leaf groups and the
        root may hold processes, so the new group is made below the root."""
        if self._group is None:
            self._group = self._make_group()
        if self._group is None:
            return False
        quota = round(cores * _PERIOD_US)
        if (self._group / "cpu.max").exists():
            (self._group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        else:
            (self._group / "cpu.cfs_quota_us").write_text(str(quota))
        return True

    def _make_group(self) -> Path | None:
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


def _describe_cores(cores: float) -> str:
    return f"{cores:g} {'core' if cores == 1 else 'cores'}"


def _pin(pids: Iterable[int], cores: set[int]) -> None:
    """Pins all threads of these processes. Ignores processes that have ended."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            for thread in psutil.Process(pid).threads():
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(thread.id, cores)
