"""`auto`: a learned opening, which the planner verifies and goes on from.

At the first look, some quarter of a second after the first batch and before any knob moved, an `Opener` chooses all
knobs at once. Its choice is a change on trial against what the planner's own choice promises: the planner goes on from
it, or tries its own. The opener does not act where an input is outside its training range, where memory has no room,
where the trainer does not wait, or where it expects fewer rows than the planner promises. Where an earlier run has
settled on this schema, the run starts from there, and the opener's choice is tried once, when the planner knows nothing
better. Without an opener `auto` is the planner.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from sluice.agent.costs.forecast import Forecast
from sluice.agent.costs.rates import PipelineRates
from sluice.agent.planner_settings import DEFAULT, PlannerSettings
from sluice.agent.policies.opening.contract import Foreknowledge, Opener, Opening, OpeningInput
from sluice.agent.policies.opening.record import OpeningRecord
from sluice.agent.policies.planner.changes import change
from sluice.agent.policies.planner.explain import moves
from sluice.agent.policies.planner.planner import Planner, forecast_of, rates_of, resting
from sluice.agent.policies.planner.state import PlannerState
from sluice.agent.tunable import Policy, Reason
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoState:
    """The planner's state, and what became of the opening."""

    planner: PlannerState
    begun: Snapshot | None = None
    """The snapshot from which on is looked."""
    settled_before: bool = False
    """Whether an earlier run has settled on this schema."""
    record: OpeningRecord | None = None
    """What was seen and chosen, and what has come since; None until the opener was asked."""
    said: str = ""
    """What the opener was asked, and what became of it, in a sentence."""
    challenge: Opening | None = None
    """What is to be tried once against what an earlier run has settled on."""


class Auto(Policy):
    """The planner, opened by `opener`, which may know some things before the first row."""

    name = "auto"

    def __init__(
        self,
        opener: Opener,
        *,
        known: Foreknowledge | None = None,
        settings: PlannerSettings = DEFAULT,
    ) -> None:
        self._opener = opener
        self._known = known or Foreknowledge()
        self._settings = settings
        self._planner = Planner(settings)

    def initial(self, limits: Limits, knobs: Knobs) -> AutoState:
        return AutoState(planner=self._planner.initial(limits, knobs))

    def learned(self, state: AutoState) -> Mapping[str, Any]:
        return self._planner.learned(state.planner)

    def recall(self, state: AutoState, learned: Mapping[str, Any]) -> AutoState:
        return replace(
            state,
            planner=self._planner.recall(state.planner, learned),
            settled_before=bool(learned.get("settled", True)),
        )

    def explain(self, state: AutoState) -> dict[str, Any]:
        return self._planner.explain(state.planner)

    def opened(self, state: AutoState) -> dict[str, Any] | None:
        if state.record is None or state.planner.last is None:
            return None
        return {
            "text": state.said,
            "record": state.record.ended(state.planner.knobs, state.planner.last).to_dict(),
        }

    def next_look_s(self, state: AutoState) -> float | None:
        """Soon until the opener was asked: rows come in bunches, and at a first glance there may be none."""
        planner = state.planner
        asking = state.record is None and planner.age == planner.tick < self._settings.patience
        return self._settings.glance_s if asking else self._planner.next_look_s(planner)

    def decide(self, snapshot: Snapshot, state: AutoState) -> tuple[Knobs, AutoState, Reason]:
        before = state.planner
        knobs, after, reason = self._planner.decide(snapshot, before)
        if before.last is None:
            return knobs, replace(state, planner=after, begun=snapshot), reason
        record = None if state.record is None else state.record.later(snapshot)
        state = replace(state, planner=after, record=record)
        recent = rates_of(before, before.last, snapshot)
        if recent is None or recent.rows_per_s <= 0:
            return knobs, state, reason
        if state.challenge is not None:
            return self._challenge(state, before, recent, knobs, reason)
        forecast = forecast_of(replace(after, knobs=before.knobs), recent)
        first = before.age == before.tick and before.trial is None
        unknown = after.services.keys() - forecast.each.keys() - resting(after, recent)
        if (
            record is not None
            or not first
            or state.begun is None
            or (unknown and knobs == before.knobs)
        ):
            return knobs, state, reason
        return self._open(state, before, forecast, recent, snapshot, (knobs, reason), unknown)

    def _open(  # noqa: PLR0917
        self,
        state: AutoState,
        before: PlannerState,
        forecast: Forecast,
        recent: PipelineRates,
        snapshot: Snapshot,
        own: tuple[Knobs, Reason],
        unknown: AbstractSet[str],
    ) -> tuple[Knobs, AutoState, Reason]:
        """Asks the opener, and does what it says if that is allowed and differs from the planner's `own` choice. Of the
        stages in `unknown` nothing has been seen yet, and the planner moves all the same."""
        assert state.begun is not None, "the first look has come"
        knobs, reason = own
        weighed = max(
            (service.process_bytes for service in state.planner.services.values()), default=0
        )
        given = OpeningInput(
            begun=state.begun,
            seen=snapshot,
            knobs=before.knobs,
            limits=before.limits,
            known=self._known,
            process_bytes=weighed or None,
        )
        opening = self._opener.open(given)
        opening = replace(
            opening,
            knobs=_of_use(
                _of_known(opening.knobs, before.knobs, forecast.services),
                forecast,
                opening.rows_per_s or 0.0,
            ),
        )
        state = replace(state, record=OpeningRecord(given=given, opening=opening, own=knobs))
        fitting = _fitting(forecast, opening.knobs) if opening.inside else None
        fed = recent.stall <= self._settings.smooth
        if (
            unknown
            or fitting is None
            or fed
            or state.settled_before
            or _alike(fitting, knobs, self._settings)
        ):
            if unknown:
                said = f"no opening: nothing is known of {', '.join(sorted(unknown))} yet"
            elif not opening.inside:
                said = f"no opening: {opening.reason}"
            elif fitting is None:
                said = "no opening: memory has no room for it"
            elif state.settled_before:
                said = "no opening: an earlier run has settled on the knobs"
            elif fed:
                said = "no opening: the trainer does not wait"
            else:
                said = "the opening would be much the same"
            challenge = (
                replace(opening, knobs=fitting)
                if fitting is not None and state.settled_before
                else None
            )
            return (
                knobs,
                replace(state, said=said, challenge=challenge),
                replace(reason, text=f"{reason.text} ({said})"),
            )
        if knobs.backend != before.knobs.backend or knobs.fused != before.knobs.fused:
            knobs = before.knobs  # what another shape promises is hardly more than a guess
        # Back ends are not moved to and fro for a promise that does not know of locks.
        instead = (knobs, forecast.rate(knobs.workers)) if _shaped_alike(fitting, knobs) else None
        assert opening.rows_per_s is not None, "the input lies within what was taught"
        if instead is not None and opening.rows_per_s < instead[1]:
            said = (
                f"no opening: the policy expects {opening.rows_per_s:,.0f} rows/s of its own setting, and the "
                f"planner {instead[1]:,.0f} of its choice"
            )
            return (
                own[0],
                replace(state, said=said),
                replace(reason, text=f"{reason.text} ({said})"),
            )
        return self._try(state, before, replace(opening, knobs=fitting), recent, instead)

    def _challenge(
        self,
        state: AutoState,
        before: PlannerState,
        recent: PipelineRates,
        knobs: Knobs,
        reason: Reason,
    ) -> tuple[Knobs, AutoState, Reason]:
        """Tries the opening once against what an earlier run has settled on, when the planner holds still although the
        trainer waits, and if more than the present rate is promised."""
        after, opening = state.planner, state.challenge
        assert opening is not None, "there is something to try"
        assert opening.rows_per_s is not None, "it lies within what was taught"
        calm = knobs == before.knobs and after.trial is None and after.age >= self._settings.ours
        if not calm or recent.stall <= self._settings.smooth:
            return knobs, state, reason
        state = replace(state, challenge=None)
        if _alike(opening.knobs, knobs, self._settings) or (
            opening.rows_per_s < self._settings.worth * recent.rows_per_s
        ):
            return knobs, state, reason
        return self._try(state, before, opening, recent)

    def _try(
        self,
        state: AutoState,
        before: PlannerState,
        opening: Opening,
        recent: PipelineRates,
        own: tuple[Knobs, float] | None = None,
    ) -> tuple[Knobs, AutoState, Reason]:
        """Puts the opening in force, on trial against `recent` and against the planner's `own` choice, whose promise
        comes with it."""
        assert opening.rows_per_s is not None, "it lies within what was taught"
        promised = max(opening.rows_per_s, self._settings.worth * recent.rows_per_s)
        planner = replace(state.planner.undecided(before), trial=None, spare=0)
        instead, theirs = own or (before.knobs, recent.rows_per_s)
        knobs, planner, reason = change(
            planner,
            opening.knobs,
            "opening",
            recent,
            Reason(
                text=f"the opening, by {opening.reason}: {moves(before.knobs, opening.knobs)}; {promised:,.0f} "
                f"rows/s are "
                f"promised, and {theirs:,.0f} by the planner's own choice",
                predicted_rows_per_s=promised,
                details={"kind": "opening", "own": instead.to_dict(), "own_rows_per_s": theirs},
            ),
        )
        assert planner.trial is not None, "the opening is on trial"
        assert state.record is not None, "the opener was asked"
        trial = (
            planner.trial
            if own is None
            else replace(planner.trial, own=own[0], own_rows_per_s=own[1])
        )
        return (
            knobs,
            replace(
                state,
                planner=replace(planner, trial=trial),
                record=replace(state.record, tried=True),
                said=reason.text,
            ),
            reason,
        )


def _of_known(chosen: Knobs, now: Knobs, known: Container[str]) -> Knobs:
    """The chosen knobs; stages of which nothing is known yet keep theirs."""
    return replace(
        chosen,
        workers={n: chosen.workers[n] if n in known else count for n, count in now.workers.items()},
        backend={**now.backend, **{n: kind for n, kind in chosen.backend.items() if n in known}},
    )


def _of_use(chosen: Knobs, forecast: Forecast, rows_per_s: float) -> Knobs:
    """The chosen knobs; but stages that at such a rate would not compute enough to hold up each other stay on threads,
    as the way to a process and back takes time on a core."""
    now, settings = forecast.knobs.backend, forecast.settings
    cores = {
        n: forecast.computing(n, rows_per_s)
        for n, kind in chosen.backend.items()
        if kind == "process" and now.get(n, "thread") == "thread"
    }
    enough = {n for n in cores if cores[n] >= settings.little}
    moved = enough if sum(cores[n] for n in enough) >= settings.holds else set()
    return replace(
        chosen, backend={**chosen.backend, **dict.fromkeys(cores.keys() - moved, "thread")}
    )


def _fitting(forecast: Forecast, knobs: Knobs) -> Knobs | None:
    """The knobs, or as much of them as fits in the share of the free memory that an opening may take; None if nothing
    does."""
    settings, limits = forecast.settings, forecast.limits
    room = min(
        forecast.memory(forecast.knobs) + settings.process_share * forecast.free_bytes,
        settings.memory_target * forecast.memory_limit,
    )
    share = 1.0
    for _ in range(2 * settings.halvings):
        fitting = limits.clamp(
            replace(
                knobs,
                workers={n: math.ceil(share * count) for n, count in knobs.workers.items()},
                read_ahead_bytes=int(share * knobs.read_ahead_bytes),
                prefetch_bytes=int(share * knobs.prefetch_bytes),
            )
        )
        if replace(forecast, knobs=fitting).memory(fitting) <= room:
            return fitting
        share *= settings.lower
    return None


def _alike(one: Knobs, other: Knobs, settings: PlannerSettings) -> bool:
    """Whether two settings hardly differ in workers, and not in back ends."""
    apart = max(abs(math.log(count / other.workers[n])) for n, count in one.workers.items())
    return apart < math.log(settings.apart) and _shaped_alike(one, other)


def _shaped_alike(one: Knobs, other: Knobs) -> bool:
    """Whether two settings do not differ in back ends."""
    return all(one.backend.get(n, "thread") == other.backend.get(n, "thread") for n in one.workers)
