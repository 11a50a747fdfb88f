"""The limits that control groups and the affinity set for a process: `ControlGroups`. psutil does not read control
groups, and Spark's workers, which import this file, may lack psutil.

Groups of version 1 and 2 are read on the whole path from the process's own group to the root. The lowest limit on the
path is in force. `root` is `/`. Tests put invented /proc and /sys folders there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

UNLIMITED = 2**60  # version 1 writes a number near 2**63 for "no limit"


@dataclass(frozen=True, slots=True)
class Groups:
    """The directories of a process's control group for one controller, from the group's own up to the root."""

    version: int
    path: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group with a memory limit. The kernel kills a process when the memory that it charges to the group
    reaches the limit."""

    version: int
    folder: Path
    limit: int

    def charged(self) -> int | None:
        """Returns the bytes that the kernel charges to the group and cannot take back: the memory of all its processes,
        the kernel's own memory for them (page tables, sockets), files in memory (tmpfs), and pages that are not yet on
        disk. Clean page cache does not count. None: the kernel does not report it."""
        text = text_of(
            self.folder / ("memory.current" if self.version == 2 else "memory.usage_in_bytes")
        )
        if text is None or not text.isdigit():
            return None
        fields = (
            line.partition(" ")
            for line in (text_of(self.folder / "memory.stat") or "").splitlines()
        )
        stat = {name: int(value) for name, _, value in fields if value.isdigit()}
        taken_back, at_work = (
            (("inactive_file", "active_file", "slab_reclaimable"), ("file_dirty", "file_writeback"))
            if self.version == 2
            else (("total_inactive_file", "total_active_file"), ("total_dirty", "total_writeback"))
        )
        clean = sum(stat.get(name, 0) for name in taken_back) - sum(
            stat.get(name, 0) for name in at_work
        )
        return max(0, int(text) - max(0, clean))


class ControlGroups:
    """The limits of process `pid`. Every call reads them again, because quotas and groups may change. Where groups are
    mounted is read once."""

    def __init__(self, root: Path | str = "/", pid: int | None = None):
        self._root, self._pid = Path(root), os.getpid() if pid is None else pid

    def cores(self) -> float:
        """Returns the number of cores that may be used: those of the affinity, or fewer if a quota is lower."""
        return max(0.01, min([float(len(self.allowed()) or os.cpu_count() or 1), *self.quotas()]))

    def allowed(self) -> set[int]:
        """Returns the numbers of the cores on which the process may run. Empty: the system does not report it."""
        try:
            return os.sched_getaffinity(self._pid)
        except (AttributeError, OSError):  # macOS has no such call, or the process has ended
            return set()

    def quotas(self) -> Iterator[float]:
        """Returns the cores that each group with a quota allows."""
        for groups in self.groups("cpu"):
            for folder in groups.path:
                names = (
                    ("cpu.max",)
                    if groups.version == 2
                    else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                )
                quota, _, period = " ".join(text_of(folder / n) or "" for n in names).partition(" ")
                if quota.isdigit() and period.isdigit() and int(period):
                    yield int(quota) / int(period)

    def limited(self) -> Iterator[MemoryGroup]:
        """Returns the groups that limit memory."""
        for groups in self.groups("memory"):
            for folder in groups.path:
                name = "memory.max" if groups.version == 2 else "memory.limit_in_bytes"
                text = text_of(folder / name) or ""
                if text.isdigit() and int(text) < UNLIMITED:
                    yield MemoryGroup(groups.version, folder, int(text))

    def groups(self, controller: str) -> Iterator[Groups]:
        """Finds the process's own groups by its /proc/PID/cgroup and the mounts, version 2 and version 1."""
        for line in (self._text("cgroup") or "").splitlines():
            _, controllers, group = line.split(":", 2)
            version = 1 if controllers else 2
            if version == 1 and controller not in controllers.split(","):
                continue
            for kind, inside, mount in self._mounts:
                if kind != ("cgroup2" if version == 2 else controller):
                    continue
                # In a container the mount shows a part of the tree only: `inside` is where that part begins.
                below = group
                if inside != "/":
                    below = group[len(inside) :] if group.startswith(inside) else "/"
                steps = [s for s in below.split("/") if s and s != ".."]
                top = self._root / mount.lstrip("/")
                yield Groups(
                    version, tuple(top.joinpath(*steps[:n]) for n in range(len(steps), -1, -1))
                )

    @cached_property
    def _mounts(self) -> list[tuple[str, str, str]]:
        """`cgroup2` or a version 1 controller, the mounted group, and the folder."""
        mounts: list[tuple[str, str, str]] = []
        for line in (self._text("mountinfo") or "").splitlines():
            before, _, after = line.partition(" - ")
            fields, tail = before.split(), after.split()
            if len(fields) < 5 or len(tail) < 3 or tail[0] not in ("cgroup", "cgroup2"):
                continue
            kinds = "cgroup2" if tail[0] == "cgroup2" else tail[2]
            mounts += [(kind, fields[3], fields[4]) for kind in kinds.split(",")]
        return mounts

    def _text(self, name: str) -> str | None:
        return text_of(self._root / f"proc/{self._pid}/{name}")


def text_of(path: Path) -> str | None:
    """Returns a file's text. None: the file does not exist, or its process has just ended."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
