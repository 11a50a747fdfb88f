import os
import select
import signal
import threading

import pytest
import torch.distributed as dist

from sluice.dlrm.rank_exit import tell_ranks
from sluice.dlrm.training import signals
from sluice.dlrm.training.signals import StopSignals


@pytest.fixture(autouse=True)
def little_grace(monkeypatch):
    monkeypatch.setattr(signals, "_GRACE_S", 0.01)


def test_the_program_learns_of_an_interrupt_while_the_main_thread_is_blocked():
    """The handler here does nothing, as if the main thread were inside a collective."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    handler_before = signal.signal(signal.SIGINT, lambda *_: None)
    wakeup_before = signal.set_wakeup_fd(write)
    try:
        with StopSignals():
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
    with StopSignals(preempt_s=0.0, too_late=late.set) as watch:
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
