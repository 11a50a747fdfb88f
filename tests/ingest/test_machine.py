"""Limits and use of a made-up machine: control groups of both versions, containers, and none; and of real processes."""

import hashlib
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import psutil
import pytest

from sluice.ingest.machine import Machine, core_wait_s
from sluice.ingest.process.worker import anonymous_bytes

GIB = 2**30


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Makes this process's machine of made-up files, with 16 GiB and 8 cores."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16 * GIB))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.setattr(
        psutil.Process, "rlimit", lambda _self, _limit: (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY)
    )

    def write(files: dict[str, str]):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Machine(tmp_path)

    return write


OWN = f"proc/{os.getpid()}"
V2 = {
    f"{OWN}/cgroup": "0::/a/b\n",
    f"{OWN}/mountinfo": "30 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
}
V1 = {
    f"{OWN}/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n",
    f"{OWN}/mountinfo": "31 1 0:2 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 1 0:3 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n",
}


def test_without_groups_the_machine_and_the_affinity_count(root):
    machine = root({})
    assert machine.cores() == 8
    assert machine.memory_limit() == 16 * GIB
    assert machine.memory_limit(GIB) == GIB
    assert machine.memory_limit(17 * GIB) == 16 * GIB


@pytest.mark.parametrize(
    ("limits", "cores", "memory"),
    [
        (
            {
                "a/b/memory.max": "max",
                "a/memory.max": f"{GIB}",
                "a/b/cpu.max": "250000 100000",
                "a/cpu.max": "max 100000",
            },
            2.5,
            GIB,
        ),
        (
            {
                "a/b/memory.max": f"{2 * GIB}",
                "a/memory.max": f"{3 * GIB}",
                "a/cpu.max": "10000 20000",
            },
            0.5,
            2 * GIB,
        ),
        ({"a/b/cpu.max": "max 100000"}, 8, 16 * GIB),
    ],
)
def test_version_2_takes_the_lowest_on_the_way_up(root, limits, cores, memory):
    machine = root({**V2, **{f"sys/fs/cgroup/{name}": text for name, text in limits.items()}})
    assert machine.cores() == cores
    assert machine.memory_limit() == memory


def test_version_1_reads_each_controller_where_it_is_mounted(root):
    machine = root(
        {
            **V1,
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        }
    )
    assert machine.cores() == 3
    assert machine.memory_limit() == GIB


@pytest.mark.parametrize("below", ["", "/own"])
def test_in_a_container_the_mount_shows_a_part_of_the_tree(root, below):
    machine = root(
        {
            f"{OWN}/cgroup": f"0::/pod/one{below}\n",
            f"{OWN}/mountinfo": "30 1 0:1 /pod/one /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            f"sys/fs/cgroup{below}/memory.max": f"{GIB}\n",
        }
    )
    assert machine.memory_limit() == GIB


@pytest.mark.parametrize(
    ("limited", "most", "memory"),
    [
        (psutil.RLIMIT_DATA, 1048576000, 1048576000 - (300 - 8) * 1024),
        (psutil.RLIMIT_AS, 1000000, 8 * 1024),
    ],
)
def test_what_its_own_limits_leave_comes_on_top_of_what_is_used(
    root, monkeypatch, limited, most, memory
):
    machine = root(
        {f"{OWN}/status": "VmSize: 9000 kB\nVmData: 300 kB\nRssAnon: 7 kB\nRssShmem: 1 kB\n"}
    )
    assert machine.memory_limit() == 16 * GIB
    monkeypatch.setattr(
        psutil.Process,
        "rlimit",
        lambda _self, limit: (
            most if limit == limited else psutil.RLIM_INFINITY,
            psutil.RLIM_INFINITY,
        ),
    )
    assert machine.memory_limit() == memory


@pytest.mark.parametrize(("host", "left"), [(16 * GIB, 2 * GIB), (GIB, GIB)])
def test_free_is_what_host_and_groups_leave(root, monkeypatch, host, left):
    memory = SimpleNamespace(total=16 * GIB, available=host)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    groups = {"a": (8, 3), "a/b": (4, 2)}
    files = {
        f"sys/fs/cgroup/{group}/memory.{name}": str(value * GIB)
        for group, values in groups.items()
        for name, value in zip(("max", "current"), values, strict=True)
    }
    assert root({**V2, **files}).memory_free() == left


def test_memory_is_that_of_the_whole_tree(root):
    gone = subprocess.Popen(["true"])  # no process has its number any more
    gone.wait()
    machine = root(
        {
            f"{OWN}/task/7/children": "",
            f"{OWN}/task/70/children": f"8 {gone.pid}",
            "proc/8/task/8/children": "10",
            f"{OWN}/smaps_rollup": "Pss_Anon: 100 kB\nPss_File: 50 kB\nPss_Shmem: 10 kB\n",
            "proc/8/smaps_rollup": "Pss_Anon: 20 kB\nPss_Shmem: 5 kB\n",
            "proc/10/status": "RssAnon: 7 kB\nRssFile: 90 kB\nRssShmem: 1 kB\n",
        }
    )
    assert machine.tree() == [os.getpid(), 8, gone.pid, 10]
    assert machine.memory_used() == 1024 * (110 + 25 + 8)


@pytest.mark.parametrize("waited", [False, True])
def test_a_process_that_has_ended_uses_nothing(waited):
    """Also one that was not waited for, whose number is still taken."""
    work = "import time\nwhile time.process_time() < 0.1: pass"  # the kernel counts in hundredths
    ended = subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.DEVNULL)
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    if waited:
        ended.wait()
    machine = Machine(pid=ended.pid)
    assert (anonymous_bytes(ended.pid), machine.memory_own(), machine.memory_used()) == (0, 0, 0)
    assert (machine.cpu_used_s() > 0) is not waited
    ended.wait()


STAT = (
    "cpu  9 9 9 9 9 9 9 9 0 0\n"
    + "".join(f"cpu{core} 5 0 5 {100 * core} {10 * core} 0 0 0 0 0\n" for core in range(10))
    + "intr 5 1\n"
)


def test_idle_time_is_that_of_the_cores_that_it_may_use(root, monkeypatch):
    ticks = os.sysconf("SC_CLK_TCK")
    assert root({"proc/stat": STAT}).cores_idle_s() == 110 * sum(range(8)) / ticks
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {1, 9})
    assert root({}).cores_idle_s() == 110 * (1 + 9) / ticks


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/stat": STAT.replace("cpu7 ", "cpu70 ")},
        {"proc/stat": STAT, **V2, "sys/fs/cgroup/a/cpu.max": "400000 100000"},
    ],
)  # half of an idle core may be ours
def test_idle_time_that_is_unknown_or_not_ours_is_none(root, files):
    assert root(files).cores_idle_s() is None


def test_waiting_for_a_core_is_counted():
    """Two threads that want the same core: at least one of them waits for it."""
    core = {min(os.sched_getaffinity(0))}
    meet, enough, block = threading.Barrier(2, timeout=60), threading.Event(), bytes(2**20)

    def work():
        os.sched_setaffinity(0, core)  # of this thread alone
        before = core_wait_s()
        meet.wait()
        for _ in range(10_000):
            if enough.is_set():
                return
            hashlib.sha256(block).digest()  # without the interpreter lock
            if core_wait_s() - before > 0.005:
                enough.set()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert enough.is_set()


def test_without_proc_psutil_is_enough(tmp_path):
    """Nothing raises, and all counters are usable numbers."""
    machine = Machine(tmp_path)
    assert machine.memory_limit() == psutil.virtual_memory().total
    assert 10 * 2**20 < machine.memory_own() < machine.memory_limit()
    assert machine.cpu_used_s() > 0
    assert (machine.tree(), machine.model()) == ([os.getpid()], "unknown")
    unknown = (machine.memory_group(), machine.memory_pressure(), machine.cores_idle_s())
    assert unknown == (None, 0.0, None)
