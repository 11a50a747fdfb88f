"""The probe of the interpreter's lock, with a clock of its own: what it counts, and when its thread ends."""

import sys
import threading
from types import SimpleNamespace

import pytest

from sluice.ingest.lock_probe import QUICK_S, SLOW_S, LockProbe
from sluice.ingest.pipeline import Pipeline
from tests.ingest.twin import eventually

INTERVAL_S = 0.005


class Time:
    """A sleep takes `late` seconds longer, of which the thread waits `core_wait` for a core."""

    now = waited = 0.0

    def __init__(self, late, core_wait):
        self.late, self.core_wait, self.sleeps = late, core_wait, []

    def sleep(self, seconds):
        self.sleeps.append(seconds)
        self.now += seconds + self.late
        self.waited += self.core_wait


@pytest.mark.parametrize(
    ("late", "core_wait", "share"),
    [
        (INTERVAL_S, 0.0, 1.0),
        (INTERVAL_S / 2, 0.0, 0.5),
        (4 * INTERVAL_S, 0.0, 1.0),  # several threads wait for it in turn
        (0.0005, 0.0, 0.0),  # the kernel's own delay
        (INTERVAL_S, INTERVAL_S, 0.0),  # no core was free
    ],
)
def test_the_share_of_the_time_is_how_late_a_sleep_ends(late, core_wait, share):
    time = Time(late, core_wait)
    probe = LockProbe(lambda: time.now, time.sleep, lambda: time.waited)
    for _ in range(300):
        probe.take_sample()
    # The first ones are imports and compilers.
    assert probe.held_s == pytest.approx(share * (time.now - 32 * (QUICK_S + late)), abs=1e-9)
    assert (time.sleeps[0], time.sleeps[-1]) == (QUICK_S, SLOW_S)


def test_an_interpreter_without_the_lock_reports_none_and_offers_no_processes(monkeypatch):
    time = Time(INTERVAL_S, 0.0)
    probe = LockProbe(lambda: time.now, time.sleep, lambda: time.waited)
    enough = SimpleNamespace(memory=SimpleNamespace(limit=2**40), least_limit=0, _cores=2)
    backends = vars(Pipeline)["_backends"].fget
    assert backends(enough) == ("thread", "process")
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    for _ in range(300):
        probe.take_sample()
    assert probe.held_s == 0
    assert backends(enough) == ("thread",)


def test_the_thread_ends_with_its_last_user_and_begins_with_the_next():
    turn = threading.Semaphore(0)
    probe = LockProbe(sleep=lambda _: turn.acquire(timeout=60), core_wait_s=lambda: 0.0)

    def threads():
        turn.release()
        return sum(t.name == "sluice-lock-probe" for t in threading.enumerate())

    user = threading.Event()
    for _ in range(2):
        probe.enter(user)
        assert threads() == 1
    probe.leave(user)
    eventually(lambda: threads() == 0)
    probe.enter(user)
    assert threads() == 1
    del user
    eventually(lambda: threads() == 0)


def test_another_thread_may_leave_while_the_probe_starts(monkeypatch):
    """The collector calls `leave` in any thread, also in the one that starts."""
    user, left = threading.Event(), threading.Event()
    probe = LockProbe(sleep=lambda _: None, core_wait_s=lambda: 0.0)
    start = threading.Thread.start

    def leave():
        probe.leave(user)
        left.set()

    def start_after_leaving(thread):
        monkeypatch.setattr(threading.Thread, "start", start)
        threading.Thread(target=leave, daemon=True).start()
        assert left.wait(timeout=20)
        thread.start()

    monkeypatch.setattr(threading.Thread, "start", start_after_leaving)
    probe.enter(user)
    eventually(lambda: all(t.name != "sluice-lock-probe" for t in threading.enumerate()))
