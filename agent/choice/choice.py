"""`auto`: one choice at every look, by the value of the candidates. Pure.

    snapshot ─▶ observation ─▶ candidates ─▶ value ─▶ choice ─▶ effect

The planner proposes one of the candidates. The agent takes the candidate with the best lower estimate of its gain over
staying. Two decisions are never compared: a change that has lost rows is undone, and memory is given back when it is
short. The planner measures that. If a change does not wait for the effect of the one before, both may be judged as one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from sluice.agent.choice.candidates import Candidate, list_candidates
from sluice.agent.choice.effect import Effects
from sluice.agent.choice.observation import Foreknowledge, Observation, observe
from sluice.agent.choice.value import UNBOUNDED, Value, pick
from sluice.agent.policies.planner.changes import change
from sluice.agent.policies.planner.explain import moves
from sluice.agent.policies.planner.planner import Planner
from sluice.agent.policies.planner.state import Decision, PlannerState
from sluice.agent.tunable import Policy, Reason
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

_CALM_TICKS = 3.0  # without a change, until the agent dares more
_FIRST_TICKS = 1.0  # in which the agent waits for all stages to work
_KINDS = {"lean": "release", "less": "release", "processes": "switch", "backend": "switch"}
"""How the planner judges a change: by the name of its candidate. All others are tries for more rows."""
_NAMED = {
    "stay": "to stay",
    "planner": "the planner's proposal",
    "lean": "no more workers than this rate needs",
    "double": "workers for twice the rows",
    "fourfold": "workers for four times the rows",
    "most": "workers for the most rows",
    "processes": "transforms in processes",
    "best": "the best setting so far",
    "more": "one step more",
    "less": "one step less",
    "backend": "another back end",
}


class Values(Protocol):
    """Gives each candidate a value."""

    @property
    def digest(self) -> str: ...

    @property
    def caution(self) -> float:
        """How many spreads a gain has to exceed."""

    def values(self, seen: Observation, candidates: Sequence[Candidate]) -> list[Value]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceState:
    """The planner's state, and what earlier choices brought."""

    planner: PlannerState
    effects: Effects = field(default_factory=Effects)
    asked: bool = False
    """Whether the network was asked already."""


_Chosen = tuple[Knobs, ChoiceState, Reason]


class Chooser(Policy):
    """Chooses among the candidates of each look. `known` is what is known before the first row."""

    name = "auto"

    def __init__(
        self,
        values: Values,
        *,
        known: Foreknowledge | None = None,
    ) -> None:
        self._values = values
        self._known = known or Foreknowledge()
        self.planner = Planner()

    def knowing(self, known: Foreknowledge) -> Chooser:
        """Returns the same policy with other knowledge of a pipeline."""
        return Chooser(self._values, known=known)

    def initial(self, limits: Limits, knobs: Knobs) -> ChoiceState:
        return ChoiceState(planner=self.planner.initial(limits, knobs))

    def made_of(self) -> dict[str, Any]:
        return {
            **self.planner.made_of(),
            "values": self._values.digest,
            "known": asdict(self._known),
        }

    def learned(self, state: ChoiceState) -> Mapping[str, Any]:
        return self.planner.learned(state.planner)

    def recall(self, state: ChoiceState, learned: Mapping[str, Any]) -> ChoiceState:
        return replace(state, planner=self.planner.recall(state.planner, learned))

    def explain(self, state: ChoiceState) -> dict[str, Any]:
        return self.planner.explain(state.planner)

    def next_look_s(self, state: ChoiceState) -> float | None:
        """Returns a short time until the network was asked: the first looks may see no rows."""
        planner = state.planner
        if not state.asked and planner.tick < self.planner.settings.patience_ticks:
            return self.planner.settings.quick_look_s
        return self.planner.next_look_s(planner)

    def decide(self, snapshot: Snapshot, state: ChoiceState) -> _Chosen:
        look = self.look(snapshot, state)
        if look.seen is None or len(look.candidates) < 2:
            return self.carry_out(look, look.planned_choice)
        return self.carry_out(look, *self.best(look))

    def best(self, look: LookChoice) -> tuple[int, list[Value]]:
        """Returns the number of the chosen candidate, and all values."""
        assert look.seen is not None
        values = self._values.values(look.seen, look.candidates)
        gains, spreads = (np.array(column) for column in zip(*values, strict=True))
        caution = caution_after(self._values.caution, look.seen)
        # The planner proposes nothing twice that has failed, so only its proposals may be hoped for.
        planned = [candidate.name == "planner" for candidate in look.candidates]
        return pick(gains, spreads, np.where(planned, caution, max(0.0, caution))), values

    def look(self, snapshot: Snapshot, state: ChoiceState) -> LookChoice:
        """Returns the candidates of a look, before any choice."""
        before = state.planner
        taken = self.planner.take_in(snapshot, before)
        planned = self.planner.plan(before, taken)
        if taken.events > before.events:
            state = replace(state, effects=state.effects.broken_off(taken.tick))
        seen = observe(before, taken, planned, state.effects, self._known)
        if (
            seen is None
            or _is_urgent(before, planned)
            or (seen.unmeasured and seen.state.tick < _FIRST_TICKS)
        ):
            return LookChoice(state=state, planned=planned)
        effects = state.effects.measured(seen.knobs, seen.recent.rows_per_s, seen.state.tick)
        state = replace(state, effects=effects)
        # Without a proposal, the planner may have judged the last change, or counted unneeded workers.
        staying = planned[1] if seen.proposal is None else seen.state
        if seen.proposal is None and before.trial is not None:
            seen = replace(
                seen,
                planned=self.planner.decide(snapshot, replace(before, trial=None, quiet_until=0)),
                early=True,
            )
        if seen.proposal is None and seen.recent.stall <= self.planner.settings.negligible_share:
            return LookChoice(state=state, planned=planned)
        seen = replace(seen, effects=effects)
        return LookChoice(
            state=replace(state, asked=state.asked or not seen.unmeasured),
            planned=seen.planned,
            seen=seen,
            candidates=list_candidates(seen),
            staying=staying,
        )

    def carry_out(
        self, look: LookChoice, number: int | None, values: Sequence[Value] = ()
    ) -> _Chosen:
        """Puts a candidate in force. None: the planner's decision, without a choice."""
        seen, state, staying = look.seen, look.state, look.staying
        knobs, planner, reason = look.planned
        if seen is None or staying is None or number is None:
            if knobs != state.planner.knobs:
                state = replace(state, effects=state.effects.changed(0.0, planner.tick))
            return knobs, replace(state, planner=planner), reason
        candidate = look.candidates[number]
        reason = _reason(look, number, values)
        if candidate.name == "stay":
            return seen.knobs, replace(state, planner=staying), reason
        if candidate.name != "planner":
            knobs, planner, reason = change(
                seen.state,
                candidate.knobs,
                _KINDS.get(candidate.name, "probe"),
                seen.recent,
                reason,
            )
        if seen.early:
            planner = _judged_together(staying, planner)
        effects = state.effects.changed(seen.recent.rows_per_s, seen.state.tick)
        return knobs, replace(state, planner=planner, effects=effects), reason


def caution_after(caution: float, seen: Observation) -> float:
    """Returns how many spreads a gain has to exceed. The longer nothing changes, the more the agent dares.

    A try that brings nothing is taken back soon, and its rate is known then. Below 0, the agent hopes for the best.
    Each change since the last event makes it wait longer. What is known of the present setting is void after an event,
    so the first change needs no more than a gain."""
    event = seen.effects.event
    made = sum(event is None or tick > event for tick in seen.effects.changes)
    if event is not None and not made:
        caution = min(caution, 0.0)
    calm = seen.state.age / (_CALM_TICKS * (1 + made))
    return max(-1.0, caution - math.log2(max(calm, 1.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LookChoice:
    """The candidates of a look. There is only `stay` if the trainer does not wait and the planner proposes nothing."""

    state: ChoiceState
    planned: Decision
    seen: Observation | None = None
    candidates: Sequence[Candidate] = ()
    staying: PlannerState | None = None
    """The planner's state after a choice to stay. None without candidates."""

    @property
    def planned_choice(self) -> int | None:
        """The number of the planner's decision among the candidates. None: there is nothing to choose."""
        if self.seen is None:
            return None
        names = [candidate.name for candidate in self.candidates]
        return names.index("planner") if "planner" in names and not self.seen.early else 0


def _is_urgent(before: PlannerState, planned: Decision) -> bool:
    """Returns whether the planner undoes a change that has lost rows, or gives memory back. Neither is a choice."""
    _, after, reason = planned
    saved = after.trial is not None and after.trial.kind == "memory" and after.age == 0
    return saved or (
        reason.details.get("kind") == "undo"
        and reason.details["gain"] < 1 - before.settings.min_gain
    )


def _judged_together(before: PlannerState, after: PlannerState) -> PlannerState:
    """Returns the state after a change that did not wait for the effect of the one before.

    If that one has lost rows so far, both are judged by the rate before them, and undone together."""
    first, second = before.trial, after.trial
    if first and second and first.rises and second.rows_per_s < first.rows_per_s:
        second = replace(
            second,
            before=first.before,
            rows_per_s=first.rows_per_s,
            predicted=max(second.predicted, first.rows_per_s),
        )
    return replace(after, trial=second)


def _reason(look: LookChoice, number: int, values: Sequence[Value]) -> Reason:
    """Returns one sentence about the choice, with all values behind it."""
    assert look.seen is not None
    chosen, planned = look.candidates[number], look.planned[2]
    if not values:
        return planned
    told = [
        f"{_NAMED[candidate.name]} ({100 * value.gain:+.0f} %)"
        if candidate.name != "stay"
        else "to stay"
        for candidate, value in zip(look.candidates, values, strict=True)
    ]
    others = ", ".join(text for i, text in enumerate(told) if i != number)
    moved = "" if chosen.name == "stay" else moves(look.seen.knobs, chosen.knobs)
    predicted = min(chosen.promised or chosen.rows_per_s, UNBOUNDED)
    return replace(
        planned,
        text=f"the agent chose {told[number]} over {others}{moved and ': '}{moved} (the planner: {planned.text})",
        predicted_rows_per_s=max(predicted, 1.0),
        choice={
            "chosen_by": "network",
            "chosen": chosen.name,
            "candidates": [
                {
                    "name": candidate.name,
                    "value": round(value.gain, 4),
                    "spread": round(value.spread, 4),
                }
                for candidate, value in zip(look.candidates, values, strict=True)
            ],
        },
    )
