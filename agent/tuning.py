"""The tuning of one run from its first batch to its end, with the run folder that it leaves: `TunedRun`.

It holds what it tunes by the `Tunable` alone, and ends in a thread of its own, so that whoever owns the loader may
forget both at any moment: the garbage collector may run anywhere, also where a lock is held.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sluice.agent import policies
from sluice.agent.controller import Controller
from sluice.agent.policies import MODES
from sluice.agent.policies.opening.contract import Foreknowledge
from sluice.agent.report import page
from sluice.agent.report.format import seconds
from sluice.agent.report.run_folder import RunFolder
from sluice.agent.runtime_settings import RUNTIME
from sluice.agent.tunable import Policy, Tunable
from sluice.ingest.knobs import KnobError, Knobs, nearest

_open: weakref.WeakSet[TunedRun] = weakref.WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningStatus:
    """What the tuning does and why; as text, one sentence."""

    mode: str
    """The policy's name."""
    knobs: Knobs
    """The knobs in force."""
    decisions: int = 0
    """How many changes were made."""
    reason: str = ""
    """Why the knobs are as they are, in the policy's words; empty before its first look."""
    bottleneck: str | None = None
    """The stage that bounds the rate, `consumer` if the training loop does, None if not known yet."""
    settled: bool = False
    """Whether nothing was changed for ten looks, which come once a second."""
    changed_s: float = 0.0
    """Seconds from when the first batch was asked for, with which the run folder's time begins, to the last change."""
    stopped: str | None = None
    """Why nothing is tuned any more; None while it is."""

    def __str__(self) -> str:
        if self.stopped is not None:
            return f"not tuned any more, {self.stopped}: {self.knobs}"
        if self.mode == "fixed":
            return f"fixed at {self.knobs}"
        if not self.reason:
            return f"{self.mode}: tuning begins with the first batch, at {self.knobs}"
        made = (
            "without a change"
            if not self.decisions
            else f"{seconds(self.changed_s)} after the start, by {self.decisions} change{'s' * (self.decisions > 1)}"
        )
        return f"{self.mode}: {'settled' if self.settled else 'now'} at {self.knobs}, {made}: {self.reason}"

    __repr__ = __str__


def policy_of(tuning: str | Policy, known: Foreknowledge | None = None) -> Policy:
    """The policy that a user names, or gives, for a pipeline of which so much is known before its first row."""
    if isinstance(tuning, str):
        if tuning not in MODES:
            raise KnobError(
                f"tuning: {tuning!r} is none of {', '.join(MODES)}{nearest(tuning, MODES)}; or give a "
                "policy of your own"
            )
        return policies.make(tuning, known)
    if not isinstance(tuning, Policy):
        raise KnobError(
            f"tuning: {tuning!r} is no policy: derive one from sluice.agent.tunable.Policy, with a name, "
            f"initial(limits, knobs) and decide(snapshot, state); or give one of {', '.join(MODES)}"
        )
    return tuning


class TunedRun:
    """Looks once a second, lets the policy turn the knobs, and writes down what happened if a `folder` is given."""

    def __init__(
        self,
        tunable: Tunable,
        policy: Policy,
        *,
        folder: RunFolder | None = None,
        last: Callable[[], Iterable[Mapping[str, Any]]] = tuple,
        interval_s: float = RUNTIME.interval_s,
    ) -> None:
        """`last` returns the events that end the folder's record; to the one of kind `end` are added the decisions, the
        knobs and the policy's name. The folder is closed with this."""
        self._tunable = tunable
        self._policy = policy
        self._folder = folder
        self._last = last
        self._controller = Controller(
            tunable, policy, record=self.record, observe=self._observe, interval_s=interval_s
        )
        self._mutex = threading.RLock()  # held while the controller looks and decides
        # The thread that asks for the end releases this lock. A garbage collector could stop at the lock of an Event.
        self._wake = threading.Lock()
        self._wake.acquire()
        self._ending = False
        self._final: TuningStatus | None = None  # once it is over
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._began: float | None = None
        self._changed_s, self._changed_at = 0.0, 0
        self._error: str | None = None
        _open.add(self)

    def start(self) -> None:
        """Begins to tune; does nothing if it has begun already, or is over, or in a fork of the process that made
        it."""
        if self._thread is not None or os.getpid() != self._pid:
            return
        with (
            self._mutex
        ):  # so that `close` in another thread sees a thread that runs, or none for ever
            if not self._ending:
                self._began = time.monotonic()
                if self._folder is not None:
                    self._folder.begin()
                self._thread = threading.Thread(target=self._run, name="sluice-agent", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._mutex:
                self._controller.step()
            if self._wake.acquire(timeout=self._controller.wait_s):
                break
        self._finish()

    def turn(self, knobs: Knobs) -> None:
        """Applies a person's choice, and leaves the knobs to that person from now on."""
        with self._mutex if os.getpid() == self._pid else contextlib.nullcontext():
            self._tunable.apply(knobs)
            if self._policy.name != "fixed":
                self._controller.hand_over("as the knobs were turned by hand")

    @property
    def status(self) -> TuningStatus:
        if self._final is not None:
            return self._final
        controller, reason = self._controller, self._controller.reason
        return TuningStatus(
            mode=self._policy.name,
            knobs=self._tunable.knobs,
            decisions=controller.decisions,
            reason="" if reason is None else reason.text,
            bottleneck=None if reason is None else reason.bottleneck,
            settled=reason is not None
            and controller.ticks - self._changed_at > RUNTIME.settled_looks,
            changed_s=self._changed_s,
            stopped=controller.frozen,
        )

    # ---- the record

    def record(self, event: Mapping[str, Any]) -> None:
        """Writes an event. If the folder can no longer be written, one line says so, and the run goes on."""
        if event.get("kind") == "decision" and self._began is not None:
            self._changed_s, self._changed_at = (
                time.monotonic() - self._began,
                self._controller.ticks,
            )
        self._write("event", event)

    def end_epoch(self, epoch: int, order_hash: str) -> None:
        """Records that the consumer has taken an epoch's last batch."""
        self.record({"kind": "epoch", "epoch": epoch, "order_hash": order_hash})

    def _observe(self, metric: Mapping[str, Any]) -> None:
        self._write("metric", metric)

    def _write(self, what: str, line: Mapping[str, Any]) -> None:
        folder = self._folder
        if folder is None or os.getpid() != self._pid:
            return
        try:
            getattr(folder, what)(line)
        except OSError as error:
            self._folder = None
            print(
                f"{folder.path}: nothing more is written there ({error.strerror or error}); the run goes on",
                file=sys.stderr,
            )
            with contextlib.suppress(OSError):
                folder.close()

    # ---- the end

    def failed(self, error: BaseException | None) -> None:
        """Notes what ended the run, for its last event."""
        if error is not None:
            self._error = f"{type(error).__name__}: {error}"

    def abandon(self) -> None:
        """Asks for the end without waiting for it, or for any lock."""
        self._ending = True
        with contextlib.suppress(RuntimeError):  # somebody has asked before
            self._wake.release()

    def close(self) -> None:
        """Ends the tuning and the run folder's record; returns when both are done. A second call does nothing."""
        self.abandon()
        if os.getpid() != self._pid:
            return
        with self._mutex:
            thread = self._thread
        if thread is not None:
            thread.join()
        else:
            self._finish()

    def _finish(self) -> None:
        with self._mutex:
            if self._final is not None:
                return
            self._final = self.status
            self._controller.stop()
        if self._folder is not None:
            self._finish_folder(self._folder)

    def _finish_folder(self, folder: RunFolder) -> None:
        if self._thread is None:  # no batch was asked for, so there is nothing to tell
            folder.close()
            return
        for event in self._last():
            more: dict[str, Any] = {}
            if event.get("kind") == "end":
                more = {
                    "decisions": self._controller.decisions,
                    "knobs": self._tunable.knobs.to_dict(),
                    "tuning": self._policy.name,
                    **({"error": self._error} if self._error else {}),
                }
            self.record({**event, **more})
        folder.close()
        page.written(folder.path, functools.partial(print, file=sys.stderr))


@atexit.register
def _close_all() -> None:
    """Ends what a program left open when it ended."""
    for run in list(_open):
        run.close()
