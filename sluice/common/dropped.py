"""Closes what a dropped object leaves behind: `close_when_dropped`."""

from __future__ import annotations

import _thread
import weakref
from collections.abc import Callable


def close_when_dropped(owner: object, *closes: Callable[[], object]) -> None:
    """Calls `closes`, one after the other, in a thread of their own, once `owner` is garbage. At exit it calls nothing.

    The collector frees an object in any thread and at any moment. That thread may hold a lock that closing needs, or
    another thread may hold that lock and wait for it. So it only starts the thread that closes."""

    def close_all() -> None:
        for close in closes:
            close()

    weakref.finalize(owner, _thread.start_new_thread, close_all, ()).atexit = False
