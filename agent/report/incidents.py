"""Finds events in a run that no decision caused, the agent's reaction and the time to recover: `occasions`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.agent.report.format import count, moves, percent, seconds
from sluice.agent.report.run_folder import Line, Run

RECOVERED = 0.95  # of the rate that a run settles at afterwards
_AS_BEFORE = 0.9  # of the rate before: a smaller loss counts as noise
_ALL_CORES = 0.9  # of the cores in use: from here on, the cores limit the rate
_TOGETHER_S = 15.0  # at most between an injected fault and the moment when it is noticed
_AT_ONCE_S = 2.0  # an event so soon after another shares its outcome
_HIDDEN_S: Mapping[str, float] = {"workload": 10.0, "store": 10.0}
"""Buffers may hide an event's cost for this time, so the rate before a decision may be that of full buffers."""
_MOST_SHOWN = 4  # changes of knobs in a sentence
_MEAN_OF = 3  # a rate is the mean of so many metrics
SMOOTH = 0.02  # up to this share of waiting, the trainer limits the rate
_SAME_WAIT = 0.05  # a lower peak of waiting is not mentioned
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
WELL = ("recovered", "the input keeps up")


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One such event. `what` is cores, memory, workload, schema, worker or store."""

    at: float
    label: str
    what: str
    text: str
    did: tuple[str, ...]
    """The knobs that the agent changed from then on until the next occasion."""
    noticed_s: float | None
    """Seconds until the agent noticed. None if the time of the event is unknown."""
    noticed: str
    """What it noticed, in words. Empty if the event itself says it."""
    before: float | None
    """Rows a second before the event; `after` is the rate at which they settled."""
    after: float | None
    waited: Waits | None
    """Share of its time that the trainer waited for input: before the event, at its worst after it, and once settled.
    None if the run is too short."""
    recovered_s: float | None
    """Seconds until that rate was reached for good. None if the run is too short."""
    result: str = ""
    """`recovered`, `limited by the cores`, `the input keeps up` or `still slow`; empty if too little was measured."""

    @property
    def sentence(self) -> str:
        noticed = f", detected in {seconds(self.noticed_s)}" if self.noticed_s else ""
        noticed += f" ({self.noticed})" if self.noticed else ""
        turned = (
            self.did
            if len(self.did) <= _MOST_SHOWN
            else (self.did[0], f"{len(self.did) - 2} more changes", self.did[-1])
        )
        if turned:
            did = f"; then {', then '.join(turned)}"
        elif self.result in WELL:
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
            fell = self.before and self.after and self.after < RECOVERED * self.before
            back = ", at once" if fell else ", without a dip below that"
        else:
            back = f", settled after {seconds(self.recovered_s)}"
        result = f": {self.result}" if self.result else ""
        return f"At {seconds(self.at)} {self.text}{noticed}{did}{waits}{rates}{back}{result}."


def occasions(run: Run) -> list[Incident]:
    """All incidents in order; each lasts up to the next one."""
    read = (event for event in map(_read, run.events) if event is not None)
    merged = _merged(sorted(read, key=lambda event: event["at"]))
    times = [event["at"] for event in merged]
    return [
        _occasion(
            run,
            event,
            chr(ord("A") + n % 26),
            max((at for at in times if at < event["at"] - _AT_ONCE_S), default=0.0),
            min((at for at in times if at > event["at"] + _AT_ONCE_S), default=float("inf")),
        )
        for n, event in enumerate(merged)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDecision:
    """A decision, its measured effect, and a disturbance in between."""

    decision: Line
    effect: Line | None
    disturbance: str | None
    """An event before the measurement, which makes the effect meaningless. None: there was none."""


def measured(run: Run) -> list[MeasuredDecision]:
    """All decisions, in order. An effect belongs to the last decision of its number before it."""
    decisions, effects = run.of("decision"), run.of("effect")
    events = [event for event in map(_read, run.events) if event is not None]
    decided = []
    for i, decision in enumerate(decisions):
        number, at = decision.get("sequence"), float(decision["at"])
        until = next(
            (d["at"] for d in decisions[i + 1 :] if d.get("sequence") == number), float("inf")
        )
        effect = next(
            (e for e in effects if e.get("sequence") == number and at <= e["at"] <= until), None
        )
        between = (
            event["text"]
            for event in events
            if effect is not None
            and at - _HIDDEN_S.get(event["what"], 0.0) < event["at"] <= effect["at"]
        )
        decided.append(
            MeasuredDecision(decision=decision, effect=effect, disturbance=next(between, None))
        )
    return decided


def fault_times(run: Run) -> list[float]:
    """Returns the times of the injected faults."""
    return [
        float(event["at"])
        for event in run.events
        if event.get("kind") == "fault" and "fault" in event
    ]


def _read(event: Line) -> dict[str, Any] | None:
    kind, at = event.get("kind"), float(event.get("at", 0.0))
    if kind == "occasion":
        return {"at": at, "what": event["what"], "text": event["text"], "noticed": at, "seen": ""}
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


def _merged(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins an injected fault and the event that noticed it into one occasion."""
    merged: list[dict[str, Any]] = []
    for event in events:
        cause = next(
            (
                earlier
                for earlier in reversed(merged)
                if earlier["what"] == event["what"]
                and earlier["noticed"] is None
                and event["at"] - earlier["at"] <= _TOGETHER_S
            ),
            None,
        )
        if cause is not None and event["noticed"] is not None:
            cause["noticed"], cause["seen"] = event["noticed"], event["text"]
        else:
            merged.append(dict(event))
    return merged


def _occasion(run: Run, event: Line, label: str, begin: float, end: float) -> Incident:
    at = event["at"]
    metrics = [metric for metric in run.looks() if metric.get("rows_per_s") is not None]
    before = [metric for metric in metrics if begin < metric["at"] <= at][-5:]
    following = [metric for metric in metrics if at < metric["at"] <= end]
    decisions = [decision for decision in run.of("decision") if at < decision["at"] <= end]
    last = settled_of(following, since=decisions[-1]["at"] if decisions else at)
    settled, recovered_s = recovery(
        at, [(metric["at"], metric["rows_per_s"]) for metric in following], last
    )
    waited = (
        None
        if settled is None or not before
        else _waited(
            [metric["stall"] for metric in before], [metric["stall"] for metric in following], last
        )
    )
    did = tuple(moves(d.get("before") or {}, d.get("after") or {}) for d in decisions)
    noticed, was = (
        event["noticed"],
        _mean([metric["rows_per_s"] for metric in before]) if before else None,
    )
    return Incident(
        at=at,
        label=label,
        what=event["what"],
        text=event["text"],
        did=did,
        noticed_s=None if noticed is None or noticed == at else noticed - at,
        noticed=event["seen"],
        before=was,
        after=settled,
        waited=waited,
        recovered_s=recovered_s,
        result=_result(was, settled, waited, following[-last:]),
    )


def _waited(before: Sequence[float], following: Sequence[float], last: int) -> Waits:
    """Returns the share of waiting before an event, at its worst, and in the last looks."""
    return (
        _mean(before),
        max(_mean(following[n : n + _MEAN_OF]) for n in range(len(following) - _MEAN_OF + 1)),
        _mean(following[-last:]),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _result(
    before: float | None,
    after: float | None,
    waited: Waits | None,
    last: Sequence[Line],
) -> str:
    """Returns what became of the rate. `last` are the looks at which it had settled."""
    if not before or after is None:
        return ""
    if after >= _AS_BEFORE * before:
        return "recovered"
    used, quota = (sum(look.get(name) or 0.0 for look in last) for name in ("cpu", "cpu_quota"))
    if quota and used >= _ALL_CORES * quota:
        return "limited by the cores"
    return "the input keeps up" if waited is not None and waited[-1] <= SMOOTH else "still slow"


def settled_of(looks: Sequence[Line], since: float) -> int:
    """Returns how many of the last looks count as settled: a third of those since the agent's last change."""
    return _third_of(len([look for look in looks if look["at"] > since]))


def _third_of(looks: int) -> int:
    """Returns a third of so many looks, but no fewer than make a mean."""
    return max(_MEAN_OF, looks // 3)


def recovery(
    at: float, rates: Sequence[tuple[float, float]], last: int | None = None
) -> tuple[float | None, float | None]:
    """Returns the rate of the last looks, and the seconds from `at` until the rate, after its lowest point, is back
    there. `last` is the number of these looks; None: a third of all."""
    if len(rates) < 2 * _MEAN_OF:
        return None, None
    settled = _mean([rate for _, rate in rates[-(last or _third_of(len(rates))) :]])
    smooth = [
        (rates[n][0], _mean([r for _, r in rates[n : n + _MEAN_OF]]))
        for n in range(len(rates) - _MEAN_OF + 1)
    ]
    for course in (smooth, rates):  # a dip in a single look counts too
        lowest = min(range(len(course)), key=lambda n: course[n][1])
        if course[lowest][1] < RECOVERED * settled:
            return settled, next(
                (when - at for when, rate in course[lowest:] if rate >= RECOVERED * settled), None
            )
    return settled, 0.0
