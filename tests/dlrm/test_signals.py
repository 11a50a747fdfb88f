from __future__ import annotations

import os
import signal
import threading

import pytest
import torch.distributed as dist

from sluice.dlrm.training import signals
from sluice.dlrm.training.signals import StopSignals


@pytest.fixture
def left(monkeypatch):
    """What the watch ends the process with, if it does."""
    codes: list[int] = []
    event = threading.Event()
    monkeypatch.setattr(signals, "_GRACE_S", 0.0)
    return codes, event, lambda code: (codes.append(code), event.set())


def test_an_interrupt_is_seen_while_the_main_thread_is_deaf(left):
    codes, event, leave = left
    old = signal.signal(
        signal.SIGINT, lambda *_: None
    )  # as deaf as a main thread within a collective
    try:
        with StopSignals(dist.HashStore(), 0, leave=leave):
            os.kill(os.getpid(), signal.SIGINT)
            assert event.wait(60)
    finally:
        signal.signal(signal.SIGINT, old)
    assert codes == [130]


def test_sigterm_asks_to_stop_and_ends_nothing(left):
    codes, _, leave = left
    old = signal.getsignal(signal.SIGTERM)
    with StopSignals(dist.HashStore(), 0, leave=leave) as watch:
        assert not watch.stop.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert watch.stop.wait(60)
    assert codes == []
    assert signal.getsignal(signal.SIGTERM) is old


def test_a_while_after_sigterm_a_wait_for_input_is_ended(left):
    """Also where the main thread is deaf."""
    ended = threading.Event()
    old = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with StopSignals(dist.HashStore(), 0, leave=left[2]) as watch:
            signal.signal(signal.SIGTERM, lambda *_: None)
            watch.end_wait = ended.set
            os.kill(os.getpid(), signal.SIGTERM)
            assert ended.wait(60)
            assert watch.stop.is_set()
    finally:
        signal.signal(signal.SIGTERM, old)


def test_the_first_fault_counts_and_other_ranks_are_told(left):
    store = dist.HashStore()
    with StopSignals(store, 1, leave=left[2]) as watch:
        assert watch.other_ranks_error() is None
        watch.report_error("a wrong id")
        watch.report_error("connection closed")
        assert watch.other_ranks_error() == "rank 1: a wrong id"
