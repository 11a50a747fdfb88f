"""`auto`: the planner, left where a learned advantage says that something else brings more rows, and only there.

At each decision the planner proposes (`sluice.agent.policies.learned.candidates`), a learned advantage
(`sluice.agent.policies.learned.advantage`)
says what each candidate is worth compared with the planner's own choice, which is left only for the candidate with
the highest lower bound, if the bound is above 0. That choice is then treated like a change of the planner's: measured,
and taken back if it does harm. Until its result is known, the planner is not left again, as it was not when the
advantage was learned; from then on the difference from the prediction corrects the bounds of its kind
(`sluice.agent.policies.learned.residual`), in this run and in later ones on the same machine and schema.
A shield protects the run: no candidate is chosen that memory may not hold or that lies outside the limits, none while
memory is short, and none once the cost of such changes exceeds `PRICE` of all rows.
If its weights cannot be read, the policy says so in one line and acts as the planner.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from sluice.agent.costs.rates import rates
from sluice.agent.policies.learned.advantage import WEIGHTS, WeightsError, load
from sluice.agent.policies.learned.candidates import KINDS, Candidate, candidates
from sluice.agent.policies.learned.residual import TRIAL_S, GainTrial, Residual
from sluice.agent.policies.planner.planner import MEMORY_ALARM, Planner
from sluice.agent.policies.planner.state import PlannerState as Planned
from sluice.agent.tunable import Reason
from sluice.ingest.knobs import KnobError, Knobs, Limits
from sluice.ingest.stats import Snapshot

_FILLS = 3  # looks at the start: rows are still on their way, and there is nothing to compare with
PRICE = 0.02  # of all rows: the most that leaving the planner's choice may have cost


class GainEstimator(Protocol):
    def mean(self, candidate: Candidate) -> float:
        """The additional rows expected over the planner's choice, as a share of what that brings."""

    def lower_bound(self, candidate: Candidate) -> float:
        """A cautious lower bound of these rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoState:
    planner: Planned
    left: int = 0
    """How many times the planner's choice was left."""
    cost_rows: float = 0.0
    trial: GainTrial | None = None
    """The last departure from the planner's choice, while its result is being measured."""
    known: GainTrial | None = None
    """The last departure whose result is known but not reported yet."""
    residuals: Mapping[str, Residual] = field(default_factory=dict)
    """Kind of candidate → how results differed from predictions."""


class Auto:
    name = "auto"

    def __init__(self, weights: Path = WEIGHTS, *, judge: GainEstimator | None = None) -> None:
        self._planner = Planner()
        self._judge = judge
        if judge is None:
            try:
                learned = load(weights)
                self._judge = None if learned.never else learned
            except WeightsError as error:
                print(f"auto is the planner, as its weights cannot be used: {error}", file=sys.stderr)

    def initial(self, limits: Limits, knobs: Knobs) -> AutoState:
        return AutoState(planner=self._planner.initial(limits, knobs))

    def decide(self, snapshot: Snapshot, state: AutoState) -> tuple[Knobs, AutoState, Reason]:
        state = _measured(state, snapshot)
        if self._judge is None or not _may_leave(snapshot, state):
            knobs, planned, reason = self._planner.decide(snapshot, state.planner)
            after = replace(state, planner=planned)
        else:
            knobs, after, reason = self._weigh(self._judge, snapshot, state)
        return (knobs, *_told(after, reason)) if knobs != state.planner.knobs else (knobs, after, reason)

    def _weigh(self, judge: GainEstimator, snapshot: Snapshot, state: AutoState) -> tuple[Knobs, AutoState, Reason]:
        found = candidates(self._planner, snapshot, state.planner)
        best, bound = self._choose(found, snapshot, state)
        after = replace(state, planner=best.state)
        if best is found[0]:
            return best.knobs, after, best.reason
        trial = GainTrial(kind=best.kind, foretold=judge.mean(best), knobs=(state.planner.knobs, best.knobs),
                          rows_per_s=_planned(found[0], snapshot, state.planner))
        reason = replace(best.reason, text=f"{best.reason.text}; at least {bound:+.0%} rows expected of it",
                         details={**best.reason.details, "left": best.kind, "bound": bound, "foretold": trial.foretold,
                                  "residual": state.residuals.get(best.kind, Residual()).correction})
        return best.knobs, replace(after, left=state.left + 1, trial=trial), reason

    def _choose(self, found: Sequence[Candidate], snapshot: Snapshot, state: AutoState) -> tuple[Candidate, float]:
        best, highest = found[0], 0.0
        for one in found[1:]:
            bound = self._bound(one, state)
            if bound > highest and _within(state.planner.limits, one.knobs):
                best, highest = one, bound
        return best, highest

    def _bound(self, candidate: Candidate, state: AutoState) -> float:
        assert self._judge is not None
        return self._judge.lower_bound(candidate) + state.residuals.get(candidate.kind, Residual()).correction

    def learned(self, state: AutoState) -> dict[str, Any]:
        return {**self._planner.learned(state.planner),
                "residuals": {kind: residual.to_dict() for kind, residual in state.residuals.items()}}

    def recall(self, state: AutoState, learned: Mapping[str, Any]) -> AutoState:
        state = replace(state, planner=self._planner.recall(state.planner, learned))
        try:
            residuals = {kind: Residual(**values).aged() for kind, values in learned.get("residuals", {}).items()
                         if kind in KINDS}
        except (TypeError, ValueError, AttributeError) as error:
            print(f"what came of leaving the planner's choice in earlier runs is ignored: {error}", file=sys.stderr)
            return state
        return replace(state, residuals=residuals)

    def explain(self, state: AutoState) -> dict[str, Any]:
        return {**self._planner.explain(state.planner), "left": state.left,
                "residuals": {kind: {**residual.to_dict(), "correction": residual.correction}
                              for kind, residual in state.residuals.items()}}


def _within(limits: Limits, knobs: Knobs) -> bool:
    try:
        limits.check(knobs)
    except KnobError:
        return False
    return True


def _may_leave(snapshot: Snapshot, state: AutoState) -> bool:
    return (state.trial is None and state.planner.tick >= _FILLS and state.cost_rows <= PRICE * snapshot.rows
            and snapshot.memory_used <= MEMORY_ALARM * snapshot.memory_limit)


def _planned(choice: Candidate, snapshot: Snapshot, state: Planned) -> float:
    """The rows a second that the planner's own choice is expected to bring."""
    assert state.last is not None, "there is nothing to choose from before the second look"
    lately = rates((*state.window, state.last)[0], snapshot) or rates(state.last, snapshot)
    assert lately is not None, "without rows there is nothing to choose from"
    hoped = choice.reason.predicted_rows_per_s if choice.knobs != state.knobs else None
    return max(lately.rows_per_s, hoped or 0.0)


def _measured(state: AutoState, snapshot: Snapshot) -> AutoState:
    """Adds what leaving the planner's choice has cost since the last look; at the end of the trial, learns from its
    result."""
    before = state.planner.last
    seen = rates(before, snapshot) if before is not None else None
    if state.trial is None or before is None or seen is None:
        return state
    trial = state.trial.after(seen, state.planner.knobs)
    cost = max(0.0, state.cost_rows + trial.missing - state.trial.missing)
    if snapshot.cpu_quota != before.cpu_quota:
        trial = trial.on(snapshot.cpu_quota / before.cpu_quota)
    if trial.seconds < TRIAL_S - 1e-9:
        return replace(state, trial=trial, cost_rows=cost)
    if not trial.compares:
        return replace(state, trial=None, cost_rows=cost)
    learned = state.residuals.get(trial.kind, Residual()).learn(trial)
    return replace(state, trial=None, known=trial, cost_rows=cost,
                   residuals={**state.residuals, trial.kind: learned})


def _told(state: AutoState, reason: Reason) -> tuple[AutoState, Reason]:
    """Adds to the reason the result of the last departure from the planner's choice, if it is not reported yet."""
    if state.known is None:
        return state, reason
    kind, foretold, came = state.known.kind, state.known.foretold, state.known.came
    text = f"{reason.text} (leaving the planner for {kind} brought {came:+.0%} rows where {foretold:+.0%} was foretold)"
    told = {"left": kind, "foretold": foretold, "came": came, "residual": came - foretold}
    return replace(state, known=None), replace(reason, text=text, details={**reason.details, "came": told})
