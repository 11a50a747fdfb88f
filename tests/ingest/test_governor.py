"""What the governor admits, with senses and a clock of the test's own; and that real runs stay inside their limit."""

import dataclasses
import json
import threading

import pytest

from sluice.ingest.memory.governor import Governor, MemoryLimitError, MemoryReadings
from tests.raises import raises
from tests.run_program import run_program

pytestmark = pytest.mark.slow

MIB = 2**20
LIMIT = 213  # 200, and the margin


@dataclasses.dataclass
class Process:
    """What a governor senses."""

    now: float = 0.0
    used: int = 0
    idle: int = 0
    pressure: float = 0.0
    given_back: int = 0

    def governor(self, **senses):
        """Returns a governor that leaves 80 of the limit for early work."""
        readings = dataclasses.replace(self.senses(), **senses)
        return Governor(limit=LIMIT, minimum=20, base=100, readings=readings)

    def senses(self):
        return MemoryReadings(
            used=lambda: self.used,
            idle=lambda: self.idle,
            reclaim=self.reclaim,
            pressure=lambda: self.pressure,
            clock=lambda: self.now,
        )

    def reclaim(self):
        self.used -= self.given_back
        self.idle = 0


def test_a_limit_that_falls_during_a_run_holds_back_early_work_until_it_rises():
    process, limits = Process(), [LIMIT]
    governor = process.governor(limit=lambda: limits[0])
    governor.admit(10, due=False).release()
    for limit, is_admitted in ((LIMIT - 60, False), (LIMIT, True), (10 * LIMIT, True)):
        limits[0] = limit
        process.now += 10
        charge = governor.admit(50, due=False)
        assert (charge is not None) == is_admitted
        if charge:
            charge.release()
        assert governor.limit <= LIMIT


def test_uncharged_memory_leaves_less_for_early_work():
    governor = Process(used=100 + 30).governor()
    assert governor.admit(51, due=False) is None, "30 of the 80 are overhead"
    charge = governor.admit(50, due=False)
    assert charge is not None
    assert governor.overhead == 30


def test_overhead_fades_when_it_is_gone():
    process = Process(used=160)
    governor = process.governor()
    assert governor.admit(30, due=False) is None
    process.used = 100
    seen = []
    while governor.admit(60, due=False) is None:
        process.now += 0.05
        seen.append(governor.overhead)
        assert len(seen) < 100
    assert seen == sorted(seen, reverse=True)
    assert len(seen) > 10, "it is a peak's memory, not the last look"


def test_unused_memory_is_given_back_before_work_waits():
    governor = Process(used=160, given_back=60).governor()
    assert governor.admit(80, due=False) is not None
    assert governor.overhead == 0


def test_each_thread_gives_back_what_its_allocator_keeps_for_due_work_too():
    process, calls = Process(used=500), []
    governor = process.governor(reclaim=lambda: calls.append(threading.get_ident()))

    def ask():
        for due in (True, False, True):
            governor.admit(20, due=due)

    ask()
    other = threading.Thread(target=ask)
    other.start()
    other.join()
    assert len(calls) == len(set(calls)) == 2, "once each while the clock stands still"
    process.now += 0.05
    ask()
    assert len(calls) == 3


def test_due_work_is_admitted_always():
    governor = Process(used=500, pressure=100.0).governor()
    assert governor.admit(20, due=True) is not None
    assert governor.admit(1, due=False) is None


@pytest.mark.parametrize("early", [0, 10])
def test_due_work_above_the_minimum_leaves_early_work_less_from_then_on(early):
    """80 are left above the minimum of 20. A transform may enlarge rows, so work like it may be due again."""
    governor = Governor(limit=LIMIT, minimum=20, base=100)
    kept = governor.admit(early, due=False)
    due = governor.admit(15, due=True)
    assert governor.free == 80 - early, "work within the minimum takes nothing from early work"
    due.correct(55)
    assert governor.free == 45 - early, "early work is not counted as due"
    kept.correct(early + 5)
    due.release()
    kept.release()
    assert governor.free == 45
    assert governor.admit(46, due=False) is None
    assert governor.admit(45, due=False) is not None
    governor.admit(30, due=True)
    assert governor.free == 0, "the largest so far counts, not the sum"


def test_pressure_holds_early_work_back_until_it_is_over():
    process = Process(pressure=50.0)
    governor = process.governor()
    assert governor.admit(1, due=False) is None
    process.pressure = 0.0
    assert governor.admit(1, due=False) is None, "not asked again yet"
    process.now += 1
    assert governor.admit(1, due=False) is not None


def test_nothing_early_begins_while_one_item_has_all_that_is_free():
    governor = Process(used=160, given_back=40).governor()
    with governor.run_alone() as free:
        assert free == LIMIT - 100 - 20, "what was unused is given back first"
        assert governor.admit(1, due=False) is None
        assert governor.admit(20, due=True) is not None
    assert governor.admit(1, due=False) is not None


def test_worker_processes_and_what_they_share_count():
    governor = Governor(limit=LIMIT, minimum=20, base=100)
    governor.hold(30, outside=True)
    governor.hold(40)
    assert governor.held == 70
    assert governor.admit(11, due=False) is None
    assert governor.admit(10, due=False) is not None


def test_work_that_waits_is_woken_when_a_process_gives_memory_back():
    governor, woken = Governor(limit=LIMIT, minimum=20), []

    class Sleeper(threading.Condition):
        def wait(self, timeout=None):
            governor.hold(-30)
            return True

        def notify_all(self):
            woken.append(self)

    governor.hold(30)
    governor.wait_on(Sleeper(), again=False)
    assert woken


def test_a_limit_below_the_minimum_is_refused_with_the_number_that_would_do():
    with raises(MemoryLimitError, "120 bytes"):
        Governor(limit=119, minimum=20, base=100)


_RUN = """
import json, sys, threading, torch
from sluice.etl.table.table import FeatureTable
from sluice.ingest.knobs import Knobs
from sluice.ingest.loader import BatchLoader
from sluice.ingest.machine import Machine

machine = Machine()
table = FeatureTable.open(sys.argv[1])
limit, peak, over = machine.memory_used() + int(sys.argv[2]), 0, threading.Event()

def watch():
    global peak
    while not over.wait(0.01):
        peak = max(peak, machine.memory_used())

knobs = Knobs(workers={"decode": 4}, prefetch_bytes=2**28, read_ahead_bytes=2**28)
with BatchLoader(table, batch_size=4096, read_ahead_epochs=6, knobs=knobs, memory_limit=limit) as loader:
    watcher = threading.Thread(target=watch)
    watcher.start()
    for epoch in range(6):
        for batch in loader:
            loader.snapshot()
            while not loader.memory()["held_back"].get("limit"):  # also on a busy machine, they read ahead until then
                over.wait(0.01)
    over.set()
    watcher.join()
    print(json.dumps({"limit": limit, "peak": peak, **loader.memory(), "order": loader.order_hash}))
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """160,000 rows of four-byte columns, 24 MiB as they are loaded."""
    from benchmarks.small_table import small_table

    return small_table(
        tmp_path_factory.mktemp("wide") / "clicks", rows=200_000, files=4, row_group_rows=16384
    )


def test_a_run_stays_inside_its_limit(wide):
    figures = json.loads(run_program("-c", _RUN, wide.uri, 256 * MIB, check=True).stdout)
    assert figures["peak"] <= 1.05 * figures["limit"]
    assert figures["minimum"] <= figures["limit"]
    assert figures["held_back"]["limit"] > 0, "the knobs ask for more than there is"
