"""`planner`: measures what each stage costs, works out the best setting, tries it, and takes back what did not help.

    rate = min over stages of workers / useful seconds a row        (`sluice.agent.costs.stage_cost`, learned online)
           ≤ cores / processor seconds a row of everything          (less what others take of them:
           `sluice.agent.costs.contention`)
           ≤ what the trainer takes
    and what workers and buffers hold fits in memory                (`sluice.agent.costs.forecast`)

A change is followed by a pause in which its effect is measured (`sluice.agent.policies.planner.trial_change`). One
that brought nothing is undone, and its stages are left alone for a while; each failure doubles the pause before the
next try, so that a steady load soon sees no change. Workers that wait for each other are moved to the stage's other
back end; stages are fused where cores are short, and split where they are too narrow together
(`sluice.agent.costs.stage_layouts`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sluice.agent.costs import stage_layouts
from sluice.agent.costs.elsewhere import at_work
from sluice.agent.costs.forecast import Forecast, what_if
from sluice.agent.costs.rates import PipelineRates, StageRates, rates
from sluice.agent.costs.stage_cost import StageCost, between
from sluice.agent.planner_settings import DEFAULT, PlannerSettings
from sluice.agent.policies.planner.changes import (
    change,
    go_on,
    not_weighed,
    probe,
    range_of,
    release,
    reshape,
    thin,
)
from sluice.agent.policies.planner.explain import details, moves, why
from sluice.agent.policies.planner.state import Look, PlannerState, caps_after_failure, seen, ticks
from sluice.agent.policies.planner.trial_change import TrialChange
from sluice.agent.tunable import Policy, Reason
from sluice.ingest.knobs import Knobs, Limits, format_bytes
from sluice.ingest.stats import Snapshot


class Planner(Policy):
    """Predicts rates from measured costs, and changes knobs step by step. `auto` asks it for each change but its first
    one, which a learned policy may choose."""

    def __init__(self, settings: PlannerSettings = DEFAULT, *, name: str = "planner") -> None:
        self.name, self.settings = name, settings

    def initial(self, limits: Limits, knobs: Knobs) -> PlannerState:
        return PlannerState(
            limits=limits,
            knobs=limits.clamp(knobs),
            settings=self.settings,
            services={s: StageCost(name=s, settings=self.settings) for s in limits.workers},
        )

    def learned(self, state: PlannerState) -> dict[str, Any]:
        """The stages' costs as plain data, for `recall` in another process on such a machine."""
        return {
            "other_cpu_s": state.other_cpu_s,
            **({"start_s": state.start_s} if state.start_s else {}),
            "services": {name: s.to_dict() for name, s in state.services.items() if s.points},
        }

    def recall(self, state: PlannerState, learned: Mapping[str, Any]) -> PlannerState:
        """A state that knows what was learned before. Of the workers with which an earlier run was killed, this one
        has no more than half-way from one to them, by ratio."""
        killed = learned["killed"]["workers"] if "killed" in learned else {}
        most = {
            n: max(
                limits[0],
                min(limits[1], between(1, killed[n]) if killed.get(n, 1) > 1 else limits[1]),
            )
            for n, limits in state.limits.workers.items()
        }
        limits = replace(
            state.limits,
            workers={n: (low, most[n]) for n, (low, _) in state.limits.workers.items()},
        )
        known = {
            name: StageCost.from_dict(name, values, self.settings)
            for name, values in learned["services"].items()
            if name in state.services
        }
        return replace(
            state,
            limits=limits,
            knobs=limits.clamp(state.knobs),
            services={**state.services, **known},
            other_cpu=learned["other_cpu_s"],
            passed=1.0,
            start_s=learned.get("start_s", 0.0),
        )

    def decide(self, snapshot: Snapshot, state: PlannerState) -> tuple[Knobs, PlannerState, Reason]:
        if snapshot.elsewhere:
            told = snapshot
            if state.told is not None and state.last is not None:
                snapshot = at_work(told, state.told, state.last)
            state = replace(
                state, told=told, start_s=told.elsewhere.get("start_s") or state.start_s
            )
        if state.last is None:
            watched = {
                s.name: state.services[s.name].observe(s, False)
                for s in snapshot.stages
                if s.name in state.services
            }
            return (
                state.knobs,
                replace(
                    state,
                    last=snapshot,
                    window=(Look(state.tick, snapshot),),
                    services={**state.services, **watched},
                ),
                Reason(text="first look"),
            )
        latest = rates_of(state, state.last, snapshot)
        if (
            latest is None
        ):  # a clock that stands still, or counters that fell: begin again from here
            return (
                state.knobs,
                replace(state, last=snapshot, window=(Look(state.tick, snapshot),)),
                Reason(text="no time has passed since the last look"),
            )
        learned = _learn(_expecting(state, snapshot, latest), snapshot, latest)
        other_machine = snapshot.cpu_quota != state.last.cpu_quota
        changed = {
            n: learned.services[n].known_well(stage.workers)
            for n, stage in latest.stages.items()
            if n in state.services and _changed(state, learned, n, stage)
        }
        learned = replace(learned, services={**learned.services, **changed})
        # Costs that move soon after a change were moved by it, and the trial shows whether that did good.
        other_workload = state.age > state.settings.ours or any(
            learned.services[n].trends > state.services[n].trends
            or learned.services[n].leaps > state.services[n].leaps
            for n in changed
        )
        if other_machine or (
            changed and other_workload
        ):  # earlier measurements say nothing about what comes now
            learned = replace(
                learned,
                caps={},
                tried=frozenset(),
                quiet_until=0,
                failures=0,
                spare=state.settings.spare,
                trial=None,
                window=(),
                demands=(),
            )
        passed = ticks(latest.seconds)
        first = state.age == state.tick
        settle = state.settings.settle
        state = replace(
            learned,
            last=snapshot,
            tick=state.tick + passed,
            age=state.age + passed,
            window=seen(learned.window, snapshot, state.tick + passed, state.settings),
        )
        if state.trial is not None and state.trial.then is not None:
            known = replace(
                state, services={n: cost.anywhere for n, cost in state.services.items()}
            )
            return go_on(state, state.trial, forecast_of(known, latest)) or _undo(
                state,
                state.trial,
                latest,
                "no process finished an item in time"
                if not_weighed(state, state.trial.then)
                else "memory has no room for as many processes as would be worth it",
            )
        if state.trial is not None and state.age > settle and state.trial.crashed(latest):
            return _undo(state, state.trial, latest)
        recent = rates_of(state, state.window[0].snapshot, snapshot)
        if recent is None or recent.rows_per_s == 0:
            return state.knobs, state, Reason(text="waiting for rows to arrive")
        if state.trial is not None:
            keep = state.trial.verdict(state.age, recent)
            failing = keep is False
            growing = state.trial.kind in ("opening", "own", "grow", "probe")
            if failing and growing and recent.stall > state.settings.smooth:
                undone = replace(state, knobs=state.trial.before, trial=None)
                forecast = forecast_of(
                    undone, latest
                )  # perhaps a stage was grown whose workers wait for a lock
                # What an opening fell short by is no gain of what follows it.
                before = max(
                    recent.rows_per_s, state.trial.rows_per_s * (state.trial.kind == "opening")
                )
                switch = reshape(
                    undone,
                    forecast,
                    replace(recent, rows_per_s=before),
                    itertools.chain(
                        stage_layouts.locked(forecast, recent),
                        stage_layouts.suspected(forecast, recent),
                    ),
                )
                if switch is not None:
                    return switch
            if keep is None:
                return state.knobs, state, Reason(text="measuring what the last change did")
            if not keep:
                return _undo(state, state.trial, recent)
            # What was in the way of growing has gone where growing brings what was promised.
            caps = (
                {n: cap for n, cap in state.caps.items() if cap.least > state.limits.workers[n][0]}
                if state.trial.fulfilled(recent)
                else state.caps
            )
            # While an opening's processes start, cores are short and others wait: only from here on are looks good.
            starting = state.trial.kind == "opening" and state.trial.start_up
            window = state.window[-1:] if starting else state.window
            state = replace(
                state,
                trial=None,
                failures=0 if state.trial.rises else state.failures,
                caps=caps,
                window=window,
            )
        # Before the first change nothing has to settle, and quick looks will do.
        if len(state.window) < settle if first else state.tick - state.window[0].tick < settle - 1:
            return state.knobs, state, Reason(text="looking at how the present knobs do")
        planned = _plan(state, latest, recent)
        urgent = latest.memory_used > self.settings.memory_alarm * latest.memory_limit
        if (
            first
            and state.tick < settle - 1
            and not urgent
            and (planned[1].trial is None or planned[1].trial.kind != "grow")
        ):
            return (
                state.knobs,
                state,
                Reason(text="a first glance shows where more workers are wanted, and no more"),
            )
        return planned

    def next_look_s(self, state: PlannerState) -> float | None:
        trial = state.trial
        unseen = state.age == state.tick < self.settings.patience and not all(
            s.points for s in state.services.values()
        )
        soon = unseen if trial is None else trial.then is not None or trial.own is not None
        return self.settings.glance_s if soon else None

    def explain(self, state: PlannerState) -> dict[str, Any]:
        """The stage models, and the expected rates with more or fewer resources; empty while nothing is known."""
        latest = (
            rates_of(state, state.window[0].snapshot, state.window[-1].snapshot)
            if state.window
            else None
        )
        forecast = forecast_of(state, latest) if latest is not None else None
        if latest is None or forecast is None or not forecast.services:
            return {}
        rate = forecast.rate(state.knobs.workers)
        return {**details(forecast, latest, state.knobs, rate), "what_if": what_if(forecast)}


def _changed(state: PlannerState, learned: PlannerState, name: str, stage: StageRates) -> bool:
    """Whether a stage's costs have changed by themselves: soon after a change of ours only a leap tells."""
    before, now = state.services[name], learned.services[name]
    drifted = now.drifts > before.drifts and (
        state.age > state.settings.ours or now.leaps > before.leaps
    )
    return (
        drifted or now.trends > before.trends
    ) and stage.busy >= state.settings.matters * stage.workers


def rates_of(state: PlannerState, earlier: Snapshot, later: Snapshot) -> PipelineRates | None:
    measured = rates(earlier, later)
    return None if measured is None else measured.joined(state.knobs, state.limits)


def forecast_of(state: PlannerState, latest: PipelineRates) -> Forecast:
    return Forecast.of(
        latest,
        state.knobs,
        state.limits,
        state.services,
        other_cpu_s=state.other_cpu_s,
        demand=max(state.demands, default=math.inf),
        settings=state.settings,
        requests_a_core=0.0
        if state.told is None
        else state.told.elsewhere.get("requests_a_core", 0.0),
    )


def _expecting(state: PlannerState, snapshot: Snapshot, latest: PipelineRates) -> PlannerState:
    """The state while workers elsewhere start, which a change has called: it has not begun until they are there, and
    what is measured says nothing."""
    if (
        state.trial is None
        or not snapshot.elsewhere.get("starting")
        or state.age >= state.settings.arrival
    ):
        return state
    return replace(
        state,
        window=(),
        trial=replace(
            state.trial, start_up=state.age + ticks(latest.seconds) + state.settings.settle
        ),
    )


def _learn(state: PlannerState, snapshot: Snapshot, latest: PipelineRates) -> PlannerState:
    settings, saturated = state.settings, latest.saturated(state.settings.saturated)
    starting = state.trial is not None and (
        state.trial.then is not None or state.age < state.trial.start_up
    )
    services = {
        s.name: state.services[s.name].observe(s, saturated, starting)
        for s in snapshot.stages
        if s.name in state.services
    }
    demand = latest.demand_rows_per_s
    other = max(0.0, latest.cpu - latest.running)
    return replace(
        state,
        services={**state.services, **services},
        other_cpu=state.other_cpu + settings.lately * (other - state.other_cpu),
        passed=state.passed + settings.lately * (latest.rows_per_s - state.passed),
        demands=(*state.demands, demand)[-settings.spare :] if demand else state.demands,
    )


def resting(state: PlannerState, recent: PipelineRates) -> set[str]:
    """The stages that have worked ahead and now wait for room, or have nothing left to read: they bound nothing, and
    may not report again for long."""
    assert state.last is not None, "a plan comes after a look"
    source = state.last.stages[0].name
    heads = {
        name
        for name, stage in recent.stages.items()
        if stage.busy < state.settings.matters * stage.workers
        and (name == source or stage.blocked >= state.settings.mostly * stage.workers)
    }
    return {
        stage.name
        for stage in state.last.stages
        if stage.items > 0 and state.limits.head(state.knobs, stage.name) in heads
    }


def _undo(
    state: PlannerState, trial: TrialChange, recent: PipelineRates, obstacle: str = ""
) -> tuple[Knobs, PlannerState, Reason]:
    """Goes back to the setting before, and keeps what was learned. An `obstacle` has stopped it half-way."""
    if trial.own not in (None, trial.before):
        return _give_way(state, trial, recent)
    gain, settings = trial.gain(recent), state.settings
    what = obstacle or (
        f"the {'opening' if trial.kind == 'opening' else 'last change'} brought {gain:.2f} times the "
        f"rows where {trial.hoped:.2f} were hoped for"
    )
    text = f"{what}, so it is undone: {moves(state.knobs, trial.before)}"
    # A trial of these kinds was expected to fail now and then.
    if trial.kind in ("opening", "own", "probe", "switch", "fuse", "split"):
        undone = state  # its measurements are in the curve now
    else:
        undone = replace(
            state,
            caps=caps_after_failure(state, trial, recent),
            failures=state.failures + 1,
            spare=0,
            quiet_until=state.tick
            + settings.pause * 2 ** min(state.failures, settings.pause_doublings),
        )
    return change(
        undone,
        trial.before,
        None,
        recent,
        Reason(
            text=text,
            predicted_rows_per_s=trial.rows_per_s,
            details={"kind": "undo", "gain": gain, "hoped": trial.hoped},
        ),
    )


def _give_way(
    state: PlannerState, trial: TrialChange, recent: PipelineRates
) -> tuple[Knobs, PlannerState, Reason]:
    """Tries the planner's own choice in place of an opening that brings less than that promises. It is on trial like
    any other, against the better of the opening and what was before."""
    assert trial.own is not None, "the planner would have chosen something"
    best = max(recent.rows_per_s, trial.rows_per_s)
    back = replace(
        state,
        trial=None,
        knobs=state.knobs if recent.rows_per_s > trial.rows_per_s else trial.before,
    )
    return change(
        back,
        trial.own,
        "own",
        replace(recent, rows_per_s=best),
        Reason(
            text=f"the opening brings {recent.rows_per_s:,.0f} rows/s and the planner's own choice promises "
            f"{trial.own_rows_per_s:,.0f}, so that is tried: {moves(state.knobs, trial.own)}",
            predicted_rows_per_s=max(trial.own_rows_per_s, state.settings.worth * best),
            details={"kind": "own", "gain": trial.gain(recent), "hoped": trial.hoped},
        ),
    )


def _sustained(recent: PipelineRates, bottleneck: str, predicted: float) -> PipelineRates:
    """Returns the recent rates, with the rows a second that the pipeline can deliver for long.

    While buffers drain, the consumer takes more rows than the bottleneck makes. A change must not be
    compared with that rate: it would seem useless although it restores what was lost.
    """
    if bottleneck not in recent.stages:
        return recent
    made = max(predicted, recent.stages[bottleneck].rows_per_s)
    return replace(recent, rows_per_s=min(recent.rows_per_s, made))


def _plan(
    state: PlannerState, latest: PipelineRates, recent: PipelineRates
) -> tuple[Knobs, PlannerState, Reason]:
    forecast, settings = forecast_of(state, latest), state.settings
    unknown = state.services.keys() - forecast.each.keys() - resting(state, recent)
    if not forecast.services or (unknown and state.tick <= settings.patience):
        return state.knobs, state, Reason(text="not every stage has reported work yet")
    caps = {n: cap.eased(forecast.slow, state.tick, settings) for n, cap in state.caps.items()}
    freer = any(
        caps[n].until != cap.until for n, cap in state.caps.items()
    )  # what was in the way has gone
    state = replace(
        state,
        caps=caps,
        quiet_until=0 if freer else state.quiet_until,
        failures=0 if freer else state.failures,
    )
    present_rate, bottleneck = forecast.rate(state.knobs.workers), forecast.bottleneck()
    ranges = {name: range_of(state, name, forecast.contended) for name in forecast.services}
    tight = (
        latest.memory_used > settings.memory_alarm * forecast.memory_limit
        or forecast.memory(state.knobs) > forecast.memory_limit
    )
    input_bound = recent.stall > settings.smooth
    if tight:
        knobs, best = forecast.best(ranges, fewest=True, tight=True)
        if forecast.memory(knobs) < forecast.memory(state.knobs):
            return change(
                state,
                knobs,
                "memory",
                recent,
                Reason(
                    text=f"memory is short ({format_bytes(latest.memory_used)} of "
                    f"{format_bytes(forecast.memory_limit)} used, {format_bytes(forecast.memory(state.knobs))} may be "
                    f"needed): {moves(state.knobs, knobs)}",
                    bottleneck="memory",
                    predicted_rows_per_s=best,
                    details=details(forecast, recent, knobs, best),
                ),
            )
    switch = (
        reshape(state, forecast, recent, stage_layouts.locked(forecast, recent))
        if input_bound
        else None
    )
    if switch is not None:
        return switch
    if doubtful := [
        n
        for n, cost in state.services.items()
        if cost.doubtful
        and n in recent.stages
        and recent.stages[n].busy >= settings.matters * state.knobs.workers[n]
    ]:
        text = f"a row became dearer in {' and in '.join(doubtful)}: waiting whether it stays so"
        return (
            state.knobs,
            state,
            Reason(text=text, bottleneck=bottleneck, predicted_rows_per_s=present_rate),
        )
    if state.tick < state.quiet_until:
        return (
            state.knobs,
            state,
            Reason(
                text="waiting before the next try, as the last one failed",
                bottleneck=bottleneck,
                predicted_rows_per_s=present_rate,
            ),
        )
    cause = why(bottleneck, forecast, recent)
    if input_bound:
        thinned = thin(state, forecast, recent, ranges)
        if thinned is not None:
            return thinned
        knobs, best = forecast.best(ranges, fewest=False)
        present_price = forecast.price(state.knobs.workers)
        if (
            best - forecast.price(knobs.workers)
            >= state.settings.worth * present_rate - present_price
            and knobs.workers != state.knobs.workers
        ):
            return change(
                replace(state, spare=0),
                knobs,
                "grow",
                _sustained(recent, bottleneck, present_rate),
                Reason(
                    text=f"{cause}: {moves(state.knobs, knobs)}, {best / present_rate:.2g} times the rows predicted",
                    bottleneck=bottleneck,
                    predicted_rows_per_s=best,
                    details=details(forecast, recent, knobs, best),
                ),
            )
        candidates = itertools.chain(
            stage_layouts.suspected(forecast, recent),
            stage_layouts.split(forecast),
            stage_layouts.fused(forecast),
        )
        reshaped = reshape(state, forecast, recent, candidates)
        if reshaped is not None:
            return reshaped
        untried = probe(state, forecast, recent)
        if untried is not None:
            name, count, hope = untried
            knobs = state.knobs.with_workers(**{name: count})
            probing = replace(state, spare=0, tried=state.tried | {(name, count)})
            return change(
                probing,
                knobs,
                "probe",
                recent,
                Reason(
                    text=f"{name} is the bottleneck, and how it scales is not known everywhere: "
                    f"trying {moves(state.knobs, knobs)}",
                    bottleneck=name,
                    predicted_rows_per_s=hope,
                    details=details(forecast, recent, knobs, hope),
                ),
            )
    if bottleneck not in ("consumer", "cores"):
        calm = Reason(
            text=f"{cause}, and nothing better is known",
            bottleneck=bottleneck,
            predicted_rows_per_s=present_rate,
        )
        if not forecast.elsewhere:
            return state.knobs, replace(state, spare=0), calm
        kept = {
            name: (count, count)
            for name, count in state.knobs.workers.items()
            if name not in forecast.elsewhere
        }
        return release(
            state, forecast, recent, {**ranges, **{n: kept[n] for n in ranges.keys() & kept}}, calm
        )
    calm = Reason(text=cause, bottleneck=bottleneck, predicted_rows_per_s=present_rate)
    return release(state, forecast, recent, ranges, calm)
