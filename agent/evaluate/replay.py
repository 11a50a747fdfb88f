"""Decides a recorded run again: `replay`. Nothing is loaded, because deciding needs only the recorded snapshots.

The first part proves that the record is complete: the same policy makes the same decisions. The second asks other
policies on the same snapshots. The third runs all of them in a simulator that is fitted to the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from sluice.agent import policies
from sluice.agent.policies.opening.contract import Foreknowledge
from sluice.agent.report.format import count, moves, percent, seconds
from sluice.agent.report.looks import RecordedLook, Start, read
from sluice.agent.report.page import filled
from sluice.agent.report.run_folder import Run
from sluice.agent.report.tables import table
from sluice.agent.simulator.fitted_run import FittedRun, RecordedDecisions, fit_run
from sluice.agent.simulator.rollout import Rollout, reference, run, score
from sluice.agent.tunable import Policy
from sluice.common.errors import UsageError
from sluice.ingest.knobs import Knobs

_TRUSTED = 0.15
"""The fit is off if the simulated rate differs by a larger share from the recorded one."""
_ROUNDED = 1.005
"""Smaller shares of the optimum are at most 100 % when they are rounded."""
_MOST_SHOWN = 12
"""The most differences of a policy that are listed."""
_OPEN_LOOP = (
    "The snapshots show what the recorded knobs brought. After its first different choice, the policy does not see the "
    "result of its own."
)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page: sentences, and then a table."""

    title: str
    sentences: Sequence[str]
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()

    @property
    def text(self) -> str:
        lines = [self.head, *self.rows] if self.rows else []
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        told = ["  " + "  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([self.title, *(f"  {one}" for one in self.sentences), *told])

    @property
    def html(self) -> str:
        told = "".join(f"<p>{escape(one)}</p>" for one in self.sentences)
        rows = [[escape(cell) for cell in row] for row in self.rows]
        shown = table(self.head, rows) if rows else ""
        return f"<section><h2>{escape(self.title)}</h2>{told}{shown}</section>"


@dataclass(frozen=True, slots=True)
class ReplayPage:
    """What came of deciding a run again."""

    name: str
    headline: str
    sections: Sequence[Section]
    figures: dict[str, Any]
    """The numbers, for JSON."""

    @property
    def text(self) -> str:
        return "\n\n".join([self.headline, *(one.text for one in self.sections)])

    @property
    def html(self) -> str:
        return filled(
            title=f"{self.name} decided again",
            name=self.name,
            headline=self.headline,
            rest="",
            footer="Written by sluice replay.",
            decisions="".join(one.html for one in self.sections),
        )


@dataclass(frozen=True, slots=True)
class _Answer:
    """A policy's choice at a recorded look."""

    look: RecordedLook
    knobs: Knobs
    proposal: Knobs | None
    error: str | None
    text: str

    @property
    def same(self) -> bool:
        look = self.look
        return (self.knobs, self.proposal, self.error) == (look.knobs, look.proposal, look.error)

    @property
    def other(self) -> str:
        """How the choice differs from the recorded one."""
        return self.error or moves(self.look.knobs.to_dict(), self.knobs.to_dict())


def replay(path: str, names: Sequence[str] = (), weights: str = "") -> ReplayPage:
    """Returns what the policies of these names would have decided in the run, and what that would have brought.

    `weights` is the file of the learned policy. Raises RunError if the run has no record of its looks."""
    recorded = Run.read(path)
    starts = read(recorded.path)
    own = starts[0].policy
    others = [name for name in names or policies.USUAL if name != own]
    proof, figures = _proof(starts, weights)
    sections = [proof]
    differing = {}
    for name in others if names else others[:1]:
        section, differing[name] = _open_loop(name, starts, weights)
        sections.append(section)
    simulated, shares = _simulated(recorded, starts, others, weights)
    return ReplayPage(
        recorded.path.resolve().name,
        _headline(proof.sentences[-1], shares),
        [*sections, simulated],
        {"policy": own, **figures, "differing_looks": differing, **shares},
    )


def _headline(proof: str, figures: dict[str, Any]) -> str:
    """Returns the proof with the shares of the optimum, or after the reason why these cannot be relied on."""
    if abs(figures.get("fit_error", 0)) > _TRUSTED:
        return f"The simulator is off by more than {percent(_TRUSTED)}: do not rely on it for this run. {proof}"
    shares = figures.get("share_of_optimum", {})
    told = ", ".join(f"{name} {_share(share)}" for name, share in shares.items())
    return f"{proof} Share of the simulated optimum: {told or 'unknown'}."


def _share(share: float) -> str:
    """Returns a share of the optimum. Above 100 %, the simulated optimum is not the best."""
    return percent(share) if share < _ROUNDED else "more than the optimum, which is not the best"


def _make(name: str, start: Start, weights: str) -> Policy:
    """Returns the policy with what the recorded one knew of the pipeline."""
    parts = start.made_of
    known = Foreknowledge.from_dict(parts["known"]) if "known" in parts else None
    return policies.make(name, known, weights)


def _ask(policy: Policy, start: Start) -> Iterator[_Answer]:
    """Yields the policy's choice at each look. It ends at the policy's first error, as the run does."""
    state = policy.initial(start.limits, start.knobs)
    if start.learned is not None:
        recalled = policy.recall(state, start.learned)
        state = state if recalled is None else recalled
    knobs = start.knobs
    for look in start.looks:
        try:
            knobs, state, reason = policy.decide(look.snapshot, state)
        except Exception as error:
            yield _Answer(look, knobs, None, f"{type(error).__name__}: {error}", "")
            return
        yield _Answer(look, knobs, reason.proposal, None, reason.text)


def _proof(starts: Sequence[Start], weights: str) -> tuple[Section, dict[str, Any]]:
    """Asks the run's own policy again."""
    first = starts[0]
    title = f"The run's own policy, {first.policy}, asked again"
    looks = sum(len(start.looks) for start in starts)
    figures: dict[str, Any] = {"looks": looks, "same_looks": 0, "first_difference_s": None}
    notes = []
    try:
        for start in starts:
            policy = _make(start.policy, start, weights)
            notes += _other_parts(start, policy)
            for one in _ask(policy, start):
                if not one.same:
                    figures["first_difference_s"] = one.look.at
                    return Section(title, [*dict.fromkeys(notes), _first(one, first)]), figures
                figures["same_looks"] += 1
    except (UsageError, ValueError) as error:
        return Section(title, [f"Its decisions cannot be checked: {error}."]), figures
    return Section(
        title, [*dict.fromkeys(notes), f"All {looks} decisions of {first.policy} are the same."]
    ), figures


def _other_parts(start: Start, policy: Policy) -> list[str]:
    """Returns how the policy differs from the recorded one, in sentences."""
    here, there = policy.made_of(), start.made_of
    if "unknown" in there:
        return [f"The run does not say what its policy is made of: {there['unknown']}."]
    told = []
    if here.get("weights") != there.get("weights"):
        told.append(
            f"The run had the weights {there.get('weights', 'none')}, and here are {here.get('weights', 'none')}. Pass "
            "--agent-weights."
        )
    if here.get("settings") != there.get("settings"):
        told.append("The planner's settings are not those of the run.")
    return told


def _first(one: _Answer, start: Start) -> str:
    return (
        f"The first different decision is at {seconds(one.look.at)}: {one.other}, compared with the record. The "
        f"run was made by version {start.version}; this version or the weights decide otherwise."
    )


def _open_loop(name: str, starts: Sequence[Start], weights: str) -> tuple[Section, int]:
    """Asks another policy on the same snapshots. Lists each new difference."""
    differing = 0
    rows: list[Sequence[str]] = []
    looks = sum(len(start.looks) for start in starts)
    for start in starts:
        last = None
        for one in _ask(_make(name, start, weights), start):
            pair = None if one.knobs == one.look.knobs else (one.look.knobs, one.knobs)
            differing += pair is not None
            if pair is not None and pair != last:
                rows.append((seconds(one.look.at), str(one.look.knobs), one.other, one.text))
            last = pair
    more = f" The first {_MOST_SHOWN} of {len(rows)} are listed." if len(rows) > _MOST_SHOWN else ""
    return Section(
        f"{name}, asked on the run's snapshots",
        [f"It would have had other knobs at {differing} of {looks} looks.{more}", _OPEN_LOOP],
        ("at", "the run had", f"{name} would have", "because"),
        rows[:_MOST_SHOWN],
    ), differing


def _simulated(
    recorded: Run, starts: Sequence[Start], others: Sequence[str], weights: str
) -> tuple[Section, dict[str, Any]]:
    """Runs all policies in a simulator fitted to the run."""
    title = "All policies in a simulator fitted to this run"
    changes = [
        event["at"]
        for event in recorded.events
        if event.get("kind") == "occasion" or "fault" in event
    ]
    try:
        fitted = fit_run(starts, changes)
        tried: list[Policy] = [RecordedDecisions(fitted)]
        tried += [_make(name, starts[0], weights) for name in (starts[0].policy, *others)]
    except (UsageError, ValueError) as error:
        return Section(title, [f"Not possible: {error}."]), {}
    best = reference(fitted)
    outcomes = {policy.name: run(fitted, policy) for policy in tried}
    rate = outcomes[RecordedDecisions.name].rows / fitted.seconds
    off = rate / fitted.rows_per_s - 1
    rows = [_row(name, one, best) for name, one in {**outcomes, "optimum": best}.items()]
    many = recorded.ranks > 1
    head = (
        "policy",
        "rows/s a rank" if many else "rows/s",
        "share of the optimum",
        "regret",
        "knobs at the end",
    )
    return Section(title, _trust(fitted, rate, off, many), head, rows), {
        "recorded_rows_per_s": round(fitted.rows_per_s),
        "simulated_rows_per_s": round(rate),
        "fit_error": round(off, 4),
        "share_of_optimum": {name: round(score(one, best), 4) for name, one in outcomes.items()},
        "optimum_rows_per_s": round(best.rows / fitted.seconds),
    }


def _trust(fitted: FittedRun, rate: float, off: float, many: bool) -> list[str]:
    """Returns how far the fit can be trusted, in sentences."""
    whose = "Each rank of the run" if many else "The run"
    told = [
        f"{whose} had {count(fitted.rows_per_s)} rows/s over {seconds(fitted.seconds)}.",
        f"The simulator with the recorded decisions has {count(rate)} rows/s ({off:+.0%}).",
        f"Periods with costs of their own: {len(fitted.costs)}.",
    ]
    if abs(off) > _TRUSTED:
        told.append(
            f"This is off by more than {percent(_TRUSTED)}: do not rely on the figures below."
        )
    if fitted.backends:
        told.append(f"These stages stay in processes: {', '.join(fitted.backends)}.")
    return [*told, "Settings that the run did not have are extrapolated."]


def _row(name: str, outcome: Rollout, best: Rollout) -> list[str]:
    share = score(outcome, best)
    killed = " (killed for memory)" if outcome.killed else ""
    return [
        name + killed,
        count(outcome.rows / outcome.scenario.seconds),
        _share(share),
        percent(max(0.0, 1 - share)),
        str(outcome.knobs),
    ]
