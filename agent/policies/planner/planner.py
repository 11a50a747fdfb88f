"""`planner`: measures what each stage costs, works out the best setting, tries it, and takes back what did not help.

    rate = min over stages of workers / useful seconds a row        (`sluice.agent.costs.stage_cost`, learned online)
           ≤ cores / processor seconds a row of everything          (less what others take of them:
           `sluice.agent.costs.contention`)
           ≤ what the trainer takes
    and what workers and buffers hold fits in memory                (`sluice.agent.costs.forecast`,
    `sluice.agent.costs.allocation`)

A change is followed by a pause in which its effect is measured (`sluice.agent.policies.planner.trial_change`). One
that brought nothing is undone, and its stages are left alone for a while; each failure doubles the pause before the
next try, so that a steady load soon sees no change. Workers that wait for each other are moved to the stage's other
back end; stages are fused where cores are short, and split where they are too narrow together
(`sluice.agent.costs.stage_layouts`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from sluice.agent.costs import stage_layouts
from sluice.agent.costs.forecast import Forecast, what_if
from sluice.agent.costs.rates import PipelineRates, rates
from sluice.agent.costs.stage_cost import StageCost
from sluice.agent.costs.stage_layouts import Restructuring
from sluice.agent.planner_settings import DEFAULT, PlannerSettings
from sluice.agent.policies.planner.explain import details, moves, why
from sluice.agent.policies.planner.state import PlannerState, WorkerCap, caps_after_failure
from sluice.agent.policies.planner.trial_change import TrialChange
from sluice.agent.tunable import Policy, Reason
from sluice.ingest.knobs import Knobs, Limits, format_bytes
from sluice.ingest.stats import Snapshot


class Planner(Policy):
    """`auto` is this one under another name."""

    def __init__(self, settings: PlannerSettings = DEFAULT, *, name: str = "planner") -> None:
        self.name, self.settings = name, settings

    def initial(self, limits: Limits, knobs: Knobs) -> PlannerState:
        return PlannerState(limits=limits, knobs=limits.clamp(knobs), settings=self.settings,
                            spare_needed=self.settings.spare,
                            services={s: StageCost(name=s, settings=self.settings) for s in limits.workers})

    def learned(self, state: PlannerState) -> dict[str, Any]:
        """The stages' costs as plain data, for `recall` in another process on such a machine."""
        return {"other_cpu_s": state.other_cpu_s,
                "services": {name: s.to_dict() for name, s in state.services.items() if s.points}}

    def recall(self, state: PlannerState, learned: Mapping[str, Any]) -> PlannerState:
        """A state that knows what was learned before."""
        known = {name: StageCost.from_dict(name, values, self.settings) for name, values in learned["services"].items()
                 if name in state.services}
        return replace(state, services={**state.services, **known}, other_cpu=learned["other_cpu_s"], passed=1.0)

    def decide(self, snapshot: Snapshot, state: PlannerState) -> tuple[Knobs, PlannerState, Reason]:
        if state.last is None:
            watched = {s.name: state.services[s.name].observe(s, False) for s in snapshot.stages
                       if s.name in state.services}
            return state.knobs, replace(state, last=snapshot, window=(snapshot,),
                                        services={**state.services, **watched}), Reason(text="first look")
        latest = _rates(state, state.last, snapshot)
        if latest is None:  # a clock that stands still, or counters that fell: begin again from here
            return state.knobs, replace(state, last=snapshot, window=(snapshot,)), Reason(
                text="no time has passed since the last look")
        learned = _learn(state, snapshot, latest)
        other_machine = snapshot.cpu_quota != state.last.cpu_quota
        # Costs that move soon after a change were moved by it, and the trial shows whether that did good.
        other_workload = state.age > state.settings.ours and any(
            learned.services[n].drifts > state.services[n].drifts
            and stage.busy >= state.settings.matters * stage.workers
            for n, stage in latest.stages.items() if n in state.services)
        if other_machine or other_workload:  # earlier measurements say nothing about what comes now
            spare = state.settings.spare
            learned = replace(learned, caps={}, tried=frozenset(), quiet_until=0, failures=0, spare=spare,
                              spare_needed=spare, trial=None, window=(), demands=())
        state = replace(learned, last=snapshot, tick=state.tick + 1, age=state.age + 1,
                        window=(*learned.window, snapshot)[-state.settings.window:])
        if state.trial is not None and state.age > state.settings.settle and state.trial.crashed(latest):
            return _undo(state, state.trial, latest)
        recent = _rates(state, state.window[0], snapshot)
        if recent is None or recent.rows_per_s == 0:
            return state.knobs, state, Reason(text="waiting for rows to arrive")
        if state.trial is not None:
            keep = state.trial.verdict(state.age, recent)
            failing = keep is False
            if state.trial.kind in ("grow", "probe") and recent.stall > state.settings.smooth and (
                    failing or (keep is None and state.age >= state.settings.settle and state.trial.gain(recent) < 1)):
                undone = replace(state, knobs=state.trial.before, trial=None)
                forecast = _forecast(undone, latest)  # perhaps a stage was grown whose workers wait for a lock
                suspects = (suspect for suspect in stage_layouts.suspected(forecast, recent)
                            if failing or suspect.stage in state.trial.stages)
                switch = _reshape(undone, forecast, recent, itertools.chain(stage_layouts.locked(forecast), suspects))
                if switch is not None:
                    return switch
            if keep is None:
                return state.knobs, state, Reason(text="measuring what the last change did")
            if not keep:
                return _undo(state, state.trial, recent)
            state = replace(state, trial=None, failures=0 if state.trial.rises else state.failures)
        if len(state.window) < state.settings.settle:
            return state.knobs, state, Reason(text="looking at how the present knobs do")
        # Full buffers hide for a moment that the input has become slower: the latest interval is nearer the truth.
        return _plan(state, latest, replace(recent, rows_per_s=min(recent.rows_per_s, latest.rows_per_s or math.inf)))

    def explain(self, state: PlannerState) -> dict[str, Any]:
        """The stage models, and the expected rates with more or fewer resources; empty while nothing is known."""
        latest = _rates(state, state.window[0], state.window[-1]) if state.window else None
        forecast = _forecast(state, latest) if latest is not None else None
        if latest is None or forecast is None or not forecast.services:
            return {}
        rate = forecast.rate(state.knobs.workers)
        return {**details(forecast, latest, state.knobs, rate), "what_if": what_if(forecast)}


def _rates(state: PlannerState, earlier: Snapshot, later: Snapshot) -> PipelineRates | None:
    measured = rates(earlier, later)
    return None if measured is None else measured.joined(state.knobs, state.limits)


def _forecast(state: PlannerState, latest: PipelineRates) -> Forecast:
    return Forecast.of(latest, state.knobs, state.limits, state.services, other_cpu_s=state.other_cpu_s,
                       demand=max(state.demands, default=math.inf), settings=state.settings)


def _learn(state: PlannerState, snapshot: Snapshot, latest: PipelineRates) -> PlannerState:
    settings, saturated = state.settings, latest.saturated(state.settings.saturated)
    services = {s.name: state.services[s.name].observe(s, saturated) for s in snapshot.stages
                if s.name in state.services}
    demand = latest.demand_rows_per_s
    other = max(0.0, latest.cpu - latest.running)
    return replace(state, services={**state.services, **services},
                   other_cpu=state.other_cpu + settings.lately * (other - state.other_cpu),
                   passed=state.passed + settings.lately * (latest.rows_per_s - state.passed),
                   demands=(*state.demands, demand)[-settings.spare:] if demand else state.demands)


def _undo(state: PlannerState, trial: TrialChange, recent: PipelineRates) -> tuple[Knobs, PlannerState, Reason]:
    """Goes back to the setting before, and keeps what was learned."""
    gain, settings = trial.gain(recent), state.settings
    text = (f"the last change brought {gain:.2f} times the rows where {trial.hoped:.2f} were hoped for, so it is "
            f"undone: {moves(state.knobs, trial.before)}")
    if trial.kind in ("probe", "switch", "fuse", "split"):  # a trial of these kinds was expected to fail now and then
        undone = state  # its measurements are in the curve now
    else:
        undone = replace(state, caps=caps_after_failure(state, trial.before, recent),
                         failures=state.failures + 1, spare=0,
                         quiet_until=state.tick + settings.pause * 2 ** min(state.failures, settings.pause_doublings),
                         spare_needed=state.spare_needed * (settings.spare_longer if trial.kind == "release" else 1))
    return _change(undone, trial.before, None, recent, Reason(
        text=text, predicted_rows_per_s=trial.rows_per_s,
        details={"kind": "undo", "gain": gain, "hoped": trial.hoped}))


def _plan(state: PlannerState, latest: PipelineRates, recent: PipelineRates) -> tuple[Knobs, PlannerState, Reason]:
    forecast, settings = _forecast(state, latest), state.settings
    if not forecast.services or (len(forecast.each) < len(state.services) and state.tick <= state.settings.patience):
        return state.knobs, state, Reason(text="not every stage has reported work yet")
    state = replace(state, caps={n: cap.eased(forecast.slow, state.tick, settings) for n, cap in state.caps.items()})
    present_rate, bottleneck = forecast.rate(state.knobs.workers), forecast.bottleneck()
    ranges = {name: _range(state, name, forecast.contended) for name in forecast.services}
    tight = (latest.memory_used > settings.memory_alarm * forecast.memory_limit
             or forecast.memory(state.knobs) > forecast.memory_limit)
    input_bound = recent.stall > settings.smooth
    if tight:
        knobs, best = forecast.best(ranges, fewest=True, tight=True)
        if forecast.memory(knobs) < forecast.memory(state.knobs):
            return _change(state, knobs, "memory", recent, Reason(
                text=f"memory is short ({format_bytes(latest.memory_used)} of "
                     f"{format_bytes(forecast.memory_limit)} used, {format_bytes(forecast.memory(state.knobs))} may be "
                     f"needed): {moves(state.knobs, knobs)}",
                bottleneck="memory", predicted_rows_per_s=best, details=details(forecast, recent, knobs, best)))
    switch = _reshape(state, forecast, recent, stage_layouts.locked(forecast)) if input_bound else None
    if switch is not None:
        return switch
    if state.tick < state.quiet_until:
        return state.knobs, state, Reason(text="waiting before the next try, as the last one failed",
                                          bottleneck=bottleneck, predicted_rows_per_s=present_rate)
    cause = why(bottleneck, forecast, recent)
    if input_bound:
        thinned = _thin(state, forecast, recent, ranges)
        if thinned is not None:
            return thinned
        knobs, best = forecast.best(ranges, fewest=False)
        if best >= state.settings.worth * present_rate and knobs.workers != state.knobs.workers:
            grown = replace(state, spare=0, released=False,
                            spare_needed=state.spare_needed * (settings.spare_longer if state.released else 1))
            return _change(grown, knobs, "grow", recent, Reason(
                text=f"{cause}: {moves(state.knobs, knobs)}, {best / present_rate:.2g} times the rows predicted",
                bottleneck=bottleneck, predicted_rows_per_s=best, details=details(forecast, recent, knobs, best)))
        candidates = itertools.chain(stage_layouts.suspected(forecast, recent), stage_layouts.split(forecast),
                                     stage_layouts.fused(forecast))
        reshaped = _reshape(state, forecast, recent, candidates)
        if reshaped is not None:
            return reshaped
        probe = _probe(state, forecast, recent)
        if probe is not None:
            name, count, hope = probe
            knobs = state.knobs.with_workers(**{name: count})
            probing = replace(state, spare=0, tried=state.tried | {(name, count)})
            return _change(probing, knobs, "probe", recent, Reason(
                text=f"{name} is the bottleneck, and how it scales is not known everywhere: "
                     f"trying {moves(state.knobs, knobs)}",
                bottleneck=name, predicted_rows_per_s=hope, details=details(forecast, recent, knobs, hope)))
    # Where growing did harm while other programs use the cores, the cores are what is short.
    short = forecast.contended and bool(state.caps)
    if bottleneck not in ("consumer", "cores") and not short:
        return state.knobs, replace(state, spare=0), Reason(
            text=f"{cause}, and nothing better is known", bottleneck=bottleneck, predicted_rows_per_s=present_rate)
    calm = Reason(text=cause, bottleneck=bottleneck, predicted_rows_per_s=present_rate)
    return _release(state, forecast, recent, ranges, calm)


def _reshape(state: PlannerState, forecast: Forecast, recent: PipelineRates,
             candidates: Iterable[Restructuring]) -> tuple[Knobs, PlannerState, Reason] | None:
    """Moves a stage to its other back end, fuses or splits it: the first change that is worth it."""
    # Waits for a lock are in no stage's curve.
    present_rate = min(forecast.rate(state.knobs.workers), recent.rows_per_s)
    free = replace(state, caps={})  # what failed while workers waited for a lock may succeed without
    for shape in candidates:
        if shape.key in state.tried:
            continue
        name, moving = shape.stage, shape.kind == "switch"
        ranges = {n: _range(free if moving else state, n, forecast.contended) for n in shape.forecast.services}
        if moving:
            ranges[name] = (1, min(state.limits.workers[name][1], max(2, math.ceil(recent.cpu_quota))))
        knobs, best = shape.forecast.best(ranges, fewest=False)
        if best < state.settings.worth * present_rate or not shape.forecast.fits(knobs):
            continue
        trying = replace(state, spare=0, tried=state.tried | {shape.key})
        if moving:
            sharing = {n: (s.relieved() if len(state.limits.backends_of(n)) > 1 else s).stale()
                       for n, s in forecast.each.items() if n != name and s.backend == "thread"}
            trying = replace(trying, services={**state.services, **sharing}, caps={})
        return _change(trying, knobs, shape.kind, recent, Reason(
            text=f"{shape.cause}: trying {moves(state.knobs, knobs)}, {best / present_rate:.2g} times the rows "
                 "predicted",
            bottleneck=forecast.bottleneck(), predicted_rows_per_s=best,
            details=details(shape.forecast, recent, knobs, best)))
    return None


def _range(state: PlannerState, name: str, contended: bool) -> tuple[int, int]:
    """The fewest and most workers to consider now."""
    least, most = state.limits.workers[name]
    cap = state.caps.get(name)
    if cap is not None and state.tick < cap.until:
        least, most = max(least, cap.least), min(most, cap.most)
    service = state.services[name]
    growth = 1 + ((state.settings.careful if contended else state.settings.further) - 1) * service.efficiency**2
    most_seen = max(1, service.most_seen)
    reach = max(state.knobs.workers[name], math.ceil(growth * most_seen) if most_seen > 1 else state.settings.growth)
    return least, max(least, min(most, reach))


def _probe(state: PlannerState, forecast: Forecast, recent: PipelineRates) -> tuple[str, int, float] | None:
    """The busiest stage with a number of workers not seen yet, where its curve leaves room for a real gain."""
    share = {n: recent.stages[n].busy / state.knobs.workers[n] for n in forecast.services if n in recent.stages}
    name = max(share, key=lambda n: share[n], default=None)
    if name is None or share[name] < state.settings.busiest:
        return None
    service, workers, present_rate = forecast.services[name], state.knobs.workers, forecast.rate(state.knobs.workers)
    least, most = _range(state, name, forecast.contended)
    most = max(workers[name], most, service.most_seen)  # between two settings seen, any may be tried
    worth = {}
    for count, hope in service.hopes(recent.cpu_quota, state.settings.worth).items():
        unbent = replace(forecast, services={**forecast.services, name: service.unbent(count)})
        hoped_for = min(hope, unbent.rate_around(name, {**workers, name: count}))
        is_new = least <= count <= most and (name, count) not in state.tried
        if is_new and hoped_for >= state.settings.worth * present_rate and (
                count < workers[name] or forecast.fits(state.knobs.with_workers(**{name: count}))):
            worth[count] = hoped_for
    if not worth:
        return None
    count = max(worth, key=lambda n: worth[n])
    return name, count, worth[count]


def _thin(state: PlannerState, forecast: Forecast, recent: PipelineRates,
          ranges: Mapping[str, tuple[int, int]]) -> tuple[Knobs, PlannerState, Reason] | None:
    """Takes workers away where our own threads, rather than other programs', may crowd the cores. As many stay as the
    threads that run now would keep busy."""
    if not forecast.contended or recent.wanting < state.settings.crowd * recent.running:
        return None
    alone = replace(forecast.alone, stage_cores=recent.running)
    knobs = _lean(state, alone, ranges)
    most, until = state.settings.slim * state.knobs.total_workers, state.tick + state.settings.forgive
    if knobs.total_workers > most or alone.rate(knobs.workers) < recent.rows_per_s:
        return None
    caps = {n: WorkerCap(least, knobs.workers[n], until, forecast.slow, state.knobs.workers[n])
            for n, (least, _) in state.limits.workers.items() if knobs.workers[n] < state.knobs.workers[n]}
    thinned = replace(state, spare=0, caps={**state.caps, **caps})
    return _change(thinned, knobs, "release", recent, Reason(
        text=f"more threads want a core than get one: {moves(state.knobs, knobs)}", bottleneck="cores",
        predicted_rows_per_s=recent.rows_per_s, details=details(forecast, recent, knobs, recent.rows_per_s)))


def _lean(state: PlannerState, forecast: Forecast, ranges: Mapping[str, tuple[int, int]]) -> Knobs:
    """The present knobs without the workers that are not needed for the best rate."""
    lean, _ = forecast.best(ranges, fewest=True)
    return replace(state.knobs, workers={n: min(count, lean.workers[n]) for n, count in state.knobs.workers.items()})


def _release(state: PlannerState, forecast: Forecast, recent: PipelineRates, ranges: Mapping[str, tuple[int, int]],
             calm: Reason) -> tuple[Knobs, PlannerState, Reason]:
    """Gives workers back that are not needed, once the trainer or the cores have been the bottleneck for a while."""
    knobs_before, settings = state.knobs, state.settings
    alone = forecast if calm.bottleneck == "consumer" else forecast.alone  # perhaps our own threads slow us
    knobs = _lean(state, alone, ranges)
    spare = knobs_before.total_workers - knobs.total_workers
    gain = alone.rate(knobs.workers) / alone.rate(knobs_before.workers)
    few = spare < settings.spare_workers * knobs_before.total_workers
    if spare < 1 or gain < settings.spare_kept or (few and gain < settings.spare_gain):
        return knobs_before, replace(state, spare=0), calm
    if state.spare + 1 < state.spare_needed:
        return knobs_before, replace(state, spare=state.spare + 1), calm
    return _change(replace(state, spare=0, released=True), knobs, "release", recent, replace(
        calm, text=f"{calm.text}: {moves(knobs_before, knobs)} costs it nothing",
        predicted_rows_per_s=recent.rows_per_s, details=details(forecast, recent, knobs, recent.rows_per_s)))


def _change(state: PlannerState, knobs: Knobs, kind: str | None, recent: PipelineRates,
            reason: Reason) -> tuple[Knobs, PlannerState, Reason]:
    """Puts `knobs` in force; with a `kind`, on trial."""
    more = {n: stage.rows_per_s for n, stage in recent.stages.items() if knobs.workers[n] > state.knobs.workers[n]}
    trial = TrialChange(kind=kind, before=state.knobs, rows_per_s=recent.rows_per_s, stages=more,
                  predicted=reason.predicted_rows_per_s or recent.rows_per_s, settings=state.settings) if kind else None
    return knobs, replace(state, knobs=knobs, age=0, window=(), trial=trial, demands=()), reason
