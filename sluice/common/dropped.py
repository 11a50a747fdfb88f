"""Closes what a dropped object leaves behind: `close_when_dropped`."""

from __future__ import annotations

import _thread
import threading
import weakref
from collections.abc import Callable


def close_when_dropped(owner: object, *closes: Callable[[], object]) -> None:
    """Calls `closes`, one after the other, in a thread of their own, once `owner` is garbage. At exit it calls nothing.

    The collector frees an object in any thread and at any moment. That thread may hold a lock that closing needs, or
    another thread may hold that lock and wait for it. It may even hold the lock of the module `threading`, so a plain
    thread comes first."""

    def close_all() -> None:
        for close in closes:
            close()

    def start() -> None:
        threading.Thread(target=close_all, name="sluice-close", daemon=True).start()

    weakref.finalize(owner, _thread.start_new_thread, start, ()).atexit = False
