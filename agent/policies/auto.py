"""`auto`: a learned policy chooses the initial setting, and the planner verifies it and goes on from there.

At the first look, about a quarter of a second after the first batch and before any knob has changed, a `LearnedPolicy`
chooses all knobs at once. Its setting is a change on trial: it must bring what the planner's own choice promises. If it
does not, the planner tries its own choice. The learned policy's setting is not tried if

- a stage was not measured yet,
- an input is outside its training range,
- its setting does not fit into memory,
- an earlier run has settled on these knobs,
- the trainer does not wait,
- the planner's choice is almost the same, or
- it expects fewer rows than the planner promises.

Where an earlier run has settled on knobs for this schema, the run starts with these knobs. The setting of the learned
policy is then tried once, when the planner knows nothing better. Without weights, `auto` is the planner.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace
from typing import Any

from sluice.agent.costs.forecast import Forecast
from sluice.agent.costs.rates import PipelineRates
from sluice.agent.planner_settings import DEFAULT, PlannerSettings
from sluice.agent.policies.opening.contract import (
    Foreknowledge,
    InitialSetting,
    LearnedPolicy,
    PolicyInput,
)
from sluice.agent.policies.planner.changes import change
from sluice.agent.policies.planner.explain import moves
from sluice.agent.policies.planner.planner import Planner, forecast_of, idle_stages, rates_of
from sluice.agent.policies.planner.state import PlannerState
from sluice.agent.tunable import Policy, Reason
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoState:
    """The planner's state, and the result of the initial setting."""

    planner: PlannerState
    begun: Snapshot | None = None
    """The snapshot at which the first measured interval begins."""
    settled_before: bool = False
    """Whether an earlier run has settled on knobs for this schema."""
    asked: InitialSetting | None = None
    """The learned policy's setting. None until it was asked."""
    tried: bool = False
    """Whether that setting was put in force."""
    explanation: str = ""
    """Whether the learned policy's setting was used, and why, in a sentence."""
    challenge: InitialSetting | None = None
    """The setting that is tried once against the knobs of an earlier run."""


_Decision = tuple[Knobs, AutoState, Reason]
"""The knobs from now on, the next state, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FirstLook:
    """What is known when the learned policy is asked."""

    before: PlannerState
    """The planner's state before this look."""
    snapshot: Snapshot
    recent: PipelineRates
    forecast: Forecast
    knobs: Knobs
    """The planner's own choice, for which `reason` is the reason."""
    reason: Reason
    unknown: AbstractSet[str]
    """The stages that have not been measured yet."""


class Auto(Policy):
    """The planner, with a `learned` policy for the initial setting. `known` is what is known before the first row."""

    name = "auto"

    def __init__(
        self,
        learned: LearnedPolicy,
        *,
        known: Foreknowledge | None = None,
        settings: PlannerSettings = DEFAULT,
    ) -> None:
        self._learned = learned
        self._known = known or Foreknowledge()
        self._settings = settings
        self._planner = Planner(settings)

    def initial(self, limits: Limits, knobs: Knobs) -> AutoState:
        return AutoState(planner=self._planner.initial(limits, knobs))

    def made_of(self) -> dict[str, Any]:
        parts = {"weights": self._learned.digest, "known": asdict(self._known)}
        return {**self._planner.made_of(), **parts}

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
        if state.asked is None:
            return None
        rows_per_s = state.asked.rows_per_s
        return {"text": state.explanation, "tried": state.tried, "rows_per_s": rows_per_s}

    def next_look_s(self, state: AutoState) -> float | None:
        """Returns a short time until the learned policy was asked: the first looks may see no rows."""
        planner = state.planner
        asking = (
            state.asked is None
            and planner.unchanged
            and planner.tick < self._settings.patience_ticks
        )
        return self._settings.quick_look_s if asking else self._planner.next_look_s(planner)

    def decide(self, snapshot: Snapshot, state: AutoState) -> _Decision:
        before = state.planner
        knobs, after, reason = self._planner.decide(snapshot, before)
        if before.last is None:
            return knobs, replace(state, planner=after, begun=snapshot), reason
        state = replace(state, planner=after)
        recent = rates_of(before, before.last, snapshot)
        if recent is None or recent.rows_per_s <= 0:
            return knobs, state, reason
        if state.challenge is not None:
            return self._challenge(state, state.challenge, before, recent, reason)
        may_ask = state.asked is None and before.unchanged and before.trial is None
        if not may_ask or state.begun is None:
            return knobs, state, reason
        forecast = forecast_of(replace(after, knobs=before.knobs), recent)
        look = _FirstLook(
            before=before,
            snapshot=snapshot,
            recent=recent,
            forecast=forecast,
            knobs=knobs,
            reason=reason,
            unknown=after.services.keys()
            - forecast.separate_costs.keys()
            - idle_stages(after, recent),
        )
        if look.unknown and knobs == before.knobs:
            return knobs, state, reason
        return self._ask(state, look)

    def _ask(self, state: AutoState, look: _FirstLook) -> _Decision:
        """Asks the learned policy. Its setting goes on trial, unless the planner's choice is preferred."""
        given = self._policy_input(state, look)
        setting = self._learned.choose(given)
        known = _keep_unknown_stages(setting.knobs, look.before.knobs, look.forecast.joined_costs)
        setting = replace(
            setting, knobs=_drop_useless_moves(known, look, setting.rows_per_s or 0.0)
        )
        state = replace(state, asked=setting)
        fitting = _shrink_to_memory(look.forecast, setting.knobs) if setting.rows_per_s else None
        if fitting is not None and state.settled_before:
            state = replace(state, challenge=replace(setting, knobs=fitting))
        obstacle = self._obstacle(state, look, setting, fitting)
        if obstacle or fitting is None:
            return _keep_own_choice(state, look, obstacle)
        instead = _own_promise(look, fitting)
        assert setting.rows_per_s is not None
        if instead is not None and setting.rows_per_s < instead[1]:
            text = (
                f"learned policy not used: it expects {setting.rows_per_s:,.0f} rows/s of its setting, and the planner "
                f"{instead[1]:,.0f} of its own"
            )
            return _keep_own_choice(state, look, text)
        return self._try(state, look.before, replace(setting, knobs=fitting), look.recent, instead)

    def _policy_input(self, state: AutoState, look: _FirstLook) -> PolicyInput:
        assert state.begun is not None, "the first look has come"
        sizes = (service.process_bytes for service in state.planner.services.values())
        return PolicyInput(
            begun=state.begun,
            seen=look.snapshot,
            knobs=look.before.knobs,
            limits=look.before.limits,
            known=replace(self._known, operators=_observed_operators(look)),
            process_bytes=max(sizes, default=0) or None,
        )

    def _obstacle(
        self,
        state: AutoState,
        look: _FirstLook,
        setting: InitialSetting,
        fitting: Knobs | None,
    ) -> str:
        """Returns why the setting is not tried. Empty if it may be tried."""
        if look.unknown:
            stages = ", ".join(sorted(look.unknown))
            return f"learned policy not used: {stages} has not been measured yet"
        if setting.rows_per_s is None:
            return f"learned policy not used: {setting.reason}"
        if fitting is None:
            return "learned policy not used: its setting does not fit into memory"
        if state.settled_before:
            return (
                "learned policy not used yet: an earlier run has settled on these knobs, and the setting is tried "
                "later if the trainer waits"
            )
        if look.recent.stall <= self._settings.fed_stall:
            return "learned policy not used: the trainer does not wait"
        if _is_similar(fitting, look.knobs, self._settings):
            return "the learned policy chose almost the same setting"
        return ""

    def _challenge(
        self,
        state: AutoState,
        setting: InitialSetting,
        before: PlannerState,
        recent: PipelineRates,
        reason: Reason,
    ) -> _Decision:
        """Tries the learned policy's setting once against the knobs of an earlier run.

        It is tried when the planner makes no change although the trainer waits, and only if the setting promises more
        than the present rate.
        """
        after = state.planner
        knobs = after.knobs
        assert setting.rows_per_s is not None
        calm = (
            knobs == before.knobs
            and after.trial is None
            and after.age >= self._settings.own_effect_ticks
        )
        if not calm or recent.stall <= self._settings.fed_stall:
            return knobs, state, reason
        state = replace(state, challenge=None)
        if _is_similar(setting.knobs, knobs, self._settings) or (
            setting.rows_per_s < self._settings.min_gain_ratio * recent.rows_per_s
        ):
            return knobs, state, reason
        return self._try(state, before, setting, recent)

    def _try(
        self,
        state: AutoState,
        before: PlannerState,
        setting: InitialSetting,
        recent: PipelineRates,
        own: tuple[Knobs, float] | None = None,
    ) -> _Decision:
        """Puts the setting in force, on trial against the recent rate and against the planner's `own` choice with the
        rate that it promises."""
        assert setting.rows_per_s is not None
        promised = max(setting.rows_per_s, self._settings.min_gain_ratio * recent.rows_per_s)
        planner = replace(state.planner.undecided(before), trial=None, release_looks=0)
        instead, own_rate = own or (before.knobs, recent.rows_per_s)
        compared = "the present rate is" if own is None else "the planner's own choice promises"
        knobs, planner, reason = change(
            planner,
            setting.knobs,
            "opening",
            recent,
            Reason(
                text=f"the learned policy's initial setting ({setting.reason}): {moves(before.knobs, setting.knobs)}; "
                f"it promises {promised:,.0f} rows/s, and {compared} {own_rate:,.0f}",
                predicted_rows_per_s=promised,
                details={"kind": "opening", "own": instead.to_dict(), "own_rows_per_s": own_rate},
            ),
        )
        assert planner.trial is not None, "the setting is on trial"
        trial = planner.trial
        if own is not None:
            trial = replace(trial, planner_choice=own[0], planner_rows_per_s=own[1])
        return (
            knobs,
            replace(
                state,
                planner=replace(planner, trial=trial),
                tried=True,
                explanation=reason.text,
            ),
            reason,
        )


def _observed_operators(look: _FirstLook) -> dict[str, str]:
    """Returns which transforms hold the interpreter's lock as Python code does, as the probe has shown."""
    held, stages = look.recent.lock, look.recent.stages
    if held is None:
        return {}
    share = look.forecast.settings.mostly_share * held
    return {
        name: "python"
        if held >= look.forecast.settings.lock_share and stages[name].cpu >= share
        else "vectorised"
        for name in look.forecast.joined_costs
        if look.before.limits.movable(name, look.forecast.knobs.backend.get(name))
    }


def _keep_own_choice(state: AutoState, look: _FirstLook, text: str) -> _Decision:
    """Returns the planner's own choice, and why the learned policy's setting is not tried."""
    reason = replace(look.reason, text=f"{look.reason.text} ({text})")
    return look.knobs, replace(state, explanation=text), reason


def _own_promise(look: _FirstLook, fitting: Knobs) -> tuple[Knobs, float] | None:
    """Returns the planner's choice and the rate that it promises; None if it has other back ends than the setting.

    The forecast ignores locks, so it is wrong for settings with other back ends. If the planner's choice changes back
    ends or fused stages, the forecast for the present knobs is used.
    """
    knobs = look.knobs
    now = look.before.knobs
    if knobs.backend != now.backend or knobs.fused != now.fused:
        knobs = now
    if not _has_same_back_ends(fitting, knobs):
        return None
    return knobs, look.forecast.rate(knobs.workers)


def _keep_unknown_stages(chosen: Knobs, now: Knobs, known: Container[str]) -> Knobs:
    """Returns the chosen knobs, but with the present ones for stages that have not been measured yet."""
    return replace(
        chosen,
        workers={n: chosen.workers[n] if n in known else count for n, count in now.workers.items()},
        backend={**now.backend, **{n: kind for n, kind in chosen.backend.items() if n in known}},
    )


def _drop_useless_moves(chosen: Knobs, look: _FirstLook, rows_per_s: float) -> Knobs:
    """Returns the chosen knobs without moves to processes that would bring nothing.

    A transfer to a process and back takes time on a core. Stages that compute little at this rate do not hold up each
    other, so they stay on threads. All stay if the lock would be free at this rate.
    """
    forecast, now, settings = look.forecast, look.forecast.knobs.backend, look.forecast.settings
    cores = {
        n: forecast.cores_used_by(n, rows_per_s)
        for n, kind in chosen.backend.items()
        if kind == "process" and now.get(n, "thread") == "thread"
    }
    enough = {n for n in cores if cores[n] >= settings.lock_part_cores}
    held = (look.recent.lock or 0.0) * rows_per_s / look.recent.rows_per_s
    moved = enough if held >= settings.lock_share else set()
    return replace(
        chosen, backend={**chosen.backend, **dict.fromkeys(cores.keys() - moved, "thread")}
    )


def _shrink_to_memory(forecast: Forecast, knobs: Knobs) -> Knobs | None:
    """Returns the knobs, made smaller until they fit in the share of the free memory that an initial setting may take;
    None if nothing fits."""
    settings, limits = forecast.settings, forecast.limits
    allowed = min(
        forecast.memory(forecast.knobs) + settings.process_share * forecast.free_bytes,
        forecast.most_bytes,
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
        if replace(forecast, knobs=fitting).memory(fitting) <= allowed:
            return fitting
        share *= settings.step_down
    return None


def _is_similar(one: Knobs, other: Knobs, settings: PlannerSettings) -> bool:
    """Returns whether two settings hardly differ in workers, and not in back ends."""
    apart = max(abs(math.log(count / other.workers[n])) for n, count in one.workers.items())
    return apart < math.log(settings.similar_ratio) and _has_same_back_ends(one, other)


def _has_same_back_ends(one: Knobs, other: Knobs) -> bool:
    return all(one.backend.get(n, "thread") == other.backend.get(n, "thread") for n in one.workers)
