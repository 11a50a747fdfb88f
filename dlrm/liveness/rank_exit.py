"""How a rank ends when its main thread cannot: it says why, gives back what others would miss, and is gone."""

from __future__ import annotations

import json
import os
import select
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

_FAILED = 1
_GRACE_S = 3.0


class RankExit:
    """Whoever ends the process first has the last word: the main thread, after `mine()`, or another one by `leave`."""

    def __init__(self, *, first: bool, leave: Callable[[int], None] = os._exit) -> None:
        self.before: list[Callable[[], None]] = []
        """What is done before the process is gone, the last one first; what hangs is left after a while."""
        self.first = first
        """Whether its words are those of all ranks: a line of JSON on standard output is among them."""
        self._leave = leave
        self._word = threading.Lock()

    def mine(self) -> None:
        """The main thread goes on to end the process. It comes back only if no other thread does so."""
        self._word.acquire()

    def leave(self, text: str, *, speak: bool | None = None) -> None:
        """Ends the process with 1, from any thread, unless the main thread is about to. `speak`: instead of `first`."""
        if not self._word.acquire(blocking=False):
            return
        with suppress(OSError):  # whoever read it may be gone
            print(f"error: {text}", file=sys.stderr, flush=True)
            if self.first if speak is None else speak:
                print(json.dumps({"error": text}), flush=True)
        tidying = threading.Thread(target=self._tidy, name="sluice-ending", daemon=True)
        tidying.start()
        tidying.join(_GRACE_S)
        with suppress(OSError):
            sys.stderr.flush()
        self._leave(_FAILED)

    def _tidy(self) -> None:
        for one in reversed(self.before):
            with suppress(Exception):
                one()


def with_torchrun(ending: RankExit) -> None:
    """As `with_launcher`, if it was torchrun that started this process; a person's shell may go."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with_launcher(ending)


def with_launcher(ending: RankExit) -> None:
    """From now on this process ends soon after the one that started it, should that be killed outright: torchrun tells
    its ranks only of an end that it lives to see. A thread waits for it; the system's own signal for this would come
    when the thread that started us ends, which torchrun's may at any time."""
    launcher = os.getppid()
    try:
        descriptor = os.pidfd_open(launcher)
    except OSError:  # it is gone already
        descriptor = -1

    def wait() -> None:
        if descriptor >= 0 and os.getppid() == launcher:
            select.select([descriptor], [], [])
        ending.leave(f"process {launcher}, which started this one, is gone, so this one ends, too; a checkpoint that "
                     "was complete stays, and --resume goes on from there")

    threading.Thread(target=wait, name="sluice-launcher", daemon=True).start()
