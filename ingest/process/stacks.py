"""Writes the stacks of a program's threads and worker processes when the program gets SIGUSR1."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sluice.common.lines import say


def own_stacks() -> str:
    """Returns the stacks of all threads of this process, taken under the interpreter's lock. faulthandler is not used,
    because it reads frames while other threads change them, which can crash the program."""
    names = {t.ident: t.name for t in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(ident, '?')} ({ident}):\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def tell(workers: Callable[[], str]) -> None:
    """Writes stacks to standard error. `workers` returns those of worker processes, as `Pipeline.stacks` does.
    A new thread writes, because workers may take a second to answer, and the interrupted thread may hold any lock."""
    threading.Thread(
        target=lambda: say(f"{own_stacks()}\n{workers()}"),
        name="sluice-stacks",
        daemon=True,
    ).start()


@contextmanager
def on_signal(workers: Callable[[], str]) -> Iterator[None]:
    """Returns a context for the main thread, in which SIGUSR1 writes the stacks."""
    before = signal.signal(signal.SIGUSR1, lambda *_: tell(workers))
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)
