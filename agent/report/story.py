"""Tells a run: `Story`. It says what happened, why, and what it brought, for the page, `explain` and the last lines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from statistics import fmean, mode
from typing import Any

from sluice.agent.report.changes import NOT_COMPARED, SAME_SHARE, Change, find_changes
from sluice.agent.report.format import count, counted, moved, percent, reason_of, seconds, times
from sluice.agent.report.incidents import NO_STALL, SMALL_STALL, Incident, find_incidents
from sluice.agent.report.outcome import (
    RunOutcome,
    fault_times,
    judged_part,
    outcome,
    undisturbed,
)
from sluice.agent.report.run_folder import Line, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A run as it is told. `Story.read` makes it once; all that tell of the run read it."""

    run: Run
    part: Run
    """The part of a resumed run that its rates are of."""
    outcome: RunOutcome
    changes: Sequence[Change]
    incidents: Sequence[Incident]
    period: str
    """The name of the period of the settled figures."""
    sentences: Sequence[str]
    """The verdict. The first sentence is the most important one."""

    @classmethod
    def read(cls, path: str | os.PathLike[str], end: Line | None = None) -> Story:
        """Returns the story of the run in a folder, as `of` does."""
        return cls.of(Run.read(path), end)

    @classmethod
    def of(cls, run: Run, end: Line | None = None) -> Story:
        """Returns the story of a run. `end` is the run's last event, if it is not yet written."""
        if end is not None:
            run = replace(run, events=(*run.events, {"at": inf, "kind": "end", **end}))
        part = judged_part(run)
        changes = find_changes(run)
        own = changes if part is run else find_changes(part)
        figures = outcome(run, part, own)
        faulted = undisturbed(part)[1] < inf
        period = f"last third{' before the first fault' if faulted else ''} of {part.name}"
        return cls(
            run=run,
            part=part,
            outcome=figures,
            changes=changes,
            incidents=find_incidents(run),
            period=period,
            sentences=list(_sentences(part, figures, own, period)),
        )

    @property
    def verdict(self) -> str:
        """A few sentences about the run, the most important one first."""
        return " ".join(self.sentences)

    @property
    def summary(self) -> dict[str, Any]:
        """The outcome, the incidents and the headline for a program's last line."""
        return {
            "headline": self.sentences[0],
            **asdict(self.outcome),
            "incidents": [
                {**asdict(incident), "sentence": incident.sentence} for incident in self.incidents
            ],
        }

    @property
    def explanation(self) -> str:
        """The run for a terminal."""
        lines = [self.verdict, ""]
        for change in self.changes:
            lines += [
                f"{change.number:>3}. at {seconds(change.at)}: {change.moves}",
                f"     why: {change.reason}",
                f"     effect: {change.effect}",
            ]
        if not self.changes:
            lines.append("No decision was made.")
        for proposal in self.run.of("proposal"):
            lines += [
                f"  –  at {seconds(float(proposal['at']))} it would have changed: {moved(proposal)}",
                f"     why: {reason_of(proposal)}",
            ]
        for more in (
            [f"  {incident.label}. {incident.sentence}" for incident in self.incidents],
            list(self._advice()),
        ):
            if more:
                lines += ["", *more]
        return "\n".join(lines)

    def _advice(self) -> Iterator[str]:
        """Yields the agent's last verdict, what other resources would bring, and how far predictions were off."""
        verdicts = self.run.of("verdict")
        if not verdicts:
            return
        text = verdicts[-1].get("text") or "no reason given"
        details = verdicts[-1].get("details") or {}
        yield f"The agent's last verdict, from its last looks alone: {text}."
        proposed = text in map(reason_of, self.run.of("proposal"))
        yield from _cases(details.get("what_if"), proposed, self.outcome.rows_per_s_last)
        for name, model in (details.get("stages") or {}).items():
            yield (
                f"{name}: {model['busy_us_a_row']:.3g} µs a row and worker at {model['workers']:.0f}, "
                f"{model['cpu_us_a_row']:.3g} of it on a core, ± {percent(model['spread'])}."
            )
        errors = sorted(abs(change.error) for change in self.changes if change.error is not None)
        if errors:
            middle, largest = (
                percent(error) if error <= 1 else f"a factor of {1 + error:.2g}"
                for error in (errors[len(errors) // 2], errors[-1])
            )
            yield (
                f"Prediction error of {counted(len(errors), 'change')}: median {middle}, largest {largest}."
            )


def last_lines(told: Line) -> list[str]:
    """Returns what a program prints at the end of a run. `told` is the `summary` of its story."""
    return [
        told["headline"],
        *(f"{incident['label']}. {incident['sentence']}" for incident in told["incidents"]),
    ]


def _sentences(
    part: Run, figures: RunOutcome, changes: Sequence[Change], period: str
) -> Iterator[str]:
    """Yields the sentences of the verdict."""
    yield f"{figures.headline} {_tell_input(figures, changes, period)}".strip()
    if figures.stall_last is not None:
        when = "After the faults" if fault_times(part) else f"In the last third of {part.name}"
        yield f"{when}, {_tell_bottleneck(figures.stall_last)}"
    yield from _uneven_ranks(part)
    yield from _cache(part)
    if figures.auc is not None:
        reachable = f" of {figures.bayes_auc:.4f} reachable" if figures.bayes_auc else ""
        yield f"AUC {figures.auc:.4f}{reachable}."
    if figures.faults:
        yield f"The tuning failed: {figures.faults[0]}."
    if not figures.ended:
        yield "The run has not ended, or was interrupted."


def _cache(part: Run) -> Iterator[str]:
    """Yields what was chosen for the cache of what functions make, and what it brought."""
    for end in part.of("end")[-1:]:
        cache = end.get("cache") or end.get("input", {}).get("cache") or {}
        if choice := cache.get("choice"):
            yield f"Cache: {choice}."
        if rows := cache.get("rows_read"):
            yield f"{count(rows)} rows came from the cache, {count(cache['rows_made'])} were computed."


def _tell_input(figures: RunOutcome, changes: Sequence[Change], period: str) -> str:
    """Returns a sentence about rates and waiting, and what the changes brought."""
    if not figures.looks:
        if figures.ended:
            return "The run has no loader metrics, so the input cannot be judged."
        return (
            "Nothing is measured yet. The first measurement comes a second after the first batch."
        )
    rate, stall = figures.rows_per_s_settled, figures.stall_settled
    if rate is None or stall is None:
        return (
            "Too short to judge the input: only its start was measured. Let it run for ten seconds or "
            "more (more epochs, or more rows)."
        )
    many = counted(figures.changes_settling, "change")
    first = figures.rows_per_s_first
    if figures.changes_faster and first and figures.stall_first is not None:
        quick = f" in {seconds(round(figures.settled_s, 1))}" if figures.settled_s else ""
        return (
            f"Waiting for input {percent(figures.stall_first)} → {percent(stall)}{quick}, {times(rate / first)} times "
            f"the rows ({count(first)} → {count(rate)} rows/s in the {period}) after {many}."
        )
    if not figures.changes_settling:
        knobs = f"; the knobs were not changed{' before the first fault' if changes else ''}"
    elif {change.result for change in changes[: figures.changes_settling]} <= NOT_COMPARED:
        knobs = f", after {many}"
    else:
        knobs = f"; {many} brought no measurable gain"
    return (
        f"{count(rate)} rows/s with {percent(stall)} of the trainer's time spent waiting for input in the "
        f"{period}{knobs}."
    )


def _tell_bottleneck(stall: float) -> str:
    """Returns the end of a sentence about a bottleneck. `stall` is the trainer's share of waiting."""
    if stall <= NO_STALL:
        return "the trainer was the bottleneck."
    if stall <= SMALL_STALL:
        return f"the trainer was the bottleneck: it waited for input {percent(stall)} of its time."
    return f"the input was the bottleneck: the trainer waited {percent(stall)} of its time."


def _uneven_ranks(run: Run) -> Iterator[str]:
    """Yields a sentence about the rank that the others waited for, and one about the rank that computed for longest, if
    it was the same one most of the time."""
    if late := _same_rank(run, "late"):
        others, own = (percent(fmean(line[name] for line in late)) for name in ("others", "input"))
        yield (
            f"The other ranks waited {others} of their time for rank {late[0]['rank']} on {late[0]['host']}, "
            f"which waited {own} of its time for input."
        )
    if slow := _same_rank(run, "slow"):
        ratio = times(fmean(line["times"] for line in slow))
        yield (
            f"Rank {slow[0]['rank']} on {slow[0]['host']} computes {ratio} times "
            "as long for a step as the median of the other ranks: its cores are slower, or it has more work."
        )


def _same_rank(run: Run, name: str) -> list[Line]:
    """Returns the training lines' entries of this name with the most frequent rank. [] if it is in less than half of
    the lines."""
    lines = run.of("train")
    entries: list[Line] = [line[name] for line in lines if line.get(name)]
    rank = mode(entry["rank"] for entry in entries) if entries else None
    those = [entry for entry in entries if entry["rank"] == rank]
    return those if len(those) >= len(lines) / 2 else []


def _cases(cases: Line | None, proposed: bool, rate: float | None) -> Iterator[str]:
    """Yields the effect of other resources, compared with the present or with a `proposed` setting."""
    if cases == {}:
        yield "No estimate for other resources: the cost of a stage was not measured."
    present_rate = ((cases or {}).get("as it is") or {}).get("rows_per_s")
    if not cases or not present_rate:
        return
    for name, case in cases.items():
        if name == "as it is":
            continue
        gain = case["rows_per_s"] / present_rate
        brings = "the same" if abs(gain - 1) <= SAME_SHARE else f"{times(gain)} times the rows"
        rows = "" if proposed or rate is None else f", {count(gain * rate)} rows/s"
        workers = ", ".join(f"{stage} {n}" for stage, n in case["workers"].items())
        yield f"With {'that and ' if proposed else ''}{name}: {brings}{rows} ({workers})."
