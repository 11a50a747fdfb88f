"""Finds the incidents of a run: changes that no decision caused, with the agent's reaction and the time to recover.

`find_incidents` returns them. `measured_decisions` returns the decisions with their effects. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.agent.report.format import count, moves, percent, seconds
from sluice.agent.report.run_folder import Line, Run

_RECOVERED_SHARE = 0.95
"""A rate has recovered at this share of the rate at which the run settles afterwards."""
_AS_BEFORE_SHARE = 0.9
"""A rate above this share of the rate before the incident counts as recovered, because the rest may be noise."""
_ALL_CORES_SHARE = 0.9
"""The cores limit the rate if this share of them is in use."""
_MOST_DETECTION_S = 15.0
"""The longest time between an injected fault and the event that noticed it."""
_SAME_CAUSE_S = 5.0
"""Changes of one stage's cost that are noticed this close together have one cause."""
_SHARED_OUTCOME_S = 2.0
"""Incidents this close together have the same outcome, so one does not end the other."""
_HIDDEN_S: Mapping[str, float] = {"workload": 10.0, "store": 10.0}
"""Buffers may hide an incident's cost for this time, so the rate before a decision may be that of full buffers."""
_MOST_SHOWN = 4
"""The most changes of knobs in a sentence."""
_MEAN_OF = 3
"""A rate is the mean of this many metrics."""
NO_STALL = 0.02
"""Up to this share of waiting, the trainer limits the rate."""
SMALL_STALL = 0.1
"""Up to this stall, the input is not the bottleneck."""
_SAME_WAIT = 0.05
"""A peak of waiting that is no higher than this is not mentioned."""
_WHAT = {
    "slow-transform": "workload",
    "slow-store": "workload",
    "cores": "cores",
    "memory-spike": "memory",
    "kill-worker": "worker",
    "kill-remote": "worker",
    "stop-worker": "worker",
    "stall-store": "store",
    "corrupt": "store",
}

Waits = tuple[float, float, float]
GOOD_RESULTS = ("recovered", "as fast as before", "the input keeps up")


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A change that no decision caused, and what followed. It lasts until the next incident."""

    at: float
    label: str
    """A letter for the charts."""
    what: str
    """`cores`, `memory`, `workload`, `schema`, `worker` or `store`."""
    text: str
    """What happened, in words."""
    did: tuple[str, ...]
    """The changes of knobs that the agent made, in words."""
    noticed_s: float | None
    """Seconds until the agent noticed the incident. None if the start of the incident is unknown."""
    noticed: str
    """What the agent noticed, in words. Empty if `text` already says it."""
    changed_s: float | None
    """Seconds until the agent's first change after it had noticed the incident. None: it made none."""
    before: float | None
    """Rows a second before the incident."""
    after: float | None
    """Rows a second at which the run settled after the incident."""
    waited: Waits | None
    """The trainer's share of waiting: before the incident, at its worst, and once settled. None if the run is too
    short."""
    recovered_s: float | None
    """Seconds until the rate `after` was reached for good. None if the run is too short."""
    result: str = ""
    """`recovered`, `as fast as before`, `limited by the cores`, `the input keeps up` or `still slow`. Empty if too
    little was measured."""

    @property
    def sentence(self) -> str:
        """The incident in one sentence, for the report."""
        noticed = f", seen after {seconds(round(self.noticed_s, 2))}" if self.noticed_s else ""
        noticed += f" ({self.noticed})" if self.noticed else ""
        turned = (
            self.did
            if len(self.did) <= _MOST_SHOWN
            else (self.did[0], f"{len(self.did) - 2} more changes", self.did[-1])
        )
        if turned and self.changed_s is not None:
            did = f"; changed after {seconds(round(self.changed_s, 2))} by {', then '.join(turned)}"
        elif self.result in GOOD_RESULTS:
            did = "; no change needed"
        else:
            did = "; no change made"
        waits = ""
        if self.waited is not None:
            before, worst, after = self.waited
            course = [percent(before), percent(worst), percent(after)]
            if worst <= max(before, after) + _SAME_WAIT:
                course = list(dict.fromkeys([percent(before), percent(after)]))
            waits = f"; waiting {' → '.join(course)}"
        rates = (
            f"; {count(self.before)} → {count(self.after)} rows/s"
            if self.before and self.after
            else ""
        )
        if self.recovered_s is None:
            back = ""
        elif self.recovered_s == 0:
            fell = self.before and self.after and self.after < _RECOVERED_SHARE * self.before
            back = ", at once" if fell else ", without a dip below that"
        else:
            back = f", settled after {seconds(self.recovered_s)}"
        result = f": {self.result}" if self.result else ""
        return f"At {seconds(self.at)} {self.text}{noticed}{did}{waits}{rates}{back}{result}."


def find_incidents(run: Run) -> list[Incident]:
    """Returns all incidents in order. Each lasts until the next one, or until the run is resumed."""
    read = (cause for cause in map(_read_cause, run.events) if cause is not None)
    merged = _merge_detections(sorted(read, key=lambda cause: cause["at"]))
    times = [cause["at"] for cause in (*merged, *run.of("start"))]
    return [
        _measure_incident(
            run,
            cause,
            chr(ord("A") + n % 26),
            max((at for at in times if at < cause["at"] - _SHARED_OUTCOME_S), default=0.0),
            min((at for at in times if at > cause["at"] + _SHARED_OUTCOME_S), default=float("inf")),
        )
        for n, cause in enumerate(merged)
    ]


def measured_decisions(run: Run) -> Iterator[tuple[Line, Line | None, str | None]]:
    """Yields all decisions in order, with the measured effect, and the text of an incident that makes the effect
    meaningless, because it came before the measurement.

    A resumed run counts its decisions from 1 again. So an effect belongs to the last decision of its number."""
    decisions = run.of("decision")
    effects = run.of("effect")
    causes = [cause for cause in map(_read_cause, run.events) if cause is not None]
    for i, decision in enumerate(decisions):
        number = decision.get("sequence")
        at = float(decision["at"])
        until = next(
            (d["at"] for d in decisions[i + 1 :] if d.get("sequence") == number), float("inf")
        )
        effect = next(
            (e for e in effects if e.get("sequence") == number and at <= e["at"] <= until), None
        )
        between = (
            cause["text"]
            for cause in causes
            if effect is not None
            and at - _HIDDEN_S.get(cause["what"], 0.0) < cause["at"] <= effect["at"]
        )
        yield decision, effect, next(between, None)


def fault_times(run: Run) -> list[float]:
    """Returns the times of the injected faults."""
    return [
        float(event["at"])
        for event in run.events
        if event.get("kind") == "fault" and "fault" in event
    ]


def _read_cause(event: Line) -> dict[str, Any] | None:
    """Returns the cause of an incident if an event of the run is one.

    `noticed` is the time at which the agent noticed the cause, None if that is unknown. `seen` is what it noticed."""
    kind = event.get("kind")
    at = float(event.get("at", 0.0))
    if kind in ("incident", "occasion"):  # the second word is that of 0.3
        return {
            "at": at,
            "what": event["what"],
            "text": event["text"],
            "noticed": at,
            "seen": "",
            "stage": event.get("stage"),
        }
    if kind == "fault" and "fault" in event:
        name = str(event["fault"]).partition("@")[0].partition("=")[0]
        return {
            "at": at,
            "what": _WHAT.get(name, name),
            "text": f"{event['fault']}: {event['did']}",
            "noticed": None,
            "seen": "",
        }
    if kind == "follow":
        names = [
            f"new {', '.join(new)}"
            for new in [[*event.get("added", ()), *event.get("dense_added", ())]]
            if new
        ]
        names += [
            f"without {', '.join(old)}"
            for old in [[*event.get("dropped", ()), *event.get("dense_dropped", ())]]
            if old
        ]
        text = f"version {event['after']} of the table was adopted ({'; '.join(names) or 'the same columns'})"
        return {"at": at, "what": "schema", "text": text, "noticed": None, "seen": ""}
    return None


def _merge_detections(causes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the causes with each injected fault and its detection by the agent joined into one.

    What the agent first noticed by items under way, it measures once they have ended. That is the same cause."""
    merged: list[dict[str, Any]] = []
    stages: dict[str, float] = {}  # when each stage was last noticed
    for cause in causes:
        stage = cause.get("stage")
        if stage is not None:
            since = cause["at"] - stages.get(stage, -_MOST_DETECTION_S)
            stages[stage] = cause["at"]
            if since < _SAME_CAUSE_S:
                continue
        fault = next(
            (
                earlier
                for earlier in reversed(merged)
                if earlier["what"] == cause["what"]
                and earlier["noticed"] is None
                and cause["at"] - earlier["at"] <= _MOST_DETECTION_S
            ),
            None,
        )
        if fault is not None and cause["noticed"] is not None:
            fault["noticed"] = cause["noticed"]
            fault["seen"] = cause["text"]
        else:
            merged.append(dict(cause))
    return merged


def _measure_incident(run: Run, cause: Line, label: str, begin: float, end: float) -> Incident:
    """Returns the incident of a cause. `begin` is the time of the incident before it, `end` of the next one."""
    at = cause["at"]
    metrics = [metric for metric in run.looks() if metric.get("rows_per_s") is not None]
    before = [metric for metric in metrics if begin < metric["at"] <= at][-5:]
    following = [metric for metric in metrics if at < metric["at"] <= end]
    decisions = [decision for decision in run.of("decision") if at < decision["at"] <= end]
    last = settled_of(following, since=decisions[-1]["at"] if decisions else at)
    settled, recovered_s = recovery(
        at, [(metric["at"], metric["rows_per_s"]) for metric in following], last
    )
    waited: Waits | None = None
    if settled is not None and before:
        stalls = [metric["stall"] for metric in following]
        waited = (
            _mean([metric["stall"] for metric in before]),
            max(_mean(stalls[n : n + _MEAN_OF]) for n in range(len(stalls) - _MEAN_OF + 1)),
            _mean(stalls[-last:]),
        )
    noticed = cause["noticed"]
    answers = [d for d in decisions if noticed is None or d["at"] >= noticed]
    did = tuple(moves(d.get("before") or {}, d.get("after") or {}) for d in answers)
    rate_before = _mean([metric["rows_per_s"] for metric in before]) if before else None
    return Incident(
        at=at,
        label=label,
        what=cause["what"],
        text=cause["text"],
        did=did,
        noticed_s=None if noticed is None or noticed == at else noticed - at,
        noticed=cause["seen"],
        changed_s=answers[0]["at"] - at if answers else None,
        before=rate_before,
        after=settled,
        waited=waited,
        recovered_s=recovered_s,
        result=_result(rate_before, settled, waited, following[-last:]),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _result(
    before: float | None,
    after: float | None,
    waited: Waits | None,
    last: Sequence[Line],
) -> str:
    """Returns the result of an incident in a few words. `last` are the looks at which the rate had settled."""
    if not before or after is None or waited is None:
        return ""
    if after >= _AS_BEFORE_SHARE * before:
        return "recovered" if waited[-1] <= SMALL_STALL else "as fast as before"
    used, quota = (sum(look.get(name) or 0.0 for look in last) for name in ("cpu", "cpu_quota"))
    if quota and used >= _ALL_CORES_SHARE * quota:
        return "limited by the cores"
    return "the input keeps up" if waited[-1] <= NO_STALL else "still slow"


def settled_of(looks: Sequence[Line], since: float) -> int:
    """Returns how many of the last looks count as settled: a third of those since the agent's last change."""
    return max(_MEAN_OF, len([look for look in looks if look["at"] > since]) // 3)


def recovery(
    at: float, rates: Sequence[tuple[float, float]], last: int
) -> tuple[float | None, float | None]:
    """Returns the rate of the last looks, and the seconds from `at` until the rate recovered to it for good.

    Both are None if there are too few looks. `last` is the number of the last looks."""
    if len(rates) < 2 * _MEAN_OF:
        return None, None
    settled = _mean([rate for _, rate in rates[-last:]])
    smooth = [
        (rates[n][0], _mean([r for _, r in rates[n : n + _MEAN_OF]]))
        for n in range(len(rates) - _MEAN_OF + 1)
    ]
    recovered = _RECOVERED_SHARE * settled
    for course in (smooth, rates):  # A dip in a single look counts too.
        lowest = min(range(len(course)), key=lambda n: course[n][1])
        if course[lowest][1] < recovered:
            return settled, next(
                (when - at for when, rate in course[lowest:] if rate >= recovered), None
            )
    return settled, 0.0
