"""Ends a rank, and says why: to the user, to the other ranks, and to torchrun. `RankExit` ends one whose main thread
cannot."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sluice.common.lines import say

_GRACE_S = 3.0
"""How long a rank that ends may clean up."""
_FAULT = "sluice/fault"


class Elsewhere(RuntimeError):
    """Another rank ended, and said why."""


class LostRanks(RuntimeError):
    """The first rank is lost, or ranks never started. Every host says so, because no rank can speak for all."""


def tell_ranks(store: Any, rank: int, error: Exception) -> str | None:
    """Tells the other ranks why this one ends, before its connections close. Returns the reason of the rank that told
    its own first. None: this one did."""
    if store.check([_FAULT]):
        first: str = store.get(_FAULT).decode()
        return first
    store.set(_FAULT, f"rank {rank}: {error}")
    return None


class RankExit:
    """Lets exactly one thread end the process: the main thread, after `claim()`, or another one by `leave`."""

    def __init__(self, *, first: bool, leave: Callable[[int], None] = os._exit) -> None:
        self.cleanup: Callable[[], None] = lambda: None
        """Called before the process ends. If it hangs, it is left after a while."""
        self.first = first
        """Whether this rank speaks for all ranks; that includes a line of JSON on standard output."""
        self._leave = leave
        self._claim = threading.Lock()

    def claim(self) -> None:
        """Says that the main thread will end the process. It returns only if no other thread is doing so."""
        self._claim.acquire()

    def leave(self, text: str, *, speak: bool | None = None) -> None:
        """Ends the process with 1, from any thread, unless the main thread is about to. `speak` takes the place of
        `first`."""
        if not self._claim.acquire(blocking=False):
            return
        with suppress(OSError):  # the reader may be gone
            tell_end(text, speak=self.first if speak is None else speak)

        def clean_up() -> None:
            with suppress(Exception):
                self.cleanup()

        cleaning = threading.Thread(target=clean_up, name="sluice-ending", daemon=True)
        cleaning.start()
        cleaning.join(_GRACE_S)
        with suppress(OSError):
            sys.stderr.flush()
        self._leave(1)


def tell_end(text: str, *, speak: bool = True, trace: str = "") -> None:
    """Says why this rank ends: to the user, to torchrun, and if it is to `speak` for all ranks, in the last line of
    standard output."""
    say(f"{trace}error: {text}")
    tell_torchrun(text)
    if speak:
        print(json.dumps({"error": text}), flush=True)


def tell_torchrun(text: str) -> None:
    """Leaves the reason of this rank's end where torchrun looks for it, so that the summary which it prints last gives
    that reason, too."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        text = f"error: {text}"
        about = {
            "message": text,
            "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
        }
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": about}))
