"""A worker takes its threads and its memory from its control group, not from the host."""

import pytest

from sluice.ingest.remote.worker import memory_of, threads_of
from tests.ingest import test_machine
from tests.ingest.remote.conftest import job_and_units
from tests.ingest.test_machine import GIB, V2
from tests.product import Governor, MemoryLimitError, Unit, UnitMaker
from tests.raises import raises

machine_of = test_machine.root
"""Makes a machine of 8 cores and 16 GiB out of made-up files."""
QUOTA = V2 | {
    "sys/fs/cgroup/a/b/cpu.max": "250000 100000",
    "sys/fs/cgroup/a/b/memory.max": f"{6 * GIB}",
    "sys/fs/cgroup/a/memory.max": f"{9 * GIB}",
}


def test_threads_and_memory_are_those_of_the_pod(machine_of):
    machine = machine_of(QUOTA)
    assert threads_of(machine) == 3
    assert memory_of(machine).limit == 6 * GIB


def test_what_the_pod_has_in_use_already_counts_and_too_little_memory_is_refused(machine_of):
    used = {"sys/fs/cgroup/a/b/memory.current": f"{5 * GIB}"}
    assert memory_of(machine_of(QUOTA | used)).base == 5 * GIB
    used = {"sys/fs/cgroup/a/b/memory.current": f"{7 * GIB}"}
    with raises(MemoryLimitError, "6 GiB", "7 GiB"):
        memory_of(machine_of(QUOTA | used))


class Full(Governor):
    """Another unit takes all memory until somebody waits for it."""

    waited = 0

    def fill(self):
        with self.lock:
            self.other = self.admit(self.limit, due=True)

    def wait_on(self, condition, again):
        self.waited += 1
        self.other.release()


def test_a_unit_waits_for_the_memory_of_others_and_never_for_itself(table):
    job, units = job_and_units(table)
    free = UnitMaker(job, table)
    full = Full(1000, 0)  # less than any unit needs
    maker = UnitMaker(job, table, full)
    assert maker.rows(units[0]).equals(free.rows(units[0]))
    assert full.waited == 0
    full.fill()
    assert maker.rows(units[1]).equals(free.rows(units[1]))
    assert full.waited == 1
    assert full.charged == 0
    with pytest.raises(Exception, match="no such rows"):
        maker.rows(Unit(0, 99, 0, units[0].parts))
    assert full.charged == 0
    maker.close()
    free.close()
