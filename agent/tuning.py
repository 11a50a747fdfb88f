"""Tunes one run from its first batch to its end, and writes its run folder: `TunedRun`.

A `TunedRun` has no reference to the loader, only to its `Tunable`, and it ends in its own thread. So a program may drop
its loader at any moment without closing it. The garbage collector may then run anywhere, also while a lock is held.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sluice.agent import policies
from sluice.agent.controller import Controller
from sluice.agent.costs.rates import PipelineRates
from sluice.agent.policies import MODES
from sluice.agent.report.format import percent, seconds
from sluice.agent.report.headroom import NO_STEP, NOISE
from sluice.agent.report.run_folder import Line, RunFolder
from sluice.agent.runtime.ticker import Ticker
from sluice.agent.runtime_settings import RUNTIME
from sluice.agent.tunable import Policy, Tunable
from sluice.common.lines import say
from sluice.common.suggest import left
from sluice.ingest.knobs import KnobError, Knobs, nearest

_open: weakref.WeakSet[TunedRun] = weakref.WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningStatus:
    """What the tuning does and why. `str` of it is one sentence."""

    mode: str
    """The policy's name."""
    knobs: Knobs
    """The knobs in force."""
    decisions: int = 0
    """The number of changes so far."""
    reason: str = ""
    """The policy's reason for the knobs. Empty before its first look."""
    bottleneck: str | None = None
    """The stage that limits the rate, or `consumer` if the training loop does. None if it is not known yet."""
    settled: bool = False
    """Whether the last ten seconds brought no change."""
    changed_s: float = 0.0
    """Seconds from the request for the first batch to the last change. The run folder's time starts at that request."""
    stopped: str | None = None
    """Why the tuning has stopped. None: it has not."""

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


def advice(measured: PipelineRates, stall: float, tuning: TuningStatus) -> str:
    """Says how much a faster loader would bring at most, and what would help. `stall` is the share of waiting that the
    run's last line has."""
    waited = f"the trainer waited {percent(stall)} of its time"
    if stall < NOISE:
        return f"{waited}: a faster loader brings nothing"
    share, slowest = max(
        (stage.busy / stage.workers, name) for name, stage in measured.stages.items()
    )
    gain = 1 / max(1 - stall, 1e-9)
    most = f", without that it takes {gain:.2g} times the rows" if gain < NO_STEP else ""
    what = "only more cores or --workers on other hosts help"
    if measured.cpu_quota - measured.cpu >= 1:
        what = f"try --tuning auto, or --knobs {slowest}={measured.stages[slowest].workers + 1}"
        if tuning.mode not in ("fixed", "shadow"):
            what = "the agent is still tuning, so give it more --seconds"
            if tuning.settled:
                what = "the agent has settled and predicts no gain from other knobs"
    return (
        f"{waited}{most}; the busiest workers are those of {slowest} ({percent(min(share, 1.0))}), with "
        f"{measured.cpu:.1f} of {measured.cpu_quota:.3g} cores in use: {what}"
    )


def policy_of(tuning: str | Policy) -> Policy:
    """Returns the policy of this name, or the given policy itself. Raises KnobError for anything else."""
    if isinstance(tuning, str):
        tuning = policies.renamed(tuning)
        if tuning not in MODES:
            raise KnobError(
                f"tuning: {tuning!r} is none of {', '.join(MODES)}{left(tuning) or nearest(tuning, MODES)}; "
                "or give a policy of your own"
            )
        return policies.make(tuning)
    if not isinstance(tuning, Policy):
        raise KnobError(
            f"tuning: {tuning!r} is no policy: derive one from sluice.agent.tunable.Policy, with a name, "
            f"initial(limits, knobs) and decide(snapshot, state); or give one of {', '.join(MODES)}"
        )
    return tuning


class TunedRun:
    """Tunes one run: it looks some times a second and lets the policy change the knobs. A `folder` gets the record."""

    def __init__(
        self,
        tunable: Tunable,
        policy: Policy,
        *,
        folder: RunFolder | None = None,
        outcome: Callable[[], Mapping[str, Any]] = dict,
        listen: Callable[[dict[str, Any]], None] = lambda _line: None,
        learned: Line | None = None,
        interval_s: float = RUNTIME.interval_s,
    ) -> None:
        """`outcome` returns the run's figures for the event `end`, the folder's last one. This object closes the
        folder. `listen` also gets each event and measurement. `learned`: see `Controller`."""
        self._tunable = tunable
        self._policy = policy
        self._folder = folder
        self._is_full = False
        self._outcome = outcome
        self._listen = listen
        self.controller = Controller(
            tunable,
            policy,
            record=self.record,
            observe=self._observe,
            looks=None if folder is None else functools.partial(self._write, RunFolder.look),
            interval_s=interval_s,
            learned=learned,
        )
        self.report: Path | None = None
        """The page in the folder, once it is written."""
        # The thread holds this lock while the controller looks and decides.
        self._mutex = threading.RLock()
        self._ticker = Ticker(
            "sluice-agent", lambda: self.controller.wait_s, self._step, self._finish
        )
        self._ending = False
        self._final: TuningStatus | None = None  # The status at the end of the run.
        self._pid = os.getpid()
        self._began: float | None = None
        self._changed_s = 0.0
        self._error: str | None = None
        _open.add(self)

    def start(self) -> None:
        """Starts the tuning. Does nothing if it has started or ended already, or in a forked process."""
        if self._ticker.started or os.getpid() != self._pid:
            return
        # With the lock, `close` in another thread sees either a running thread or one that will never start.
        with self._mutex:
            if not self._ending:
                self._began = time.monotonic()
                if self._folder is not None:
                    self._folder.begin()
                self._ticker.start()

    def _step(self) -> bool:
        with self._mutex:
            self.controller.step()
        return True

    def turn(self, knobs: Knobs) -> None:
        """Applies the knobs of the user. From now on, the policy no longer changes the knobs."""
        with self._mutex if os.getpid() == self._pid else contextlib.nullcontext():
            self._tunable.apply(knobs)
            if self._policy.name != "fixed":
                self.controller.hand_over("as the knobs were turned by hand")

    @property
    def status(self) -> TuningStatus:
        """What the tuning does now, or did at its end."""
        if self._final is not None:
            return self._final
        controller = self.controller
        reason = controller.reason
        return TuningStatus(
            mode=self._policy.name,
            knobs=self._tunable.knobs,
            decisions=controller.decisions,
            reason="" if reason is None else reason.text,
            bottleneck=None if reason is None else reason.bottleneck,
            settled=reason is not None
            and self._began is not None
            and time.monotonic() - self._began - self._changed_s > RUNTIME.settled_s,
            changed_s=self._changed_s,
            stopped=controller.frozen,
        )

    # ---- the record

    def record(self, event: dict[str, Any]) -> None:
        """Writes an event. If the folder can no longer be written, one line says so, and the run goes on."""
        self._listen(event)
        if event.get("kind") == "decision" and self._began is not None:
            self._changed_s = time.monotonic() - self._began
        self._write(RunFolder.event, event)

    def end_epoch(self, epoch: int, order_hash: str) -> None:
        """Records that the consumer has taken an epoch's last batch."""
        self.record({"kind": "epoch", "epoch": epoch, "order_hash": order_hash})

    def _observe(self, metric: dict[str, Any]) -> None:
        self._listen(metric)
        self._write(RunFolder.metric, metric)

    def _write(self, put: Callable[[RunFolder, Line], None], line: Line) -> None:
        """Writes a line to the folder. If that fails, says so once and writes no more."""
        folder = self._folder
        if folder is None or self._is_full or os.getpid() != self._pid:
            return
        try:
            put(folder, line)
        except OSError as error:
            self._is_full = True
            path = error.filename or folder.path
            say(
                f"{path}: nothing more is written there ({error.strerror or error}); the run goes on"
            )

    def figures(self) -> dict[str, Any]:
        """Returns what the tuning did, for a record of the run."""
        controller = self.controller
        return {
            "decisions": controller.decisions,
            "knobs": self._tunable.knobs.to_dict(),
            "tuning": self._policy.name,
        }

    # ---- the end

    def failed(self, error: BaseException | None) -> None:
        """Keeps the error that ended the run, for its last event."""
        if error is not None:
            self._error = f"{type(error).__name__}: {error}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.failed(error[1])
        self.close()

    def abandon(self) -> None:
        """Asks for the end without waiting for it, or for any lock."""
        self._ending = True
        self._ticker.abandon()

    def close(self) -> None:
        """Ends the tuning and the record in the run folder, and waits for both. A second call does nothing."""
        self.abandon()
        if os.getpid() != self._pid:
            return
        with self._mutex:
            started = self._ticker.started
        if started:
            self._ticker.stop()
        else:
            self._finish()

    def _finish(self) -> None:
        """Ends the controller, and writes the folder's last event and its page. A second call does nothing."""
        with self._mutex:
            if self._final is not None:
                return
            self._final = self.status
            self.controller.stop()
        if self._folder is None:
            return
        folder = self._folder
        if self._began is None:
            # No batch was requested, so there is nothing to record.
            folder.close()
            return
        end = {"kind": "end", **self.figures(), **self._outcome()}
        self._write(RunFolder.event, {**end, "error": self._error} if self._error else end)
        folder.close()
        # Imported here, because a first batch does not need the report.
        from sluice.agent.report import page

        self.report = page.written(folder.path, say)


@atexit.register
def _close_all() -> None:
    """Ends all runs that are still open when the program ends."""
    for run in list(_open):
        run.close()
