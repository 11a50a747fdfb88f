"""The loop around a policy: it owns the clock and the log, and the policy owns the choice.

Whatever fails in here (the policy, the pipeline, a counter, the log) freezes the knobs as they are, is recorded once,
and never reaches the training loop. Limits that moved under a decision are no failure: the policy begins again.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sluice.agent.costs.rates import PipelineRates, rates
from sluice.agent.planner_settings import DEFAULT
from sluice.agent.runtime.change_detector import ChangeDetector
from sluice.agent.runtime.ticker import Ticker
from sluice.agent.runtime_settings import RUNTIME
from sluice.agent.tunable import Policy, Reason, Tunable
from sluice.ingest.knobs import KnobError, Knobs, Limits
from sluice.ingest.stats import Snapshot

_MINUTE_S = 60.0


class Controller:
    """Looks, decides, applies and logs every `interval_s`, or sooner if the policy asks for it. `step()` is one tick;
    `start()` runs ticks in a thread.

    `record` gets events (decision, effect, proposal, occasion, verdict, fault), `observe` each tick's loader metrics.
    Once `changes_a_minute` were made within the last minute, the policy is not asked until one of them is older. It is
    not asked either while the pipeline starts up, and begins anew after that."""

    def __init__(
        self,
        tunable: Tunable,
        policy: Policy,
        *,
        record: Callable[[dict[str, Any]], None],
        observe: Callable[[dict[str, Any]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = RUNTIME.interval_s,
        changes_a_minute: int = RUNTIME.changes_a_minute,
        learned: Mapping[str, Any] | None = None,
    ) -> None:
        """`learned` is what `learned()` returned in an earlier process on such a machine."""
        if interval_s <= 0:
            raise ValueError(f"interval_s: {interval_s!r} is not above 0")
        self._tunable = tunable
        self._policy = policy
        self._clock = clock
        self._record_to, self._observe_to = record, observe
        self.interval_s = self.wait_s = interval_s
        """`wait_s` is how many seconds the next look is away."""
        self.ticks = 0
        """How many snapshots were looked at."""
        self.decisions = 0
        """How many changes were made."""
        self.opening: dict[str, Any] | None = None
        """How the pipeline was opened, once the run has ended: in a sentence, whether that was put in force, and the
        rate that was promised. None if nobody was asked."""
        self.frozen: str | None = None
        """Why nothing is decided any more; None while all is well."""
        self.cost_s = 0.0
        """Processor time of the loop's own thread."""
        self._last_step: float | None = None
        self._limits: Limits | None = None
        self._state: Any = None
        self._anew = False
        """Whether the policy starts from its first state at the next look, as the run itself has only begun."""
        self._learned_before = self._learned = learned
        self._change_detector = ChangeDetector()
        self._starting = False
        """Whether no row has come by the second look or later: compilers may be at work, so what is seen says
        little."""
        self._last: Snapshot | None = None
        self._recent: deque[Snapshot] = deque(maxlen=RUNTIME.window_looks)
        """The looks since the last change, with enough done between them."""
        self._unlogged: tuple[int, PipelineRates | None, float | None] | None = None
        """The decision whose effect is not logged yet: its number, the rates before it, and the rate it predicted."""
        self._change_times: deque[float] = deque(
            maxlen=changes_a_minute
        )  # when the last changes were made
        self._proposed: deque[Reason] = deque(
            maxlen=64
        )  # each is recorded once, and later repeated unchanged
        self._reason: Reason | None = None
        self._last_of_rows: Reason | None = None
        """That of the last look before which rows came; at the end of a run it is the verdict."""
        self._ticker = Ticker("sluice-agent", lambda: self.wait_s, self._timed_step)

    def step(self) -> None:
        """One tick. Does nothing if the last was less than `wait_s` ago; never raises."""
        moment = self._clock()
        if (
            self._last_step is not None
            and moment - self._last_step < RUNTIME.early_share * self.wait_s
        ):
            return
        self._last_step = moment
        try:
            self._tick()
        except Exception as error:
            self._freeze(error)

    def _tick(self) -> None:
        snapshot = self._measure()
        if snapshot is not None and self.frozen is None and not self._starting:
            self._decide(snapshot)

    def _measure(self) -> Snapshot | None:
        """Measures, and returns what was seen if enough was done since what was returned before it."""
        snapshot, before = self._tunable.snapshot(), self._last
        if before is not None and (
            snapshot.sequence == before.sequence or snapshot.at == before.at
        ):
            return None  # nothing new: ranks publish more slowly than this loop looks, or the trainer rests
        self.ticks, self._last = self.ticks + 1, snapshot
        measured = rates(before, snapshot) if before is not None else None
        began = before is not None and not before.rows
        was_starting, self._starting = self._starting, self.ticks > 1 and not snapshot.rows
        if was_starting and not self._starting:
            # Everything begins anew, as if the run began now.
            self._change_detector, self._anew = ChangeDetector(), True
        for occasion in () if self._starting else self._change_detector.look(snapshot, measured):
            self._record_to(occasion)
        if measured is not None and self._observe_to is not None:
            self._observe_to(
                {**self._metric(measured, snapshot), **({"began": True} if began else {})}
            )
        if before is not None and (
            snapshot.cpu_quota != before.cpu_quota or was_starting or self._starting
        ):
            self._recent.clear()  # rates at other cores, or of the start, cannot be compared
        if self._recent and not enough(self._recent[-1], snapshot):
            return None
        self._recent.append(snapshot)
        if self._unlogged is not None and len(self._recent) > RUNTIME.effect_looks:
            self._log_effect()
        return snapshot

    def _decide(self, snapshot: Snapshot) -> None:
        before = self._tunable.knobs
        if self._anew or self._tunable.limits != self._limits:  # the start, or another machine
            self._begin(self._tunable.limits, before)
        if (
            len(self._change_times) == self._change_times.maxlen
            and self._clock() - self._change_times[0] < _MINUTE_S
        ):
            return
        after, self._state, reason = self._policy.decide(snapshot, self._state)
        self.wait_s = min(self.interval_s, self._policy.next_look_s(self._state) or self.interval_s)
        recorded = next((r for r in self._proposed if r.proposal == reason.proposal), None)
        self._reason = recorded or reason
        if len(self._recent) < 2 or snapshot.rows > self._recent[-2].rows:
            self._last_of_rows = self._reason
        measured = rates(self._recent[0], snapshot)
        if reason.proposal is not None and recorded is None:
            self._proposed.append(reason)
            self._record_to(
                {"kind": "proposal", **_choice(before, reason.proposal, reason, measured)}
            )
        if after == before or not self._apply(after) or _alike(before, after):
            return
        if self._unlogged is not None:
            self._log_effect()
        self.decisions += 1
        self._change_times.append(self._clock())
        self._unlogged = (
            self.decisions,
            rates(self._comparable(snapshot), snapshot),
            reason.predicted_rows_per_s,
        )
        self._recent.clear()
        self._recent.append(snapshot)
        self._record_to(
            {
                "kind": "decision",
                "sequence": self.decisions,
                **_choice(before, after, reason, measured),
            }
        )

    def _comparable(self, snapshot: Snapshot) -> Snapshot:
        """The look from which on the rate says what the present knobs do. Before the first rows there is none, and for
        a while after them compilers, first files and connections are part of it: the later half is nearer the truth."""
        begun = [s for s in self._recent if s.rows]
        if not begun:
            return snapshot
        return begun[(len(begun) - 1) // 2] if self.decisions == 1 else _first_of_its_own(begun)

    def _begin(self, limits: Limits, knobs: Knobs) -> None:
        """Starts the policy with what an earlier run has learned, unless that was used already. A policy that cannot
        use it leaves it for the next one. Another thread that reads what was learned gets the old or the new answer."""
        learned = self._learned_before if self._anew else self._learned
        state, recalled = self._policy.initial(limits, knobs), None
        if learned is not None:
            try:
                recalled = self._policy.recall(state, learned)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                learned = self._learned_before = None
                self._record_to(
                    {
                        "kind": "fault",
                        "where": "agent",
                        "text": "what was learned in an earlier run is "
                        f"ignored: {type(error).__name__}: {error}",
                    }
                )
        self._state = state if recalled is None else recalled
        self._limits, self._anew = limits, False
        self._learned = learned if recalled is None else None

    def _apply(self, knobs: Knobs) -> bool:
        """Applies the knobs; returns whether they are in force. If the limits have changed meanwhile, the policy starts
        anew."""
        assert self._limits is not None
        try:
            self._limits.check(knobs)
            self._tunable.apply(knobs)
        except KnobError:
            if self._tunable.limits == self._limits:
                raise
            self._limits = None
            return False
        return True

    def _log_effect(self) -> None:
        assert self._unlogged is not None
        sequence, before, predicted = self._unlogged
        self._unlogged = None
        window = list(self._recent)
        after = rates(_first_of_its_own(window), window[-1])
        if after is None:
            return
        # Some came right after the start: then there is no earlier rate to compare with.
        self._record_to(
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
        """Logs what the policy knows at the end, if it can explain it, and how it opened."""
        opened = self._policy.opened(self._state) if self._limits else None
        if opened is not None:
            record = opened["record"]
            self.opening = {
                "text": opened["text"],
                "tried": record["tried"],
                "rows_per_s": record["opening"]["rows_per_s"],
            }
            self._record_to({"kind": "opening", **opened})
        if (last := self._last_of_rows) is not None:
            explained = self._policy.explain(self._state) if self._limits else None
            self._record_to(
                {
                    "kind": "verdict",
                    "text": last.text,
                    "bottleneck": last.bottleneck,
                    "cost_s": self.cost_s,
                    "details": last.details if explained is None else explained,
                }
            )

    def _metric(self, measured: PipelineRates, snapshot: Snapshot) -> dict[str, Any]:
        stages = {
            name: {
                "busy": s.busy,
                "cpu": s.cpu,
                "rows_per_s": s.rows_per_s,
                "workers": s.workers,
                "queue_bytes": s.queue_bytes,
                "core_wait": s.core_wait,
            }
            for name, s in measured.stages.items()
        }
        return {
            "kind": "loader",
            "rows": snapshot.rows,
            "rows_per_s": measured.rows_per_s,
            "stall": measured.stall,
            "away": measured.away,
            "demand_rows_per_s": measured.demand_rows_per_s,
            "memory_used": measured.memory_used,
            "memory_limit": measured.memory_limit,
            "cpu": measured.cpu,
            "held_back": snapshot.held_back,
            "held_back_pressure": snapshot.held_back_pressure,
            **({"elsewhere": snapshot.elsewhere} if snapshot.elsewhere else {}),
            "cpu_quota": measured.cpu_quota,
            "knobs": self._tunable.knobs.to_dict(),
            "stages": stages,
        }

    @property
    def reason(self) -> Reason | None:
        """Why the policy chose as it did last; None before it was asked, and after the end."""
        return self._reason

    def hand_over(self, reason: str) -> None:
        """Leaves the knobs to somebody else from now on; what happens is looked at and recorded as before."""
        if self.frozen is None:
            self.frozen, self.wait_s = reason, self.interval_s
            self._record_to(
                {"kind": "hand-over", "text": f"the agent leaves the knobs alone, {reason}"}
            )

    def _freeze(self, error: Exception) -> None:
        if self.frozen is not None:
            return
        self.wait_s = self.interval_s
        self.frozen = f"{type(error).__name__}: {error}"
        text = f"tuning stopped, the knobs stay as they are: {self.frozen}"
        try:
            self._record_to({"kind": "fault", "text": text, "where": "agent"})
        except Exception as unrecorded:
            print(f"{text} (and it could not be recorded: {unrecorded})", file=sys.stderr)

    def learned(self) -> Mapping[str, Any] | None:
        """What the policy has learned so far, as plain data, or what it was given and could not use yet; None if
        nothing."""
        learned = self._policy.learned(self._state) if self._limits else None
        return self._learned if learned is None else learned

    def start(self) -> Controller:
        """Runs ticks in a separate thread until `stop()`."""
        self._ticker.start()
        return self

    def _timed_step(self) -> bool:
        self.step()
        self.cost_s = time.thread_time()
        return True

    def stop(self) -> None:
        """Ends the thread and logs the effect of the last change. May be called twice, and without `start()`."""
        self._ticker.stop()
        try:
            if self.ticks == 1:
                self._measure()  # so that a run that ends before the second tick has been measured, too
            if self._unlogged is not None and len(self._recent) > 1:
                self._log_effect()
            if self.frozen is None:
                self._log_verdict()
            self._reason = self._last_of_rows = None
        except Exception as error:
            self._freeze(error)

    def __enter__(self) -> Controller:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _first_of_its_own(looks: Sequence[Snapshot]) -> Snapshot:
    """The look from which on the rate is that of a change: the first after it still shows the old setting, and is left
    out where there are others."""
    return looks[1 if len(looks) > 2 else 0]


def _alike(before: Knobs, after: Knobs) -> bool:
    """Whether both set the pipeline alike: the workers of a fused stage are those before it."""

    def plain(knobs: Knobs) -> tuple[Any, ...]:
        return (
            {stage: count for stage, count in knobs.workers.items() if stage not in knobs.fused},
            {stage: backend for stage, backend in knobs.backend.items() if backend != "thread"},
            knobs.fused,
            knobs.read_ahead_bytes,
            knobs.prefetch_bytes,
        )

    return plain(before) == plain(after)


def _rates_event(measured: PipelineRates | None) -> dict[str, Any]:
    if measured is None:
        return {}
    return {
        "rows_per_s": measured.rows_per_s,
        "stall": measured.stall,
        "cpu": measured.cpu,
        "memory_used": measured.memory_used,
        "memory_limit": measured.memory_limit,
        "busy": {name: stage.busy for name, stage in measured.stages.items()},
    }


def _choice(
    before: Knobs, after: Knobs, reason: Reason, measured: PipelineRates | None
) -> dict[str, Any]:
    return {
        "before": before.to_dict(),
        "after": after.to_dict(),
        "seen": _rates_event(measured),
        "reason": {
            "text": reason.text,
            "bottleneck": reason.bottleneck,
            "predicted_rows_per_s": reason.predicted_rows_per_s,
            "details": reason.details,
        },
    }


def enough(earlier: Snapshot, later: Snapshot) -> bool:
    """Whether every stage that was at work, and the consumer, finished so many items that their number says how fast
    they are. An item under way counts with its elapsed time alone, so that items of seconds are waited for: between two
    looks a second apart most would see none finish, and some as many as there are workers."""
    seconds = later.at - earlier.at
    memory_is_short = later.memory_used > DEFAULT.memory_alarm * later.memory_limit
    if seconds <= 0 or later.cpu_quota != earlier.cpu_quota or memory_is_short:
        return True
    before = {stage.name: stage for stage in earlier.stages}
    work = [
        (then.busy_s, then.items, now.busy_s, now.items)
        for now in later.stages
        if (then := before.get(now.name)) is not None
    ]
    work.append(
        (earlier.consumer_compute_s, earlier.batches, later.consumer_compute_s, later.batches)
    )
    return all(_enough(seconds, *counters) for counters in work)


def _enough(
    seconds: float, busy_s: float, items: int, busy_s_after: float, items_after: int
) -> bool:
    """Whether one stage did: the seconds of useful work and the items so far, then and now."""
    busy = (busy_s_after - busy_s) / seconds
    usual_s = busy_s / items if items else math.inf
    return (
        busy <= RUNTIME.idle_workers
        or items_after - items >= RUNTIME.min_items * busy
        or seconds
        > min(
            RUNTIME.longest_s,
            RUNTIME.overdue_s + RUNTIME.overdue_ratio * RUNTIME.min_items * usual_s,
        )
    )
