"""Reads what this process may use and does use: cores, memory, processor time.

psutil reads processor times, the host's memory and limits of processes. This module reads the rest, because psutil does
not read control groups, pressure and waiting for cores, and it counts mapped files as shared memory. `root` is `/`.
Tests use a folder with made-up files.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from sluice.common.control_groups import ControlGroups, MemoryGroup, text_of

WORKER_PROCESS_BYTES = 50 * 2**20
"""The least memory of a worker process with numpy and pyarrow. It is charged until a process was measured."""


class Machine:
    """The machine as process `pid` sees it. Every call reads again, because quotas and groups may change."""

    def __init__(self, root: Path | str = "/", pid: int | None = None, sharers: int = 1):
        """`sharers` processes like this one share the cores, and each sees its part of them. Memory is not divided,
        because a control group's use already includes the other processes."""
        self.sharers = sharers
        self._root = Path(root)
        self._pid = os.getpid() if pid is None else pid
        self._control = ControlGroups(root, self._pid)
        self._ticks = os.sysconf("SC_CLK_TCK")

    def cores(self) -> float:
        """Returns the number of cores that may be used, by affinity and quota."""
        return max(0.01, self._control.cores() / self.sharers)

    def some_cores(self, count: int | None, rank: int) -> set[int]:
        """Returns the numbers of `count` cores that may be used, other ones for the next rank. Empty: all of them."""
        allowed = sorted(self._control.allowed())
        if count is None or count >= len(allowed):
            return set()
        return {allowed[(rank * count + n) % len(allowed)] for n in range(count)}

    def model(self) -> str:
        """Returns the processor's name, or `unknown` if the system does not report it."""
        for line in (self._text("proc/cpuinfo") or "").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
        return "unknown"

    def memory_limit(self, user: int | None = None) -> int:
        """Returns the lowest of the control groups' limits, the host's memory, this process's own limit (ulimit) and
        `user`."""
        groups = (group.limit for group in self._control.limited())
        limits = [int(psutil.virtual_memory().total), *groups, *self._own_limits()]
        return min(limits if user is None else [*limits, user])

    def memory_free(self) -> int:
        """Returns the bytes that are left below the host's memory, the control groups' limits and this process's own
        limit. 0 or less: nothing is left."""
        rooms = [limit - self.memory_own() for limit in self._own_limits()]
        if (group := self.memory_group()) is not None:
            rooms.append(group.limit - (group.charged() or 0))
        return min([int(psutil.virtual_memory().available), *rooms])

    def memory_group(self) -> MemoryGroup | None:
        """Returns the control group of this process whose limit leaves the least memory. None: no group has a limit, or
        the kernel does not report their use."""
        rooms = [
            (group.limit - charged, group)
            for group in self._control.limited()
            if (charged := group.charged()) is not None
        ]
        return min(rooms, key=lambda room: room[0])[1] if rooms else None

    def memory_used(self) -> int:
        """Returns the anonymous and shared bytes of this process and its descendants. Each shared page counts once.
        Page cache does not count, because the kernel frees it when needed."""
        tree = self.tree()
        return sum(self._memory_of(pid, alone=len(tree) == 1) for pid in tree)

    def memory_own(self) -> int:
        """Returns the anonymous and shared bytes of this process alone. This is cheap enough to be read often."""
        return self._memory_of(self._pid, alone=True)

    def memory_pressure(self) -> float:
        """Returns the per cent of the last ten seconds in which a task in this process's control group waited for
        memory. With version 1, or without groups, it counts tasks of the whole host. 0 if the kernel does not report
        it."""
        groups = self._control.groups("memory")
        own = [group.path[0] / "memory.pressure" for group in groups if group.version == 2]
        for path in [*own, self._root / "proc/pressure/memory"]:
            for line in (text_of(path) or "").splitlines():
                if line.startswith("some avg10="):
                    return float(line.split()[1].partition("=")[2])
        return 0.0

    def cpu_used_s(self) -> float:
        """Returns the processor time of this process and its descendants, including ended ones that were waited for."""
        return sum(map(_cpu_s, self.tree()))

    def cores_idle_s(self) -> float | None:
        """Returns the idle time so far of the cores that this process may run on. None if the kernel does not report
        it, or if a quota allows fewer cores, because an idle core is then not free for this process."""
        allowed = self._control.allowed()
        if not allowed or any(quota < len(allowed) for quota in self._control.quotas()):
            return None
        idle = 0
        for line in (self._text("proc/stat") or "").splitlines():
            name, *fields = line.split()
            if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in allowed:
                allowed.remove(int(name[3:]))
                idle += int(fields[3]) + int(fields[4])  # waiting for a disk counts as idle too
        return None if allowed else idle / self._ticks / self.sharers

    def tree(self) -> list[int]:
        """Returns the ids of this process and its descendants. psutil would read all processes of the host for this."""
        pids = [self._pid]
        for pid in pids:
            for task in self._names(f"proc/{pid}/task"):
                pids += [
                    int(child)
                    for child in (self._text(f"proc/{pid}/task/{task}/children") or "").split()
                ]
        return pids

    def _own_limits(self) -> Iterator[int]:
        """Returns the limits of this process itself. RLIMIT_AS and RLIMIT_DATA count addresses, used or not, so what
        they leave is added to the memory that is used now."""
        process = psutil.Process(self._pid)
        for limit, size in ((psutil.RLIMIT_AS, "VmSize"), (psutil.RLIMIT_DATA, "VmData")):
            most, _ = process.rlimit(limit)
            if most != psutil.RLIM_INFINITY:
                left = most - 1024 * int(self._words(f"proc/{self._pid}/status").get(size, "0"))
                yield self.memory_own() + max(0, left)

    def _memory_of(self, pid: int, alone: bool) -> int:
        # smaps_rollup divides shared pages between their users. It is slow because it walks over the page tables, so
        # it is only read if there are several processes.
        if not alone:
            sizes = self._words(f"proc/{pid}/smaps_rollup")
            if "Pss_Anon" in sizes:
                return 1024 * (int(sizes["Pss_Anon"]) + int(sizes.get("Pss_Shmem", "0")))
        status = self._words(f"proc/{pid}/status")
        if not status:  # the process has ended, or the system has no such files (macOS)
            try:
                return int(psutil.Process(pid).memory_info().rss)
            except psutil.NoSuchProcess:
                return 0
        return 1024 * (int(status.get("RssAnon", "0")) + int(status.get("RssShmem", "0")))

    def _words(self, path: str) -> dict[str, str]:
        """Returns the first word after the name in each line of a file of /proc."""
        words = {}
        for line in (self._text(path) or "").splitlines():
            name, _, value = line.partition(":")
            words[name] = value.split()[0] if value.split() else ""
        return words

    def _names(self, path: str) -> list[str]:
        try:
            return os.listdir(self._root / path)
        except OSError:
            return []

    def _text(self, path: str) -> str | None:
        return text_of(self._root / path)


def _cpu_s(pid: int) -> float:
    """Returns a process's time on cores, including its children that were waited for. 0 if it has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


def cache_folder() -> Path:
    """Returns the folder for this user's cache files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice"


def core_wait_s() -> float:
    """Returns how long the calling thread has waited for a core so far. 0 if the kernel does not count it."""
    own: _Schedstat | None = getattr(_of_thread, "schedstat", None)
    if own is None:
        own = _of_thread.schedstat = _Schedstat()
    return own.waited_s()


class _Schedstat:
    """The kernel's file about one thread. It stays open while the thread lives, because workers read it twice for each
    item."""

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def waited_s(self) -> float:
        if self._file < 0:
            return 0.0
        text = os.pread(self._file, 64, 0)
        return int(text.split()[1]) / 1e9 if text else 0.0

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


_of_thread = threading.local()


def give_back() -> None:
    """Makes the C library return freed memory to the system, if it supports that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
