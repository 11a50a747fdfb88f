"""`auto`: the planner, left where a learned advantage says that something else brings more rows, and only there.

At each decision the planner proposes (`agent.policies.candidates`), a learned advantage (`agent.policies.advantage`)
tells what each candidate is worth beside the planner's own choice, and that choice is left only for the candidate with
the highest lower bound, if the bound is above 0. What is chosen then goes on like a change of the planner's: measured,
and taken back if it does harm. A shield stands above: no candidate that memory may not hold or that lies outside the
limits, none while memory is short, and none once what such changes have cost exceeds `PRICE` of all rows.
Without weights that can be read, it says so in one line and is the planner.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from agent.policies.advantage import WEIGHTS, WeightsError, load
from agent.policies.candidates import Candidate, candidates
from agent.policies.planner import MEMORY_ALARM, Planner
from agent.policies.state import State as Planned
from agent.tunable import Reason
from ingest.knobs import KnobError, Knobs, Limits
from ingest.stats import Snapshot

PRICE = 0.02  # of all rows: the most that leaving the planner's choice may have cost
_TRIAL_S = 10.0  # for so long after such a change, fewer rows than before are its cost


class Judge(Protocol):
    def lower_bound(self, candidate: Candidate) -> float:
        """Rows more than by the planner's choice that are certain enough, as a share of what that brings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    planner: Planned
    left: int = 0
    """Times that the planner's choice was left."""
    cost_rows: float = 0.0
    trial: tuple[float, float] | None = None
    """When it was left last, and the rows a second before that."""


class Auto:
    name = "auto"

    def __init__(self, weights: Path = WEIGHTS, *, judge: Judge | None = None) -> None:
        self._planner = Planner()
        self._judge = judge
        if judge is None:
            try:
                learned = load(weights)
                self._judge = None if learned.never else learned
            except WeightsError as error:
                print(f"auto is the planner, as its weights cannot be used: {error}", file=sys.stderr)

    def initial(self, limits: Limits, knobs: Knobs) -> State:
        return State(planner=self._planner.initial(limits, knobs))

    def decide(self, snapshot: Snapshot, state: State) -> tuple[Knobs, State, Reason]:
        if self._judge is None:
            knobs, after, reason = self._planner.decide(snapshot, state.planner)
            return knobs, replace(state, planner=after), reason
        state = _charge(state, snapshot)
        found = candidates(self._planner, snapshot, state.planner)
        best, bound = self._choose(found, snapshot, state)
        if best is found[0]:
            return best.knobs, replace(state, planner=best.state), best.reason
        before = state.planner.last
        assert before is not None, "there is nothing to choose from before the second look"
        rate = (snapshot.rows - before.rows) / (snapshot.at - before.at)
        reason = replace(best.reason, text=f"{best.reason.text}; at least {bound:+.0%} rows expected of it",
                         details={**best.reason.details, "left": best.kind, "bound": bound})
        return best.knobs, replace(state, planner=best.state, left=state.left + 1, trial=(snapshot.at, rate)), reason

    def _choose(self, found: Sequence[Candidate], snapshot: Snapshot, state: State) -> tuple[Candidate, float]:
        assert self._judge is not None
        best, highest = found[0], 0.0
        if state.cost_rows > PRICE * snapshot.rows or snapshot.memory_used > MEMORY_ALARM * snapshot.memory_limit:
            return best, highest
        for one in found[1:]:
            bound = self._judge.lower_bound(one)
            if bound > highest and _within(state.planner.limits, one.knobs):
                best, highest = one, bound
        return best, highest

    def learned(self, state: State) -> dict[str, Any]:
        return self._planner.learned(state.planner)

    def recall(self, state: State, learned: Mapping[str, Any]) -> State:
        return replace(state, planner=self._planner.recall(state.planner, learned))

    def explain(self, state: State) -> dict[str, Any]:
        return {**self._planner.explain(state.planner), "left": state.left}


def _within(limits: Limits, knobs: Knobs) -> bool:
    try:
        limits.check(knobs)
    except KnobError:
        return False
    return True


def _charge(state: State, snapshot: Snapshot) -> State:
    """What a change has cost since the last look, if one is on trial."""
    before = state.planner.last
    if state.trial is None or before is None or snapshot.at <= before.at:
        return state
    at, rate = state.trial
    if snapshot.at - at > _TRIAL_S:
        return replace(state, trial=None)
    missing = rate * (snapshot.at - before.at) - (snapshot.rows - before.rows)
    return replace(state, cost_rows=max(0.0, state.cost_rows + missing))
