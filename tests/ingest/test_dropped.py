"""What is left of a dropped object is closed, whatever the thread that drops it holds."""

import gc
import threading

import pytest

from sluice.common.dropped import close_when_dropped
from tests.ingest.twin import eventually
from tests.product import BatchLoader


class Owner:
    pass


def test_all_is_closed_in_turn_though_the_dropping_thread_holds_a_lock_that_closing_needs():
    lock, calls, done = threading.Lock(), [], threading.Event()

    def close():
        calls.append(lock.acquire(timeout=20))

    def close_files():  # as code does that asks who it is, whereby a plain thread leaves a dummy
        calls.append(threading.current_thread().name)

    owner = Owner()
    close_when_dropped(owner, close, close_files, done.set)
    with lock:
        del owner
        assert not calls
    assert done.wait(timeout=20)
    assert calls == [True, "sluice-close"]


@pytest.mark.parametrize("cycle", [False, True])
def test_a_dropped_loader_ends_its_threads_though_its_dropper_holds_its_locks(table, cycle):
    loader = BatchLoader(table, batch_size=16)
    next(iter(loader))
    pipeline = loader.pipeline
    if cycle:
        loader.itself = loader
    release = threading.Event()
    held = threading.Event()

    def hold():
        with pipeline._lock:
            held.set()
            release.wait(timeout=60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(timeout=20)
    del loader
    gc.collect()
    assert holder.is_alive(), "the drop waited for no lock"
    release.set()
    holder.join()
    eventually(lambda: pipeline.gone)
