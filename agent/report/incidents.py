"""Finds the incidents of a run: changes that no decision caused, with the agent's reaction and the time to recover.

`find_causes` returns what happened, and `find_incidents` what followed. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean

from sluice.agent.report.format import count, moved, percent, seconds
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
"""Injected fault → what it changes."""

Waits = tuple[float, float, float]
_GOOD_RESULTS = ("recovered", "as fast as before", "the input keeps up")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A change that no decision caused, as an event tells it."""

    at: float
    what: str
    """`cores`, `memory`, `workload`, `schema`, `worker` or `store`."""
    text: str
    stage: str | None = None
    """The stage whose cost changed. None: the change is none of a stage, or was injected."""
    noticed_at: float | None = None
    """When the agent noticed it. None: unknown."""
    noticed: str = ""
    """What the agent noticed, in words. Empty if `text` already says it."""
    is_injected: bool = False


def find_causes(run: Run) -> list[Cause]:
    """Returns what happened in a run that no decision caused, in order."""
    causes = (cause for cause in map(_read_cause, run.events) if cause is not None)
    return sorted(causes, key=lambda cause: cause.at)


def _read_cause(event: Line) -> Cause | None:
    """Returns what an event tells. None: it is of another kind."""
    kind = event.get("kind")
    at = float(event.get("at", 0.0))
    if kind in ("incident", "occasion"):  # the second word is that of 0.3
        stage = event.get("stage")
        return Cause(at=at, what=event["what"], text=event["text"], stage=stage, noticed_at=at)
    if kind == "fault" and "fault" in event:
        name = str(event["fault"]).partition("@")[0].partition("=")[0]
        text = f"{event['fault']}: {event['did']}"
        return Cause(at=at, what=_WHAT.get(name, name), text=text, is_injected=True)
    if kind == "follow":
        names = [
            f"{word} {', '.join(columns)}"
            for word, key in (("new", "added"), ("without", "dropped"))
            if (columns := [*event.get(key, ()), *event.get(f"dense_{key}", ())])
        ]
        text = f"version {event['after']} of the table was adopted ({'; '.join(names) or 'the same columns'})"
        return Cause(at=at, what="schema", text=text)
    return None


def _merge_detections(causes: Iterable[Cause]) -> list[Cause]:
    """Returns the causes with each injected fault and its detection by the agent joined into one.

    What the agent first noticed by items under way, it measures once they have ended. That is the same cause."""
    merged: list[Cause] = []
    noticed: dict[str, float] = {}  # when each stage was last noticed
    for cause in causes:
        if cause.stage is not None:
            last_at = noticed.get(cause.stage, -inf)
            noticed[cause.stage] = cause.at
            if cause.at - last_at < _SAME_CAUSE_S:
                continue
        fault = next(
            (
                n
                for n in reversed(range(len(merged)))
                if merged[n].what == cause.what
                and merged[n].noticed_at is None
                and cause.at - merged[n].at <= _MOST_DETECTION_S
            ),
            None,
        )
        if fault is None or cause.noticed_at is None:
            merged.append(cause)
        else:
            merged[fault] = replace(merged[fault], noticed_at=cause.at, noticed=cause.text)
    return merged


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A change that no decision caused, and what followed. It lasts until the next incident."""

    at: float
    label: str
    """A letter for the charts."""
    what: str
    """See `Cause`."""
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
    def verdict(self) -> str:
        """The result for a reader."""
        return self.result or "too short to judge"

    @property
    def sentence(self) -> str:
        """The incident in one sentence, for the report."""
        told = [f"At {seconds(self.at)} {self.text}"]
        if self.noticed_s:
            told[0] += f", seen after {seconds(round(self.noticed_s, 2))}"
        if self.noticed:
            told[0] += f" ({self.noticed})"
        told.append(self._tell_answer())
        if self.waited is not None:
            told.append(f"waiting {self._tell_waits(*self.waited)}")
        if self.before and self.after:
            told.append(f"{count(self.before)} → {count(self.after)} rows/s")
        result = f": {self.result}" if self.result else ""
        return f"{'; '.join(told)}{self._tell_recovery()}{result}."

    def ends_at(self, next_at: float) -> float:
        """Returns when the incident ended: when the rate recovered, or at the next one. Without a result, at once."""
        if not self.result:
            return self.at
        if self.result in _GOOD_RESULTS and self.recovered_s is not None:
            return min(next_at, self.at + self.recovered_s)
        return next_at

    def _tell_answer(self) -> str:
        did = self.did
        if did and self.changed_s is not None:
            if len(did) > _MOST_SHOWN:
                did = (did[0], f"{len(did) - 2} more changes", did[-1])
            return f"changed after {seconds(round(self.changed_s, 2))} by {', then '.join(did)}"
        return "no change needed" if self.result in _GOOD_RESULTS else "no change made"

    @staticmethod
    def _tell_waits(before: float, worst: float, after: float) -> str:
        if worst > max(before, after) + _SAME_WAIT:
            return " → ".join(map(percent, (before, worst, after)))
        return " → ".join(dict.fromkeys(map(percent, (before, after))))

    def _tell_recovery(self) -> str:
        if self.recovered_s is None:
            return ""
        if self.recovered_s:
            return f", settled after {seconds(self.recovered_s)}"
        fell = self.before and self.after and self.after < _RECOVERED_SHARE * self.before
        return ", at once" if fell else ", without a dip below that"


def find_incidents(run: Run) -> list[Incident]:
    """Returns all incidents in order. Each lasts until the next one, or until the run is resumed."""
    merged = _merge_detections(find_causes(run))
    times = [*(cause.at for cause in merged), *(start["at"] for start in run.of("start"))]
    return [
        _measure_incident(
            run,
            cause,
            chr(ord("A") + n % 26),
            max((at for at in times if at < cause.at - _SHARED_OUTCOME_S), default=0.0),
            min((at for at in times if at > cause.at + _SHARED_OUTCOME_S), default=inf),
        )
        for n, cause in enumerate(merged)
    ]


def _measure_incident(run: Run, cause: Cause, label: str, begin: float, end: float) -> Incident:
    """Returns the incident of a cause. `begin` is the time of the incident before it, `end` of the next one."""
    at = cause.at
    looks = [look for look in run.looks() if look.get("rows_per_s") is not None]
    before = [look for look in looks if begin < look["at"] <= at][-5:]
    following = [look for look in looks if at < look["at"] <= end]
    decisions = [decision for decision in run.of("decision") if at < decision["at"] <= end]
    last = settled_of(following, since=decisions[-1]["at"] if decisions else at)
    settled, recovered_s = recovery(
        at, [(look["at"], look["rows_per_s"]) for look in following], last
    )
    waited: Waits | None = None
    if settled is not None and before:
        stalls = [look["stall"] for look in following]
        worst = max(fmean(stalls[n : n + _MEAN_OF]) for n in range(len(stalls) - _MEAN_OF + 1))
        waited = (fmean(look["stall"] for look in before), worst, fmean(stalls[-last:]))
    noticed_at = cause.noticed_at
    answers = [d for d in decisions if noticed_at is None or d["at"] >= noticed_at]
    rate_before = fmean(look["rows_per_s"] for look in before) if before else None
    return Incident(
        at=at,
        label=label,
        what=cause.what,
        text=cause.text,
        did=tuple(map(moved, answers)),
        noticed_s=None if noticed_at is None or noticed_at == at else noticed_at - at,
        noticed=cause.noticed,
        changed_s=answers[0]["at"] - at if answers else None,
        before=rate_before,
        after=settled,
        waited=waited,
        recovered_s=recovered_s,
        result=_result(rate_before, settled, waited, following[-last:]),
    )


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
    settled = fmean(rate for _, rate in rates[-last:])
    smooth = [
        (rates[n][0], fmean(rate for _, rate in rates[n : n + _MEAN_OF]))
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
