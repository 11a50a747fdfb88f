"""`Tuner`: each look updates what is known of the stages' costs, and one rule values every candidate. Pure.

    snapshot ─▶ costs (`stage_model`, `lock`) ─▶ forecast (`outlook`) ─▶ candidates (`propose`) ─▶ value ─▶ choice

    value = E[max(rate, rate now)] − trial ÷ horizon × E[max(0, rate now − rate)] − price

The first term is what is kept, since a change that turns out worse is left again. The second is what trying it costs.
The horizon is the time for which costs have stayed as they are. No change is undone by a rule: the setting before is a
candidate at each look, at today's costs. A second visit teaches nothing new, so only its expected rate counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy import ndarray

from sluice.agent.costs.forecast import MEMORY_ALARM, what_if
from sluice.agent.costs.rates import rates
from sluice.agent.report.format import moves
from sluice.agent.tunable import Policy, Reason
from sluice.agent.tuner.outlook import UNBOUNDED, Outlook
from sluice.agent.tuner.propose import candidates
from sluice.agent.tuner.settings import TunerSettings
from sluice.agent.tuner.state import TunerState, take_in
from sluice.agent.tuner.trials import layout
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

_Decision = tuple[Knobs, TunerState, Reason]
_LONGEST_START_S = 30.0  # for which workers that start, and their items, are waited for
_LONGEST_FLEET_S = 400.0  # the same on other hosts
_TRUST = 1 / 0.3**2  # the most weight of a cost from an earlier run
_KEPT = 4  # earlier settings
_DEARER, _CHEAPER = 1.4, 0.5  # times the cost of a row: what the report tells
_FED = 0.02  # of its time: a trainer that waits less is fed


class Tuner(Policy):
    """Chooses the setting with the highest value at each look."""

    name = "auto"

    def __init__(self, settings: TunerSettings = TunerSettings()) -> None:  # noqa: B008
        self.settings = settings

    def initial(self, limits: Limits, knobs: Knobs) -> TunerState:
        return TunerState.of(limits, knobs)

    def made_of(self) -> dict[str, Any]:
        return {"settings": asdict(self.settings)}

    def next_look_s(self, state: TunerState) -> float | None:
        if not state.looks:
            return self.settings.quick_s
        at, settings = state.last.at, self.settings
        new = state.changed_at is not None and at - state.changed_at < settings.settle_s
        quick = new or state.suspects or at - state.began < settings.first_s
        return settings.quick_s if quick else settings.usual_s

    def decide(self, snapshot: Snapshot, state: TunerState) -> _Decision:
        return self.plan(take_in(state, snapshot, self.settings))

    def plan(self, state: TunerState) -> _Decision:
        """Decides on a look that was taken in."""
        knobs, after, reason = self._plan(state)
        if knobs == state.knobs and reason is not state.stayed and after.looks:
            after = replace(after, stayed=reason, chosen_at=state.last.at)
        return knobs, after, replace(reason, incident=noticed(state))

    def _plan(self, state: TunerState) -> _Decision:
        recent = state.recent()
        if recent is None:
            return state.knobs, state, Reason(text="first look")
        if state.stayed is not None and self._rests(state):
            return state.knobs, state, state.stayed
        seen = Outlook(self.settings, state, recent)
        if not seen.forecast.costs:
            return state.knobs, state, Reason(text="waiting for work")
        if seen.is_settled:
            state = replace(state, other_cpu_s=seen.other_cpu_s)
        state = self._compare(state, seen)
        memory = self._give_memory_back(state, seen)
        if memory is not None:
            return memory
        waiting = self._waits_for(state, seen)
        if waiting is not None:
            return state.knobs, state, Reason(text=waiting, bottleneck=_name(seen))
        return self._choose(state, seen)

    def _rests(self, state: TunerState) -> bool:
        """Whether nothing has happened for a while, so that candidates are compared less often."""
        settings, last = self.settings, state.last
        calm = last.at - state.since > settings.calm_s and not state.suspects
        fits = last.memory_used <= MEMORY_ALARM * last.memory_limit
        return calm and fits and last.at - state.chosen_at < settings.seldom_s

    def _waits_for(self, state: TunerState, seen: Outlook) -> str | None:
        """Returns what must be measured before the next choice. None: nothing."""
        settings, at = self.settings, seen.at
        unknown = [n for n, s in state.stages.items() if not s.known and not seen.is_idle(n)]
        if unknown and at - state.began < settings.first_s:
            return f"waiting for the first work of {', '.join(unknown)}"
        if not state.demands and seen.recent.stall <= _FED and at - state.began < settings.first_s:
            return "the trainer does not wait, and what it takes is not measured yet"
        if state.suspects and at - state.event_at > 1.0:
            return "a cost may have changed; the next look tells"
        if state.changed_at is None:
            return None
        since = at - max(state.changed_at, state.started_at)
        before = state.before[0]
        moved = layout(before) != layout(state.knobs)
        if state.event_at > state.changed_at and not moved:
            return None
        elsewhere = state.last.elsewhere.get("starting")
        if at - state.changed_at < (_LONGEST_FLEET_S if elsewhere else _LONGEST_START_S):
            if any(stage.starting for stage in state.last.stages):
                return "waiting for workers to start"
            if moved and not state.trials.checked_since(state.knobs, state.changed_at):
                return "measuring the last change"
        changed = [n for n in state.knobs.workers if _differs(before, state.knobs, n)]
        items = [4 * seen.item_s(n) for n in changed if not state.stages[n].is_stuck]
        longest = min(max(items, default=0.0), _LONGEST_START_S)
        fresh = all(state.stages[n].is_fresh(state.knobs.workers[n]) for n in changed)
        if since < 0.5 or (not fresh and since < max(settings.settle_s, longest)):
            return "measuring the last change"
        return None

    def _compare(self, state: TunerState, seen: Outlook) -> TunerState:
        """Returns the state with one more comparison of the forecast with the measured rate."""
        if any(stage.starting for stage in state.last.stages):
            return state
        looks = [w for w in state.looks if w.at >= state.since + 0.2]
        measured = rates(looks[0], looks[-1]) if len(looks) > 1 else None
        moved = bool(state.before) and layout(state.before[0]) != layout(state.knobs)
        if (
            measured is None
            or measured.rows_per_s <= 0
            or measured.seconds < (1.2 if moved else 0.45)
        ):
            return state
        off = math.log(measured.rows_per_s / float(np.mean(seen.rate(state.knobs))))
        trials = state.trials.check(state.knobs, min(0.5, max(-1.5, off)), seen.at)
        return replace(state, trials=trials)

    def _give_memory_back(self, state: TunerState, seen: Outlook) -> _Decision | None:
        """Returns a change to a setting that needs less memory, if memory is short."""
        forecast, last = seen.forecast, state.last
        short = last.memory_used > MEMORY_ALARM * last.memory_limit
        if not short and forecast.memory(state.knobs) <= forecast.memory_limit:
            return None
        knobs, best = forecast.best(seen.ranges, fewest=True, tight=True)
        if forecast.memory(knobs) >= forecast.memory(state.knobs):
            return None
        return self._change(state, seen, "memory", knobs, best, ", as memory is short")

    # ---- the choice

    def _choose(self, state: TunerState, seen: Outlook) -> _Decision:
        """Returns the candidate with the highest value, or stays."""
        settings = self.settings
        now = seen.rate(state.knobs)
        base = float(np.mean(now))
        if base * (1 + settings.price) >= seen.demand:  # no setting brings more
            return self._release(state, seen, base)
        calm_s = seen.at - max(state.event_at, state.began)
        horizon_s = min(max(calm_s, settings.least_horizon_s), settings.most_horizon_s)
        told, best, chosen = [("stay", 0.0)], 0.0, None
        tried: list[Knobs] = [state.knobs]
        for name, wanted in candidates(seen):
            knobs = state.limits.complete(state.limits.clamp(wanted))
            moved = layout(knobs) != layout(state.knobs)
            if knobs in tried or (moved and layout(state.knobs) not in state.trials.off):
                continue
            tried.append(knobs)
            rate = seen.rate(knobs) * math.exp(state.trials.error(state.knobs, knobs))
            value = self._value(state, seen, knobs, rate, now, horizon_s)
            told.append((name, round(value, 4)))
            if value > best:
                best, chosen = value, (name, knobs, float(np.mean(rate)))
        if chosen is not None:
            return self._change(state, seen, *chosen, told=told)
        return self._release(state, seen, base)

    def _value(  # noqa: PLR0917
        self,
        state: TunerState,
        seen: Outlook,
        knobs: Knobs,
        rate: ndarray,
        now: ndarray,
        horizon_s: float,
    ) -> float:
        """Returns what a setting is worth over staying, as a share of the present rate."""
        settings, base = self.settings, float(np.mean(now))
        changed = [n for n in knobs.workers if _differs(state.knobs, knobs, n)]
        moved = any(knobs.backend.get(n) != state.knobs.backend.get(n) for n in changed)
        item_s = max((seen.item_s(n) for n in changed), default=0.0)
        trial_s = settings.trial_s + settings.trial_items * item_s + settings.start_s * moved
        if state.trials.count(knobs):
            value = float(np.mean(rate)) / base - 1
        else:
            kept = float(np.mean(np.maximum(rate, now))) / base - 1
            lost = float(np.mean(np.maximum(now - rate, 0.0))) / base
            value = kept - min(1.0, trial_s / horizon_s) * lost
        forecast = seen.forecast
        value -= _start_share(state.knobs, knobs, seen) * settings.start_s / horizon_s
        remote = forecast.price(knobs.workers) - forecast.price(state.knobs.workers)
        return value - state.trials.price(knobs, settings.price) * (1 + moved) - remote / base

    def _release(self, state: TunerState, seen: Outlook, now: float) -> _Decision:
        """Gives workers back that were not needed for a while, or stays."""
        stay = _stay(seen, now)
        # Ranks that wait for another host's rank look as if their trainer was slow.
        waits_elsewhere = seen.recent.longest_stall > _FED >= seen.recent.stall
        if seen.bottleneck not in ("consumer", "cores") or waits_elsewhere:
            return state.knobs, replace(state, lean_since=None), stay
        # Without the slowdown by other programs. The stages still get no more than `stage_cores`.
        easy = replace(seen.forecast, slow=1.0, demand=1.2 * seen.forecast.demand)
        needed = easy.best(seen.ranges, fewest=True)[0].workers
        workers = {
            n: min(count, max(needed[n], math.ceil(count / 3)))
            for n, count in state.knobs.workers.items()
        }
        lean = replace(state.knobs, workers=workers)
        few = lean.total_workers > 0.75 * state.knobs.total_workers
        if few or float(np.mean(seen.rate(lean))) < 0.99 * now:
            return state.knobs, replace(state, lean_since=None), stay
        since = seen.at if state.lean_since is None else state.lean_since
        patience_s = self.settings.release_s * 4**state.releases
        if any(workers[n] < state.knobs.workers[n] for n in seen.forecast.remote_stages):
            patience_s = max(patience_s, state.last.elsewhere.get("start_s", 0.0))
        if seen.at - since < patience_s:
            return state.knobs, replace(state, lean_since=since), stay
        state = replace(state, releases=state.releases + 1)
        return self._change(state, seen, "lean", lean, now, ", with fewer workers")

    def _change(  # noqa: PLR0917
        self,
        state: TunerState,
        seen: Outlook,
        name: str,
        knobs: Knobs,
        expected: float,
        why: str = "",
        told: list[tuple[str, float]] | None = None,
    ) -> _Decision:
        """Puts a setting in force."""
        knobs = state.limits.complete(state.limits.clamp(knobs))
        now = min(float(np.mean(seen.rate(state.knobs))), UNBOUNDED)
        expected = min(max(expected, 1.0), UNBOUNDED)
        told = told or [("stay", 0.0), (name, 0.0)]
        text = moves(state.knobs.to_dict(), knobs.to_dict())
        reason = Reason(
            text=f"{_why(seen)}; {text}: {expected:,.0f} rows/s expected, {now:,.0f} now{why}",
            bottleneck=_name(seen),
            predicted_rows_per_s=expected,
            choice={
                "chosen": name,
                "candidates": [{"name": n, "value": v} for n, v in told],
            },
        )
        after = replace(
            state,
            knobs=knobs,
            before=(state.knobs, *(k for k in state.before if k != state.knobs))[:_KEPT],
            trials=state.trials.leave(state.knobs, knobs),
            changed_at=seen.at,
            lean_since=None,
            _demand_from=None,
        )
        return knobs, after, reason

    # ---- for the record and the next run

    def learned(self, state: TunerState) -> Mapping[str, Any] | None:
        return {"stages": {n: s.to_dict() for n, s in state.stages.items() if s.known}}

    def recall(self, state: TunerState, learned: Mapping[str, Any]) -> TunerState | None:
        known = {
            n: state.stages[n].recall(values, _TRUST)
            for n, values in learned["stages"].items()
            if n in state.stages and values["backend"] == state.stages[n].backend
        }
        return replace(state, stages={**state.stages, **known})

    def explain(self, state: TunerState) -> dict[str, Any] | None:
        recent = state.recent()
        known = {n: stage for n, stage in state.stages.items() if stage.known}
        if recent is None or not known:
            return {}
        stages = {n: stage.describe(state.knobs.workers[n]) for n, stage in known.items()}
        forecast = Outlook(self.settings, state, recent).forecast
        return {"stages": stages, "what_if": what_if(forecast)}


def noticed(state: TunerState) -> dict[str, str] | None:
    """Returns the change of a stage's cost that the last look has shown. None: none that a reader need know."""
    if not state.looks or not state.event or state.event_at != state.last.at:
        return None
    if _CHEAPER < state.stages[state.event_stage].factor < _DEARER:
        return None
    return {"text": state.event, "stage": state.event_stage}


def _start_share(before: Knobs, after: Knobs, seen: Outlook) -> float:
    """Returns the share of the rows that is lost while processes start, as each takes a core for a second."""
    more = 0
    for name, count in after.workers.items():
        if after.backend.get(name) == "process":
            more += max(0, count - before.workers[name] * (before.backend.get(name) == "process"))
    quota = max(seen.recent.cpu_quota, 1e-9)
    return min(more / (seen.settings.start_s * quota), 0.5) * min(1.0, seen.recent.cpu / quota)


def _differs(a: Knobs, b: Knobs, stage: str) -> bool:
    return (a.workers.get(stage), a.backend.get(stage)) != (
        b.workers.get(stage),
        b.backend.get(stage),
    )


def _name(seen: Outlook) -> str | None:
    """Returns the bottleneck as reports name it: a stage, `cores` or `consumer`."""
    return seen.holder() if seen.bottleneck == "lock" else seen.bottleneck


def _stay(seen: Outlook, now: float) -> Reason:
    return Reason(
        text=f"{_why(seen)}, and nothing better is known",
        bottleneck=_name(seen),
        predicted_rows_per_s=min(max(now, 1.0), UNBOUNDED),
    )


def _why(seen: Outlook) -> str:
    bottleneck = seen.bottleneck
    if bottleneck == "consumer":
        return "the trainer is the bottleneck"
    if bottleneck == "cores":
        return "the cores are the bottleneck"
    if bottleneck == "lock":
        return f"the interpreter's lock is the bottleneck, held most by {seen.holder()}"
    return f"{bottleneck} is the bottleneck"
