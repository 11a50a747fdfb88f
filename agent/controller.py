"""Runs a policy on a pipeline: `Controller`. The controller owns the clock and the log, and the policy chooses.

An error in the policy, the pipeline, a counter or the log freezes the knobs as they are. It is recorded once and never
reaches the training loop. If the limits change during a decision, that is no error: the policy starts again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from sluice.agent.costs.rates import PipelineRates, rates
from sluice.agent.report.looks import LookWriter
from sluice.agent.runtime.incident_watch import IncidentWatch, incident
from sluice.agent.runtime.ticker import Ticker
from sluice.agent.runtime_settings import RUNTIME
from sluice.agent.tunable import Policy, Reason, Tunable
from sluice.common.lines import say
from sluice.ingest.knobs import KnobError, Knobs, Limits
from sluice.ingest.stats import Snapshot

_MINUTE_S = 60.0
_SAME_S = 1e-6  # two times that differ by less are the same


class Controller:
    """Looks, decides, applies and logs as often as the policy asks for it, and once in `interval_s` at least.

    `step()` is one tick. `start()` runs ticks in a thread. `record` gets the events: decision, effect, proposal,
    incident (a change that no decision caused), verdict, note, fault. `observe` gets the loader's metrics once in
    `interval_s`. `looks` gets what the policy is asked, with its choice.

    After `changes_a_minute` changes within a minute, the policy is not asked until one of them is older than that. The
    policy is asked from the first look on, also before the first batch."""

    def __init__(
        self,
        tunable: Tunable,
        policy: Policy,
        *,
        record: Callable[[dict[str, Any]], None],
        observe: Callable[[dict[str, Any]], None] | None = None,
        looks: Callable[[Mapping[str, Any]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = RUNTIME.interval_s,
        changes_a_minute: int = RUNTIME.changes_a_minute,
        learned: Mapping[str, Any] | None = None,
    ) -> None:
        """`learned` is the result of `learned()` in an earlier process on such a machine."""
        if interval_s <= 0:
            raise ValueError(f"interval_s: {interval_s!r} is not above 0")
        self._tunable = tunable
        self._policy = policy
        self._clock = clock
        self._record = record
        self._observe = observe
        self._looks = LookWriter(looks)
        self.interval_s = self.wait_s = interval_s
        """`interval_s` is the longest time between looks, and `wait_s` the time until the next one, in seconds."""
        self.ticks = 0
        """The number of snapshots so far."""
        self.decisions = 0
        """The number of changes so far."""
        self.frozen: str | None = None
        """Why the policy is no longer asked. None: it is."""
        self.cost_s = 0.0
        """Processor time of the looks."""
        self._last_step: float | None = None
        self._limits: Limits | None = None
        self._state: Any = None
        self._learned = learned
        self._incidents = IncidentWatch()
        self._last: Snapshot | None = None
        self._metric_from: Snapshot | None = None
        """The look up to which metrics were recorded."""
        self._recent: deque[Snapshot] = deque()
        """The latest looks since the last change of knobs or cores."""
        self._fresh_until = 0.0
        """Until then, rates may still be those of the knobs before."""
        self._pending_effect: tuple[int, PipelineRates | None, float | None] | None = None
        """The decision whose effect is not logged yet: its number, the rates before it, and the rate that it
        predicted."""
        self._change_times: deque[float] = deque(maxlen=changes_a_minute)
        # Each proposal is recorded once. If the policy repeats it, the first reason for it stays.
        self._recorded_proposals: deque[Reason] = deque(maxlen=64)
        self._reason: Reason | None = None
        self._last_reason_with_rows: Reason | None = None
        """The reason at the last look that saw new rows. It is the verdict at the end of a run."""
        self._ticker = Ticker("sluice-agent", lambda: self.wait_s, self._step_on)

    def step(self) -> None:
        """Runs one tick, unless the last one was less than `wait_s` ago. Never raises."""
        moment = self._clock()
        if (
            self._last_step is not None
            and moment - self._last_step < RUNTIME.early_share * self.wait_s
        ):
            return
        self._last_step, began = moment, time.thread_time()
        try:
            self._tick()
        except Exception as error:
            self._freeze(error)
        self.cost_s += time.thread_time() - began

    def _tick(self) -> None:
        """Measures, and lets the policy decide if it may."""
        snapshot = self._measure()
        if snapshot is not None and self.frozen is None:
            self._decide(snapshot)

    def _measure(self) -> Snapshot | None:
        """Takes a snapshot and records it. Returns it if it is new."""
        snapshot = self._tunable.snapshot()
        before = self._last
        if before is not None and (
            snapshot.sequence == before.sequence or snapshot.at == before.at
        ):
            # Nothing is new: the ranks publish more slowly than this loop looks, or the trainer pauses.
            return None
        self.ticks += 1
        self._last = snapshot
        # Before the first batch, compilers may be at work.
        for event in self._incidents.look(snapshot) if snapshot.rows else ():
            self._record(event)
        self._record_metric(snapshot, RUNTIME.early_share * self.interval_s)
        if before is not None and snapshot.cpu_quota != before.cpu_quota:
            # Rates with another number of cores cannot be compared.
            self._recent.clear()
        self._recent.append(snapshot)
        recent = self._recent
        while len(recent) > 2 and has_finished_enough(recent[1], snapshot):
            recent.popleft()
        if self._pending_effect is not None and has_finished_enough(self._own_start(), snapshot):
            self._log_effect()
        return snapshot

    def _record_metric(self, snapshot: Snapshot, after_s: float) -> None:
        """Records the rates since the last metric, if that is some time ago."""
        before = self._metric_from
        if before is not None and snapshot.at - before.at < after_s:
            return
        self._metric_from = snapshot
        measured = rates(before, snapshot) if before is not None else None
        if measured is not None and self._observe is not None:
            self._observe(self._loader_metric(measured, snapshot))

    def _decide(self, snapshot: Snapshot) -> None:
        """Asks the policy, and applies and logs its choice."""
        before = self._tunable.knobs
        limits = self._tunable.limits
        if limits != self._limits:
            self._start_policy(limits, before)
        if (
            len(self._change_times) == self._change_times.maxlen
            and self._clock() - self._change_times[0] < _MINUTE_S
        ):
            return
        try:
            after, self._state, reason = self._policy.decide(snapshot, self._state)
        except Exception as error:
            self._looks.failed(snapshot, before, error)
            raise
        self._looks.decided(snapshot, after, reason.proposal, reason.choice)
        self.wait_s = min(self.interval_s, self._policy.next_look_s(self._state) or self.interval_s)
        if reason.incident is not None:
            self._record(incident("workload", **reason.incident))
        recorded = next(
            (r for r in self._recorded_proposals if r.proposal == reason.proposal), None
        )
        self._reason = recorded or reason
        if len(self._recent) < 2 or snapshot.rows > self._recent[-2].rows:
            self._last_reason_with_rows = self._reason
        measured = rates(self._recent[0], snapshot)
        if reason.proposal is not None and recorded is None:
            self._recorded_proposals.append(reason)
            self._record(
                {"kind": "proposal", **_choice_event(before, reason.proposal, reason, measured)}
            )
        if limits.complete(before) == limits.complete(after):  # the same pipeline
            return
        self._record_metric(snapshot, 0.0)  # so that each metric is of one setting
        if not self._apply(after):
            return
        if self._pending_effect is not None:
            self._log_effect()
        self.decisions += 1
        self._change_times.append(self._clock())
        self._pending_effect = (
            self.decisions,
            self._rates_before(snapshot),
            reason.predicted_rows_per_s,
        )
        self._recent.clear()
        self._recent.append(snapshot)
        self._fresh_until = snapshot.at + RUNTIME.fresh_s
        self._record(
            {
                "kind": "decision",
                "sequence": self.decisions,
                **(reason.choice or {}),
                **_choice_event(before, after, reason, measured),
            }
        )

    def _rates_before(self, snapshot: Snapshot) -> PipelineRates | None:
        """Returns the rates of the knobs before a decision.

        At the first decision, compilers, first files and connections are part of the earlier looks. So the later half
        counts, if any item has ended in it."""
        if self.decisions > 1:
            return rates(self._own_start(), snapshot)
        looks = [s for s in self._recent if any(stage.rows for stage in s.stages)]
        if len(looks) < 2:
            looks = list(self._recent)
        late = rates(looks[(len(looks) - 1) // 2], snapshot)
        return late if late is not None and late.rows_per_s else rates(self._recent[0], snapshot)

    def _own_start(self) -> Snapshot:
        """Returns the first look at which rates are those of the present knobs, or else the first one."""
        earlier = list(self._recent)[:-1]
        return next((s for s in earlier if s.at >= self._fresh_until - _SAME_S), self._recent[0])

    def _start_policy(self, limits: Limits, knobs: Knobs) -> None:
        """Starts the policy from its initial state, or from what an earlier run has learned.

        What was learned is used once. If the policy cannot use it, it stays for the next start. Another thread that
        calls `learned` meanwhile gets the old or the new result."""
        learned, policy = self._learned, self._policy
        state = policy.initial(limits, knobs)
        recalled = None
        if learned is not None:
            try:
                recalled = policy.recall(state, learned)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                learned = None
                self._record(
                    {
                        "kind": "note",
                        "text": "what was learned in an earlier run is ignored, as it has another "
                        f"form: {type(error).__name__}: {error}",
                    }
                )
        self._looks.start(
            policy.name, policy.made_of, limits, knobs, None if recalled is None else learned
        )
        self._state = state if recalled is None else recalled
        self._limits = limits
        self._learned = learned if recalled is None else None

    def _apply(self, knobs: Knobs) -> bool:
        """Applies the knobs and returns whether that worked. If the limits have just changed, the policy starts
        again.

        The knobs name every back end, because a pipeline keeps those that it is not told. A policy that goes back to
        threads may name none."""
        assert self._limits is not None
        try:
            whole = self._limits.complete(self._limits.check(knobs))
            self._tunable.apply(whole)
        except KnobError:
            if self._tunable.limits == self._limits:
                raise
            self._limits = None
            return False
        return True

    def _log_effect(self) -> None:
        """Logs the rates before and after the last decision."""
        assert self._pending_effect is not None
        sequence, before, predicted = self._pending_effect
        self._pending_effect = None
        after = rates(self._own_start(), self._recent[-1])
        if after is None:
            return
        if predicted and after.demand_rows_per_s:
            predicted = min(predicted, after.demand_rows_per_s)  # the trainer takes no more
        # A decision right after the start has no earlier rate to compare with.
        self._record(
            {
                "kind": "effect",
                "sequence": sequence,
                "rows_per_s_before": before and before.rows_per_s,
                "rows_per_s_after": after.rows_per_s,
                "stall_before": before and before.stall,
                "stall_after": after.stall,
                "prediction_error": after.rows_per_s / predicted - 1 if predicted else None,
            }
        )

    def _log_verdict(self) -> None:
        """Logs the last reason with the policy's explanation."""
        if (last := self._last_reason_with_rows) is not None:
            explained = self._policy.explain(self._state) if self._limits else None
            self._record(
                {
                    "kind": "verdict",
                    "text": last.text,
                    "bottleneck": last.bottleneck,
                    "cost_s": self.cost_s,
                    "details": last.details if explained is None else explained,
                }
            )

    def _loader_metric(self, measured: PipelineRates, snapshot: Snapshot) -> dict[str, Any]:
        """Returns the rates of one tick for the log."""
        named = ("busy", "cpu", "rows_per_s", "workers", "queue_bytes", "core_wait")
        rates_of_all = (
            *("rows_per_s", "stall", "away", "demand_rows_per_s"),
            *("memory_used", "memory_limit", "cpu", "cpu_quota"),
        )
        return {
            "kind": "loader",
            "rows": snapshot.rows,
            **{name: getattr(measured, name) for name in rates_of_all},
            "held_back": snapshot.held_back,
            "held_back_pressure": snapshot.held_back_pressure,
            **({"elsewhere": snapshot.elsewhere} if snapshot.elsewhere else {}),
            "knobs": self._tunable.knobs.to_dict(),
            "stages": {
                name: {key: getattr(stage, key) for key in named}
                for name, stage in measured.stages.items()
            },
        }

    @property
    def reason(self) -> Reason | None:
        """The reason for the policy's last choice. None before the policy was asked, and after the end."""
        return self._reason

    def hand_over(self, reason: str) -> None:
        """Stops changing the knobs because somebody else does. Looks and records go on as before."""
        if self.frozen is None:
            self.frozen = reason
            self.wait_s = self.interval_s
            self._record(
                {"kind": "hand-over", "text": f"the agent leaves the knobs alone, {reason}"}
            )

    def _freeze(self, error: Exception) -> None:
        """Stops the tuning because of an error, and records that once."""
        if self.frozen is not None:
            return
        self.wait_s = self.interval_s
        self.frozen = f"{type(error).__name__}: {error}"
        text = f"tuning stopped, the knobs stay as they are: {self.frozen}"
        try:
            self._record({"kind": "fault", "text": text, "where": "agent"})
        except Exception as unrecorded:
            text += f" (and it could not be recorded: {unrecorded})"
        with suppress(BrokenPipeError):
            say(" ".join(["sluice:", *text.split()]))

    def learned(self) -> Mapping[str, Any] | None:
        """Returns what the policy has learned so far, as plain data. None: nothing.

        If the policy could not use the earlier run's knowledge yet, that is returned."""
        learned = self._policy.learned(self._state) if self._limits else None
        return self._learned if learned is None else learned

    def start(self) -> Controller:
        """Runs ticks in a separate thread until `stop()`."""
        self._ticker.start()
        return self

    def _step_on(self) -> bool:
        self.step()
        return True

    def stop(self) -> None:
        """Ends the thread, and logs the effect of the last change and the verdict.

        It may be called twice, and without `start()`."""
        self._ticker.stop()
        try:
            if self.ticks == 1:
                self._measure()  # A run that ends before its second tick gets rates, too.
            if self._last is not None:
                self._record_metric(self._last, 0.0)
            if self._pending_effect is not None and len(self._recent) > 1:
                self._log_effect()
            if self.frozen is None:
                self._log_verdict()
            self._reason = self._last_reason_with_rows = None
        except Exception as error:
            self._freeze(error)

    def __enter__(self) -> Controller:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _choice_event(
    before: Knobs, after: Knobs, reason: Reason, measured: PipelineRates | None
) -> dict[str, Any]:
    """Returns the part of an event that describes a choice of knobs, with the rates that the policy saw."""
    seen = {}
    if measured is not None:
        names = ("rows_per_s", "stall", "cpu", "memory_used", "memory_limit")
        seen = {name: getattr(measured, name) for name in names}
        seen["busy"] = {name: stage.busy for name, stage in measured.stages.items()}
    return {
        "before": before.to_dict(),
        "after": after.to_dict(),
        "seen": seen,
        "reason": {
            "text": reason.text,
            "bottleneck": reason.bottleneck,
            "predicted_rows_per_s": reason.predicted_rows_per_s,
            "details": reason.details,
        },
    }


def has_finished_enough(earlier: Snapshot, later: Snapshot) -> bool:
    """Returns whether the time between two looks is enough for a rate: some seconds, in which every busy stage and the
    consumer have finished some items of each worker. Nothing is waited for without end, because it may hang."""
    seconds = later.at - earlier.at
    if not RUNTIME.window_s <= seconds < RUNTIME.longest_s:
        return seconds >= RUNTIME.longest_s
    before = {stage.name: stage for stage in earlier.stages}
    work = [
        (stage.busy_s - before[stage.name].busy_s, stage.items - before[stage.name].items)
        for stage in later.stages
        if stage.name in before
    ]
    compute_s = later.consumer_compute_s - earlier.consumer_compute_s
    work.append((compute_s, later.batches - earlier.batches))
    return all(items >= RUNTIME.enough_items * busy_s / seconds for busy_s, items in work)
