"""Limits and use of a made-up machine: control groups of both versions, containers, and none."""

from __future__ import annotations

import hashlib
import os
import threading

import pytest

from sluice.ingest.machine import Machine, core_wait_s

GIB = 2**30


@pytest.fixture
def root(tmp_path):
    def write(files: dict[str, str]):
        for name, text in {"proc/meminfo": "MemTotal: 16777216 kB\n", "proc/7/status": "Cpus_allowed:\t000000ff\n",
                           **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Machine(tmp_path, pid=7)

    return write


V2 = {"proc/7/cgroup": "0::/a/b\n", "proc/7/mountinfo": "30 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"}
V1 = {"proc/7/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n",
      "proc/7/mountinfo": "31 1 0:2 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
                          "32 1 0:3 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"}


def test_without_groups_the_machine_and_the_affinity_count(root):
    machine = root({})
    assert machine.cores() == 8
    assert machine.memory_limit() == 16 * GIB
    assert machine.memory_limit(GIB) == GIB


@pytest.mark.parametrize(("limits", "cores", "memory"), [
    ({"a/b/memory.max": "max", "a/memory.max": f"{GIB}", "a/b/cpu.max": "250000 100000", "a/cpu.max": "max 100000"},
     2.5, GIB),
    ({"a/b/memory.max": f"{2 * GIB}", "a/memory.max": f"{3 * GIB}", "a/cpu.max": "50000 100000"}, 0.5, 2 * GIB),
    ({"a/b/cpu.max": "max 100000"}, 8, 16 * GIB)])
def test_version_2_takes_the_lowest_on_the_way_up(root, limits, cores, memory):
    machine = root({**V2, **{f"sys/fs/cgroup/{name}": text for name, text in limits.items()}})
    assert machine.cores() == cores
    assert machine.memory_limit() == memory


def test_version_1_reads_each_controller_where_it_is_mounted(root):
    machine = root({**V1, "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{GIB}\n",
                    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
                    "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "-1\n",
                    "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
                    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
                    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n"})
    assert machine.cores() == 3
    assert machine.memory_limit() == GIB


def test_in_a_container_the_mount_shows_a_part_of_the_tree(root):
    machine = root({"proc/7/cgroup": "0::/pod/one\n",
                    "proc/7/mountinfo": "30 1 0:1 /pod/one /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
                    "sys/fs/cgroup/memory.max": f"{GIB}\n"})
    assert machine.memory_limit() == GIB


@pytest.mark.parametrize(("lines", "memory"), [
    ("Max data size             unlimited            unlimited            bytes\n", 16 * GIB),
    ("Max data size             1048576000           unlimited            bytes\n", 1048576000 - (300 - 8) * 1024),
    ("Max address space         1000000              unlimited            bytes\n", 8 * 1024)])
def test_what_its_own_limits_leave_comes_on_top_of_what_is_used(root, lines, memory):
    machine = root({"proc/7/limits": f"Limit             Soft Limit           Hard Limit           Units\n{lines}",
                    "proc/7/status": "VmSize: 9000 kB\nVmData: 300 kB\nRssAnon: 7 kB\nRssShmem: 1 kB\n"})
    assert machine.memory_limit() == memory


def test_a_limit_that_changes_is_seen(root):
    machine = root({**V2, "sys/fs/cgroup/a/cpu.max": "100000 100000"})
    assert machine.cores() == 1
    root({"sys/fs/cgroup/a/cpu.max": "200000 100000"})
    assert machine.cores() == 2


def test_use_is_that_of_the_whole_tree(root):
    ticks = os.sysconf("SC_CLK_TCK")
    stat = "7 (a (strange) name) S 1 7 7 0 -1 0 0 0 0 0 {} {} {} {} 20 0 1 0"
    machine = root({"proc/7/task/7/children": "", "proc/7/task/70/children": "8 9",
                    "proc/8/task/8/children": "10", "proc/7/stat": stat.format(ticks, ticks, 0, 0),
                    "proc/8/stat": stat.format(2 * ticks, 0, ticks, ticks), "proc/9/stat": "",
                    "proc/7/smaps_rollup": "Pss_Anon: 100 kB\nPss_File: 50 kB\nPss_Shmem: 10 kB\n",
                    "proc/8/smaps_rollup": "Pss_Anon: 20 kB\nPss_Shmem: 5 kB\n",
                    "proc/10/status": "RssAnon: 7 kB\nRssFile: 90 kB\nRssShmem: 1 kB\n"})
    assert machine.tree() == [7, 8, 9, 10]
    assert machine.memory_used() == 1024 * (110 + 25 + 8)
    assert machine.cpu_used_s() == 6


STAT = "cpu  9 9 9 9 9 9 9 9 0 0\n" + "".join(
    f"cpu{core} 5 0 5 {100 * core} {10 * core} 0 0 0 0 0\n" for core in range(10)) + "intr 5 1\n"


def test_idle_time_is_that_of_the_cores_that_it_may_use(root):
    ticks = os.sysconf("SC_CLK_TCK")
    assert root({"proc/stat": STAT}).cores_idle_s() == 110 * sum(range(8)) / ticks
    assert root({"proc/7/status": "Cpus_allowed:\t00000000,00000202\n"}).cores_idle_s() == 110 * (1 + 9) / ticks


@pytest.mark.parametrize("files", [
    {}, {"proc/stat": STAT.replace("cpu7 ", "cpu70 ")}, {"proc/stat": STAT, "proc/7/status": "Name: x\n"},
    {"proc/stat": STAT, **V2, "sys/fs/cgroup/a/cpu.max": "400000 100000"}])  # half of an idle core may be ours
def test_idle_time_that_is_not_told_or_not_ours_is_none(root, files):
    assert root(files).cores_idle_s() is None


def test_idle_time_rises_as_this_machines_clock_does():
    machine = Machine()
    before = machine.cores_idle_s()
    assert before is None or (machine.cores_idle_s() or 0) >= before >= 0


def test_a_process_without_children_is_read_cheaply(root):
    machine = root({"proc/7/task/7/children": "",
                    "proc/7/status": "Cpus_allowed:\tf\nRssAnon: 7 kB\nRssFile: 90 kB\nRssShmem: 1 kB\n"})
    assert machine.memory_used() == 8 * 1024


def test_this_machine_has_cores_and_memory_and_uses_some():
    machine = Machine()
    assert 0 < machine.cores() <= (os.cpu_count() or 1)
    assert 0 < machine.memory_used() < machine.memory_limit()
    before = machine.cpu_used_s()
    sum(range(3_000_000))
    assert machine.cpu_used_s() > before


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


def test_a_core_taken_away_is_seen_at_the_next_look():
    allowed = os.sched_getaffinity(0)
    machine = Machine()
    assert machine.cores() <= len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert machine.cores() <= 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert machine.cores() <= len(allowed)


def test_without_proc_the_standard_library_tells_enough(tmp_path):
    """As on macOS: nothing raises, and what is told can be reckoned with."""
    machine, ours = Machine(tmp_path), Machine()
    assert machine.cores() == os.cpu_count()
    assert machine.memory_limit() == pytest.approx(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    assert machine.memory_limit(GIB) == GIB
    assert 10 * 2**20 < machine.memory_own() == machine.memory_used() < machine.memory_limit()
    before = machine.cpu_used_s()
    sum(range(2_000_000))
    assert before < machine.cpu_used_s() < ours.cpu_used_s() + 60
    assert machine.tree() == [os.getpid()]
    assert machine.model() == "unknown"
    assert (machine.memory_group(), machine.memory_pressure(), machine.cores_idle_s()) == (None, 0.0, None)
