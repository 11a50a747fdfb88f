"""What the thread of a rank sees while the main thread is blocked."""

import faulthandler
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from sluice.dlrm import watchdog
from sluice.dlrm.rank_exit import tell_ranks
from tests.product import Activity, Heartbeat, RankExit, Watchdog
from tests.raises import assert_names


@pytest.fixture(autouse=True)
def little_grace(monkeypatch):
    monkeypatch.setattr(watchdog, "_GRACE_S", 0.01)


@contextmanager
def training(
    leave: Callable[[int], None] = lambda _: None, preempt_s: float = 20.0
) -> Iterator[Watchdog]:
    ending = RankExit(first=True, leave=leave)
    beats = Heartbeat(dist.HashStore(), 0, 1, Activity(), ending)
    with Watchdog(ending) as watch, watch.training(beats, preempt_s=preempt_s):
        yield watch


def test_it_leaves_no_thread_and_no_signal_behind():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    ours = {"sluice-watchdog", "sluice-heartbeat"}
    with training():
        assert ours <= {thread.name for thread in threading.enumerate()}
        assert faulthandler.unregister(signal.SIGUSR2)
        faulthandler.register(signal.SIGUSR2)
    assert not ours & {thread.name for thread in threading.enumerate()}
    assert not faulthandler.unregister(signal.SIGUSR2)
    assert before == {number: signal.getsignal(number) for number in before}


def test_a_rank_ends_once_the_torchrun_that_started_it_is_gone(monkeypatch, capfd):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setattr(watchdog, "EVERY_S", 0.01)
    left = threading.Event()
    launcher = os.getppid()
    with Watchdog(RankExit(first=True, leave=lambda _: left.set())):
        monkeypatch.setattr(watchdog.os, "getppid", lambda: 1)
        assert left.wait(60)
    assert_names(capfd.readouterr().err, f"process {launcher}", "is gone", "--resume")


def test_a_rank_sees_for_itself_that_the_store_is_lost(monkeypatch):
    monkeypatch.setattr(watchdog, "EVERY_S", 0.01)
    looked = threading.Event()
    monkeypatch.setattr(Heartbeat, "look", lambda _: looked.set())
    with training():
        assert looked.wait(60)


def test_the_program_learns_of_an_interrupt_while_the_main_thread_is_blocked():
    """The handler here does nothing, as if the main thread were inside a collective."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    handler_before = signal.signal(signal.SIGINT, lambda *_: None)
    wakeup_before = signal.set_wakeup_fd(write)
    try:
        with training():
            os.kill(os.getpid(), signal.SIGINT)
            assert select.select([read], [], [], 60)[0]
            assert os.read(read, 64) == bytes([signal.SIGINT])
    finally:
        signal.set_wakeup_fd(wakeup_before)
        signal.signal(signal.SIGINT, handler_before)
        os.close(read)
        os.close(write)


@pytest.mark.parametrize("saved", [False, True])
def test_a_while_after_sigterm_a_wait_is_ended_and_then_a_run_that_is_not_saved(saved):
    waits, late = threading.Event(), threading.Event()
    # The time to save is over before the grace, so the wait shows that it was looked at.
    with training(lambda _: late.set(), preempt_s=0.0) as watch:
        watch.end_wait = waits.set
        if saved:
            watch.saved.set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert waits.wait(60)
        assert watch.stop.is_set()
        assert saved or late.wait(60)
    assert late.is_set() != saved


def test_the_first_fault_counts_and_reaches_the_other_ranks():
    store = dist.HashStore()
    assert tell_ranks(store, 1, ValueError("a wrong id")) is None
    assert tell_ranks(store, 0, ConnectionError()) == "rank 1: a wrong id"


def test_a_second_interrupt_shows_what_the_main_thread_does(monkeypatch):
    told, event = [], threading.Event()
    monkeypatch.setattr(watchdog, "tell", lambda workers: (told.append(workers()), event.set()))
    with training() as watch:
        watch.workers = lambda: "the workers' stacks"
        os.kill(os.getpid(), signal.SIGUSR1)
        assert event.wait(60)
    assert told == ["the workers' stacks"]
