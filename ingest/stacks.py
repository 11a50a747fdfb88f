"""SIGUSR1 tells what a program does now: `on_signal` prints the stacks of its threads and of its worker processes."""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO


@contextmanager
def on_signal(workers: Callable[[], str], stream: TextIO | None = None) -> Iterator[None]:
    """While it lasts, in the main thread: SIGUSR1 writes stacks to `stream` (the real standard error). `workers` gives
    those of worker processes, for instance `loader.stacks`."""
    stream = stream or sys.__stderr__ or sys.stderr

    def tell(_number: int, _frame: FrameType | None) -> None:
        # In a thread: workers may take a second to answer, and whoever was interrupted may hold any lock.
        threading.Thread(target=lambda: print(workers(), file=stream, flush=True), name="sluice-stacks",
                         daemon=True).start()

    before = signal.signal(signal.SIGUSR1, tell)
    # Written by the handler in C, so also while a call holds the interpreter; then `tell` is called.
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True, chain=True)
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, before)
