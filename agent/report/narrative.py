"""Describes a run in text and numbers: its outcome, and each change with its reason and effect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from statistics import fmean, mode
from typing import Any

from sluice.agent.report.format import count, moves, percent, seconds, times
from sluice.agent.report.incidents import (
    NO_STALL,
    SMALL_STALL,
    fault_times,
    find_incidents,
    measured_decisions,
    recovery,
    settled_of,
)
from sluice.agent.report.run_folder import Line, Run

_SAME_SHARE = 0.05
"""A difference of rates up to this share counts as none."""
_SMALL_LOSS = 0.1
"""A loss below this share of the run's time is not named."""
FASTER = "faster"
_JUST_BEFORE_S = 1.5
_FEWEST_LOOKS = 3
"""A run with fewer looks is too short to judge."""
_NOT_COMPARED = {"not measured", "not comparable", "at the start"}
"""Results of a change whose gain is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionEffect:
    """A decision and its measured effect."""

    at: float
    number: int
    moves: str
    """The knobs that were changed: `decode 1 → 4`."""
    reason: str
    effect: str
    """`4.1 times the rows (18.5 k → 76.5 k rows/s), stall 100 % → 93 %`, or a note that nothing was measured."""
    result: str = "not measured"
    """`faster`, `slower` or `as before`. `trainer faster` if more rows came although the trainer had not waited.
    Otherwise why there is no result."""
    error: float | None = None
    """The error of the predicted rate, as a share of it. None if it was not measured."""


def changes(run: Run) -> list[DecisionEffect]:
    """Returns all decisions with their effects, in order."""
    effects = []
    for i, (decision, effect, disturbance) in enumerate(measured_decisions(run)):
        reason = decision.get("reason") or {}
        effects.append(
            DecisionEffect(
                at=float(decision["at"]),
                number=i + 1,
                moves=moves(decision.get("before") or {}, decision.get("after") or {}),
                reason=reason.get("text") or "no reason given",
                effect=_effect(effect, disturbance),
                result=_result(effect, disturbance),
                error=effect.get("prediction_error") if effect and not disturbance else None,
            )
        )
    return effects


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The figures of a run, each None if it was not measured. The page, `explain` and the last lines use them.

    Rates and stalls of the loader are those of one part of a resumed run (`judged_part`). Settled figures are those up
    to the first injected fault."""

    rows_per_s_first: float | None = None
    """The rate just before the first decision. Without a decision: of the whole part. All rates skip the start."""
    rows_per_s_settled: float | None = None
    """The rate in the last third of the loader's time. None if the run is too short."""
    stall_first: float | None = None
    stall_settled: float | None = None
    settled_s: float | None = None
    """Seconds from the first rows until the settled rate was reached for good, or the trainer no longer waited. That is
    not before the first change. None without a change before that."""
    changes_settling: int = 0
    """The decisions in the undisturbed part. `decisions` counts all."""
    changes_faster: int = 0
    """The decisions in the undisturbed part after which measurably more rows came."""
    decisions: int = 0
    peak_memory: int | None = None
    memory_limit: int | None = None
    auc: float | None = None
    bayes_auc: float | None = None
    rows_per_s_last: float | None = None
    """The rate in the last third of the time after the last injected fault and the last change. Without a fault: the
    settled rate. `stall_last` is its stall."""
    stall_last: float | None = None
    rows_per_s_whole: float | None = None
    """The rate of the whole run, or since its last resume, as the consumer counted it. `stall_whole` is its stall."""
    stall_whole: float | None = None
    first_batch_s: float = 0.0
    """How long the trainer waited for the first batch. `stall_whole` usually excludes it."""
    core_s_per_million: float | None = None
    """The processor seconds that the input took for a million rows."""
    evaluation_s: float = 0.0
    huge_row_group: int = 0
    """The rows of the largest row group, if it is huge."""
    looks: int = 0
    """How many times the loader was measured."""
    seconds: float = 0.0
    """The duration, without the summary at the end."""
    ended: bool = False
    faults: tuple[str, ...] = ()
    """The faults of the tuning itself. Injected faults are incidents."""


def outcome(run: Run) -> RunOutcome:
    """Returns the figures of a run."""
    looks = run.of("loader")
    decisions = run.of("decision")
    evaluations = [m for m in run.of("eval") if m.get("auc") is not None]
    ends = run.of("end")
    # A resumed run with nothing left to train also ends, but has no figures.
    counted: Line = next(
        (e for e in reversed(ends) if e.get("samples_per_s", e.get("rows_per_s"))), {}
    )
    # Looks are those of one rank. The end event has the sums of all ranks, so it counts only if there is one rank.
    of_rank = counted if run.ranks == 1 else {}
    memory = [m.get("memory_used") for m in looks]
    if of_rank.get("peak_bytes"):  # the run's last line says the same
        memory = [of_rank["peak_bytes"]]
    return RunOutcome(
        **_rates(judged_part(run)),
        rows_per_s_whole=counted.get("samples_per_s", counted.get("rows_per_s")),
        stall_whole=counted.get("stall_fraction"),
        first_batch_s=counted.get("first_batch_s") or 0.0,
        core_s_per_million=counted.get("core_s_per_million"),
        evaluation_s=sum(m.get("seconds", 0.0) for m in run.of("eval")),
        huge_row_group=run.config.get("huge_row_group", 0),
        looks=len(looks),
        decisions=len(decisions),
        peak_memory=max(filter(None, memory), default=None),
        memory_limit=of_rank.get("memory", {}).get("limit")
        or (looks[-1].get("memory_limit") if looks else None),
        auc=evaluations[-1]["auc"] if evaluations else None,
        bayes_auc=next(
            (e["bayes_auc"] for e in (*reversed(ends), run.config) if e.get("bayes_auc")), None
        ),
        seconds=max(
            (
                float(line.get("at", 0.0))
                for line in (*run.events, *run.metrics)
                if line.get("kind") != "end"
            ),
            default=0.0,
        ),
        ended=bool(ends),
        faults=tuple(
            str(f.get("text", "a fault without words")) for f in run.of("fault") if "fault" not in f
        ),
    )


def judged_part(run: Run) -> Run:
    """Returns the part of a resumed run that its rates are of: the newest one that is long enough to judge."""
    return max(
        reversed(run.parts()), key=lambda part: min(len(started(part.looks())), _FEWEST_LOOKS)
    )


def settled_period(part: Run) -> str:
    """Returns the name of the period of the settled figures."""
    faulted = _undisturbed(part)[1] < inf
    return f"last third{' before the first fault' if faulted else ''} of {part.name}"


def _rates(run: Run) -> dict[str, Any]:
    """Returns the fields of `RunOutcome` that come from the rates of the loader."""
    decisions = run.of("decision")
    faults = fault_times(run)
    loader = started(run.looks())
    calm, first_fault = _undisturbed(run)
    settling = [d for d in decisions if d["at"] <= first_fault]
    before = calm
    if settling:
        # The first looks include compilers, first files and connections, so only those just before the change count.
        change = settling[0]["at"]
        before = [m for m in run.looks() if m["at"] <= change and m.get("rows_per_s")]
        before = [m for m in before if m["at"] > change - _JUST_BEFORE_S] or before[-1:]
    settled = calm[2 * len(calm) // 3 :] if len(calm) >= _FEWEST_LOOKS else []
    after = [m for m in loader if m["at"] > max(faults, default=0.0)] or loader
    changed = float(decisions[-1]["at"]) if decisions else 0.0
    last = settled and (after[-settled_of(after, since=changed) :] if faults else settled)
    first_rows = next((m["at"] for m in run.of("loader") if m.get("rows_per_s")), 0.0)
    settled_s = _settled_s(calm, settled, settling[0]["at"], first_rows) if settling else None
    results = [effect.result for effect in changes(run)[: len(settling)]]
    return {
        "rows_per_s_first": mean(before, "rows_per_s"),
        "rows_per_s_settled": mean(settled, "rows_per_s"),
        "stall_first": mean(before, "stall"),
        "stall_settled": mean(settled, "stall"),
        "settled_s": settled_s,
        "changes_settling": len(settling),
        "changes_faster": results.count(FASTER),
        "rows_per_s_last": mean(last, "rows_per_s"),
        "stall_last": mean(last, "stall"),
    }


def _undisturbed(run: Run) -> tuple[list[Line], float]:
    """Returns the looks before the first injected fault, and its time. If they are too few, all looks and infinity."""
    loader = started(run.looks())
    first_fault = min(fault_times(run), default=inf)
    if len(calm := [m for m in loader if m["at"] <= first_fault]) < _FEWEST_LOOKS:
        return list(loader), inf
    return calm, first_fault


def _settled_s(
    calm: Sequence[Line], settled: Sequence[Line], change: float, first_rows: float
) -> float | None:
    """Returns `RunOutcome.settled_s`. `change` is the time of the first change, and `settled` are the last of the looks
    `calm`."""
    rate = mean(settled, "rows_per_s")
    if rate is None:
        return None
    # If the trainer does not wait, its own rate may vary.
    reached = [
        (m["at"], rate if m.get("stall", 1.0) <= NO_STALL else m["rows_per_s"])
        for m in calm
        if m["at"] > change
    ]
    _, after_s = recovery(first_rows, reached, len(settled))
    return change - first_rows if after_s == 0 else after_s


def summary(run: Run, end: Line | None = None) -> dict[str, Any]:
    """Returns the outcome, the incidents and the headline for a program's last line.

    `end` is the run's last event, if it is not yet written."""
    if end is not None:
        run = replace(run, events=(*run.events, {"at": inf, "kind": "end", **end}))
    return {
        "headline": sentences(run)[0],
        **asdict(outcome(run)),
        "incidents": [
            {**asdict(incident), "sentence": incident.sentence} for incident in find_incidents(run)
        ],
    }


def last_lines(told: Line) -> list[str]:
    """Returns what a program prints at the end of a run. `told` is the run's `summary`."""
    return [
        told["headline"],
        *(f"{incident['label']}. {incident['sentence']}" for incident in told["incidents"]),
    ]


def largest_loss(figures: RunOutcome) -> tuple[str, float]:
    """Returns the name and the seconds of the run's largest loss: `start`, `evaluation`, or `waiting` by default."""
    start, evaluation = figures.first_batch_s, figures.evaluation_s
    total = figures.seconds
    waiting = (figures.stall_whole or 0.0) * max(0.0, total - start - evaluation)
    # If losses are equal, the first one counts.
    losses = {
        "waiting": max(waiting, _SMALL_LOSS * total),
        "start": start,
        "evaluation": evaluation,
    }
    return max(losses.items(), key=lambda loss: loss[1])


def headline(figures: RunOutcome) -> str:
    """Returns a sentence about the whole run and its largest loss. Empty if the whole run has no figures."""
    if figures.rows_per_s_whole is None or figures.stall_whole is None:
        return ""
    name, lost_s = largest_loss(figures)
    whole = f"{count(figures.rows_per_s_whole)} rows/s over the whole run"
    if figures.core_s_per_million:
        whole += f", {seconds(figures.core_s_per_million)} of a core for a million rows of input"
    if name == "waiting":
        return f"{whole}, {percent(figures.stall_whole)} waiting for input."
    what = "evaluation" if name == "evaluation" else "the wait for the first batch"
    rows = figures.huge_row_group if name == "start" else 0
    cause = f", because a row group has {rows:,} rows" if rows else ""
    of_all = f"{seconds(round(lost_s, 1))} of {seconds(round(figures.seconds, 1))}"
    return f"{whole}; the largest loss was {what}, {of_all}{cause}."


def started(loader: Sequence[Line]) -> Sequence[Line]:
    """Returns the looks at the loader after its first rows, for each start of the run."""
    begin = next((n for n, look in enumerate(loader) if look.get("rows_per_s")), len(loader))
    return [look for look in loader[begin + 1 if begin else 0 :] if look.get("rows", 1)]


def verdict(run: Run) -> str:
    """Returns a few sentences about the run, the most important one first."""
    return " ".join(sentences(run))


def sentences(run: Run) -> list[str]:
    """Returns the sentences of the verdict."""
    figures = outcome(run)
    many = "one change" if figures.changes_settling == 1 else f"{figures.changes_settling} changes"
    part = judged_part(run)
    last_third = f"the {settled_period(part)}"
    parts = []
    if not figures.looks:
        parts.append(
            "The run has no loader metrics, so the input cannot be judged."
            if figures.ended
            else "Nothing is measured yet. The first measurement comes a second after the first batch."
        )
    elif figures.rows_per_s_settled is None or figures.stall_settled is None:
        parts.append(
            "Too short to judge the input: only its start was measured. Let it run for ten seconds or "
            "more (more epochs, or more rows)."
        )
    elif figures.changes_faster and figures.rows_per_s_first and figures.stall_first is not None:
        gain = figures.rows_per_s_settled / figures.rows_per_s_first
        quick = f" in {seconds(round(figures.settled_s, 1))}" if figures.settled_s else ""
        parts.append(
            f"Waiting for input {percent(figures.stall_first)} → {percent(figures.stall_settled)}{quick}, "
            f"{times(gain)} times the rows ({count(figures.rows_per_s_first)} → "
            f"{count(figures.rows_per_s_settled)} rows/s in {last_third}) after {many}."
        )
    else:
        if not figures.changes_settling:
            knobs = "; the knobs were not changed"
            if part.of("decision"):
                knobs += " before the first fault"
        elif {
            effect.result for effect in changes(part)[: figures.changes_settling]
        } <= _NOT_COMPARED:
            knobs = f", after {many}"
        else:
            knobs = f"; {many} brought no measurable gain"
        parts.append(
            f"{count(figures.rows_per_s_settled)} rows/s with {percent(figures.stall_settled)} of the "
            f"trainer's time spent waiting for input in {last_third}{knobs}."
        )
    parts = [f"{headline(figures)} {parts[0]}".strip()]
    if figures.stall_last is not None:
        when = "After the faults" if fault_times(part) else f"In the last third of {part.name}"
        parts.append(f"{when}, {_bottleneck(figures.stall_last)}")
    parts += _late_rank(part) + _slow_rank(part)
    if figures.auc is not None:
        reachable = f" of {figures.bayes_auc:.4f} reachable" if figures.bayes_auc else ""
        parts.append(f"AUC {figures.auc:.4f}{reachable}.")
    if figures.faults:
        parts.append(f"The tuning failed: {figures.faults[0]}.")
    if not figures.ended:
        parts.append("The run has not ended, or was interrupted.")
    return parts


def _bottleneck(stall: float) -> str:
    """Returns the end of a sentence about a bottleneck. `stall` is the trainer's share of waiting."""
    if stall <= NO_STALL:
        return "the trainer was the bottleneck."
    if stall <= SMALL_STALL:
        return f"the trainer was the bottleneck: it waited for input {percent(stall)} of its time."
    return f"the input was the bottleneck: the trainer waited {percent(stall)} of its time."


def _late_rank(run: Run) -> list[str]:
    """Returns a sentence about the rank that the others waited for. [] if none was late most of the time."""
    if not (those := _same_rank(run, "late")):
        return []
    others, own = (fmean(entry[name] for entry in those) for name in ("others", "input"))
    text = (
        f"The other ranks waited {percent(others)} of their time for rank {those[0]['rank']} on {those[0]['host']}, "
        f"which waited {percent(own)} of its time for input."
    )
    return [text]


def _slow_rank(run: Run) -> list[str]:
    """Returns a sentence about the rank that computed for longest. [] if none was slow most of the time."""
    if not (those := _same_rank(run, "slow")):
        return []
    ratio = fmean(entry["times"] for entry in those)
    text = (
        f"Rank {those[0]['rank']} on {those[0]['host']} computes {times(ratio)} times as long for a step as the median "
        "of the other ranks: its cores are slower, or it has more work."
    )
    return [text]


def _same_rank(run: Run, name: str) -> list[Line]:
    """Returns the training lines' entries of this name with the most frequent rank. [] if it is in less than half of
    the lines."""
    lines = run.of("train")
    entries: list[Line] = [line[name] for line in lines if line.get(name)]
    rank = mode(entry["rank"] for entry in entries) if entries else None
    those = [entry for entry in entries if entry["rank"] == rank]
    return those if len(those) >= len(lines) / 2 else []


def tell(run: Run) -> str:
    """Returns a description of the run for a terminal."""
    decided = changes(run)
    lines = [verdict(run), ""]
    for change in decided:
        lines += [
            f"{change.number:>3}. at {seconds(change.at)}: {change.moves}",
            f"     why: {change.reason}",
            f"     effect: {change.effect}",
        ]
    if not decided:
        lines.append("No decision was made.")
    for proposal in run.of("proposal"):
        reason = proposal.get("reason") or {}
        moved = moves(proposal.get("before") or {}, proposal.get("after") or {})
        lines += [
            f"  –  at {seconds(float(proposal['at']))} it would have changed: {moved}",
            f"     why: {reason.get('text') or 'no reason given'}",
        ]
    if incidents := find_incidents(run):
        lines += ["", *(f"  {incident.label}. {incident.sentence}" for incident in incidents)]
    if recommended := advice(run, outcome(run).rows_per_s_last):
        lines += ["", *recommended]
    return "\n".join(lines)


def mean(lines: Sequence[Line], name: str) -> float | None:
    """Returns the mean of a field over the lines that have it. None if no line has it."""
    values = [float(line[name]) for line in lines if line.get(name) is not None]
    return sum(values) / len(values) if values else None


def _effect(effect: Line | None, disturbance: str | None) -> str:
    """Returns the effect of a change in words, with the rates and the prediction's error."""
    if effect is None:
        return "not measured"
    if disturbance is not None:
        return f"not comparable with before, as meanwhile {disturbance}"
    before = effect.get("rows_per_s_before")
    after = effect["rows_per_s_after"]
    error = effect.get("prediction_error")
    if error is None:
        off = ""
    elif error > 1:
        off = f", {times(1 + error)} times what was predicted"
    else:
        off = f", {percent(abs(error))} {'more' if error > 0 else 'less'} than predicted"
    if not before:
        return (
            f"{count(after)} rows/s from then on, stall {percent(effect['stall_after'])}{off}; before it the "
            "pipeline only started"
        )
    return (
        f"{times(after / before)} times the rows ({count(before)} → {count(after)} rows/s), "
        f"stall {percent(effect['stall_before'])} → {percent(effect['stall_after'])}{off}"
    )


def _result(effect: Line | None, disturbance: str | None) -> str:
    """Returns the result of a change in a word or two."""
    if effect is None:
        return "not measured"
    if disturbance is not None:
        return "not comparable"
    if not effect.get("rows_per_s_before"):
        return "at the start"
    gain = effect["rows_per_s_after"] / effect["rows_per_s_before"]
    if abs(gain - 1) <= _SAME_SHARE:
        return "as before"
    if gain < 1:
        return "slower"
    # If the trainer did not wait, faster input cannot be the cause.
    return FASTER if effect["stall_before"] > NO_STALL else "trainer faster"


def advice(run: Run, rate: float | None) -> list[str]:
    """Returns the advice as sentences. [] if the run ended without a verdict.

    `rate` is the rate in the last third of the run. The advice compares other resources with it."""
    verdicts = run.of("verdict")
    if not verdicts:
        return []
    details = verdicts[-1].get("details") or {}
    text = verdicts[-1].get("text") or "no reason given"
    proposed = any(
        (proposal.get("reason") or {}).get("text") == text for proposal in run.of("proposal")
    )
    lines = [
        f"The agent's last verdict, from its last looks alone: {text}.",
        *_cases(details.get("what_if"), proposed, rate),
    ]
    for name, model in (details.get("stages") or {}).items():
        lines.append(
            f"{name}: {model['busy_us_a_row']:.3g} µs a row and worker at {model['workers']:.0f}, "
            f"{model['cpu_us_a_row']:.3g} of it on a core, ± {percent(model['spread'])}."
        )
    errors = sorted(abs(effect.error) for effect in changes(run) if effect.error is not None)
    if errors:
        many = "one change" if len(errors) == 1 else f"{len(errors)} changes"
        middle = errors[len(errors) // 2]
        lines.append(
            f"Prediction error of {many}: median {_off(middle)}, largest {_off(errors[-1])}."
        )
    return lines


def _cases(cases: Line | None, proposed: bool, rate: float | None) -> list[str]:
    """Returns the effect of other resources, compared with the present or with a `proposed` setting."""
    if cases == {}:
        return ["No estimate for other resources: the cost of a stage was not measured."]
    present_rate = ((cases or {}).get("as it is") or {}).get("rows_per_s")
    if not cases or not present_rate:
        return []
    lines = []
    for name, case in cases.items():
        gain = case["rows_per_s"] / present_rate
        if name != "as it is":
            brings = "the same" if abs(gain - 1) <= _SAME_SHARE else f"{times(gain)} times the rows"
            rows = "" if proposed or rate is None else f", {count(gain * rate)} rows/s"
            lines.append(
                f"With {'that and ' if proposed else ''}{name}: {brings}{rows} "
                f"({', '.join(f'{s} {n}' for s, n in case['workers'].items())})."
            )
    return lines


def _off(share: float) -> str:
    return percent(share) if share <= 1 else f"a factor of {1 + share:.2g}"
