"""`planner`: measures each stage's cost, computes the best setting, tries it, and undoes it if it did not help.

    rate = min over stages of workers / useful seconds a row        (`sluice.agent.costs.stage_cost`, learned online)
           ≤ cores / processor seconds a row of everything          (minus the use by other programs:
           `sluice.agent.costs.contention`)
           ≤ what the trainer takes
    and what workers and buffers hold fits in memory                (`sluice.agent.costs.forecast`)

After a change, the planner measures its effect (`sluice.agent.policies.planner.trial_change`). A change without a gain
is undone, and its stages keep their knobs for a while. Each failure doubles the pause before the next try, so a steady
load soon sees no change. If a stage's workers wait for each other, the stage moves to its other back end
(`sluice.agent.costs.stage_layouts`).

Words of this folder:

- A look is one snapshot with the decision on it. Ticks count time: one a second (`PlannerSettings`).
- `latest` are the rates since the last look, `recent` those since the last change, over six ticks at most.
- A trial is a change whose effect is being measured.
- A cap is the fewest and the most workers that a stage may have for a while, because a change failed.
- A drift is a change of a stage's cost. It is a leap if no change of knobs explains it. A trend came in small steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from sluice.agent.costs import stage_layouts
from sluice.agent.costs.forecast import Forecast, Ranges, what_if
from sluice.agent.costs.rates import PipelineRates, StageRates, rates
from sluice.agent.costs.remote_work import at_work
from sluice.agent.costs.stage_cost import StageCost
from sluice.agent.planner_settings import DEFAULT, PlannerSettings
from sluice.agent.policies.planner.changes import (
    change,
    lasting,
    probe,
    range_of,
    release,
    reshape,
)
from sluice.agent.policies.planner.explain import details, moves, why
from sluice.agent.policies.planner.state import (
    Decision,
    Look,
    PlannerState,
    caps_after_failure,
    caps_of_throttled,
    seen,
    ticks,
)
from sluice.agent.policies.planner.trial_change import TrialChange
from sluice.agent.tunable import Policy, Reason
from sluice.ingest.knobs import FETCH, Knobs, Limits, format_bytes
from sluice.ingest.stats import Snapshot


class Planner(Policy):
    """Predicts rates from measured costs, and changes knobs step by step.

    In `auto`, it only proposes them (`sluice.agent.choice`)."""

    def __init__(self, settings: PlannerSettings = DEFAULT, *, name: str = "planner") -> None:
        self.name, self.settings = name, settings

    def initial(self, limits: Limits, knobs: Knobs) -> PlannerState:
        return PlannerState(
            limits=limits,
            knobs=limits.clamp(knobs),
            settings=self.settings,
            services={s: StageCost(name=s, settings=self.settings) for s in limits.workers},
        )

    def made_of(self) -> dict[str, Any]:
        return {"settings": asdict(self.settings)}

    def learned(self, state: PlannerState) -> dict[str, Any]:
        """Returns the stages' costs as plain data, for `recall` in another process on a similar machine."""
        return {
            "other_cpu_s": state.other_cpu_s,
            **({"start_s": state.start_s} if state.start_s else {}),
            "services": {name: s.to_dict() for name, s in state.services.items() if s.points},
        }

    def recall(self, state: PlannerState, learned: Mapping[str, Any]) -> PlannerState:
        """Returns a state with what was learned before."""
        known = {
            name: StageCost.from_dict(name, values, self.settings)
            for name, values in learned["services"].items()
            if name in state.services
        }
        return replace(
            state,
            services={**state.services, **known},
            other_cpu=learned["other_cpu_s"],
            average_rows_per_s=1.0,  # so that other_cpu_s comes out as it was learned
            start_s=learned.get("start_s", 0.0),
        )

    def decide(self, snapshot: Snapshot, state: PlannerState) -> Decision:
        return self.plan(state, self.take_in(snapshot, state))

    def take_in(self, snapshot: Snapshot, state: PlannerState) -> PlannerState:
        """Returns the state with all that this look shows, before any decision on it."""
        snapshot, state = _count_remote_work(snapshot, state)
        if state.last is None:
            return _begin(state, snapshot)
        latest = rates(state.last, snapshot)
        if latest is None:  # the clock stood still, or counters fell
            return replace(state, last=snapshot, window=(Look(state.tick, snapshot),))
        return _take_in(state, snapshot, latest)

    def plan(self, before: PlannerState, state: PlannerState) -> Decision:
        """Decides on a look. `before` is the state before `take_in`."""
        if before.last is None or state.last is None:
            return state.knobs, state, Reason(text="first look")
        latest = rates(before.last, state.last)
        if latest is None:
            return state.knobs, state, Reason(text="no time has passed since the last look")
        drifted = any(cost.drifts > before.services[n].drifts for n, cost in state.services.items())
        doubtful = [] if state.trial is None else _doubtful_stages(state, latest)
        if doubtful:
            return state.knobs, state, Reason(text=_doubt(doubtful))
        if state.trial is not None and state.trial.crashed(state.age, latest):
            return _undo(state, state.trial, latest)
        recent = rates(state.window[0].snapshot, state.last)
        if recent is None or recent.rows_per_s == 0:
            missing = "workers to start" if state.is_starting else "rows to arrive"
            return state.knobs, state, Reason(text=f"waiting for {missing}")
        if state.trial is not None:
            keep = state.trial.verdict(state.age, recent)
            if keep is None:
                return state.knobs, state, Reason(text="measuring the effect of the last change")
            if not keep:
                return _undo(state, state.trial, recent)
            state = replace(state, trial=None, failures=0 if state.trial.rises else state.failures)
        # After a change, wait so many ticks. Before the first change, so many looks are enough, because they are short.
        settled = len(state.window) if before.unchanged else state.tick - state.window[0].tick + 1
        if settled < state.settings.settle_ticks and not (drifted and len(state.window) > 1):
            return state.knobs, state, Reason(text="measuring the present knobs")
        return _plan(state, latest, recent)

    def next_look_s(self, state: PlannerState) -> float | None:
        if _unexplained_doubts(state):
            return self.settings.quick_look_s
        unmeasured = not all(s.points for s in state.services.values())
        first = unmeasured and state.unchanged and state.tick < self.settings.patience_ticks
        return self.settings.quick_look_s if first else None

    def explain(self, state: PlannerState) -> dict[str, Any]:
        """Returns the stage models, and the predicted rates with other resources. Empty while nothing is known."""
        latest = (
            rates(state.window[0].snapshot, state.window[-1].snapshot) if state.window else None
        )
        if latest is None or not (forecast := forecast_of(state, latest)).costs:
            return {}
        return {
            **details(forecast, latest, state.knobs, forecast.rate(state.knobs.workers)),
            "what_if": what_if(forecast),
        }


def _count_remote_work(snapshot: Snapshot, state: PlannerState) -> tuple[Snapshot, PlannerState]:
    """Adds the work of remote workers to the counters of their stages."""
    if not snapshot.elsewhere:
        return snapshot, state
    counted = snapshot
    if state.reported is not None and state.last is not None:
        counted = at_work(snapshot, state.reported, state.last)
    start_s = snapshot.elsewhere.get("start_s") or state.start_s
    return counted, replace(state, reported=snapshot, start_s=start_s)


def _begin(state: PlannerState, snapshot: Snapshot) -> PlannerState:
    watched = {
        stage.name: state.services[stage.name].observe(stage, False)
        for stage in snapshot.stages
        if stage.name in state.services
    }
    return replace(
        state,
        last=snapshot,
        window=(Look(state.tick, snapshot),),
        services={**state.services, **watched},
    )


def _take_in(state: PlannerState, snapshot: Snapshot, latest: PipelineRates) -> PlannerState:
    """Returns the state with this look. If the workload or the machine has changed, what failed before may be tried
    again."""
    assert state.last is not None, "the first look has come"
    learned = _learn(_expecting(state, snapshot, latest), snapshot, latest)
    moved = {n for n, stage in latest.stages.items() if _moved(state, learned, n, stage)}
    # Costs that move soon after a change may have been moved by it. If no other change follows, they count afterwards.
    if state.age > state.settings.own_effect_ticks:
        changed, unexplained = moved | state.unexplained, frozenset[str]()
    else:
        changed = {n for n in moved if _by_itself(state, latest, learned.services[n])}
        unexplained = state.unexplained | moved - changed
    well_known = {
        n: learned.services[n].known_well(stage.workers)
        for n, stage in latest.stages.items()
        if n in changed
    }
    learned = replace(learned, services={**learned.services, **well_known}, unexplained=unexplained)
    if snapshot.cpu_quota != state.last.cpu_quota:
        # More cores take no rows away, so the trial goes on.
        fewer = snapshot.cpu_quota < state.last.cpu_quota
        learned = replace(
            _begun_again(learned, state.services),
            failures=0,
            trial=None if fewer else learned.trial,
            events=state.events + fewer,
        )
    elif _lost_worker(state, snapshot):
        learned = replace(learned, trial=None, window=())
    elif changed:
        learned = replace(
            _begun_again(learned, changed), changed=state.changed | changed, events=state.events + 1
        )
        if all(state.services[name].surprise for name in changed):
            # The looks since the costs were first doubted show the new workload.
            learned = replace(learned, window=state.window[-1:])
    passed = ticks(latest.seconds)
    return replace(
        learned,
        caps=caps_of_throttled(learned, snapshot),
        last=snapshot,
        tick=state.tick + passed,
        age=state.age + passed,
        window=seen(learned.window, snapshot, state.tick + passed, state.settings),
    )


def _lost_worker(state: PlannerState, snapshot: Snapshot) -> bool:
    """Returns whether a worker process died during a trial that started none. The rate is low until its successor
    works, so the trial ends without a verdict."""
    trial = state.trial
    return (
        trial is not None
        and state.last is not None
        and snapshot.restarts > state.last.restarts
        and all(
            trial.leaves_alone(name, state.knobs)
            for name, backend in state.knobs.backend.items()
            if backend == "process"
        )
    )


def _begun_again(state: PlannerState, stages: Collection[str]) -> PlannerState:
    """Returns the state without a trial, and without what failed in these stages. Their costs have changed. In all
    other stages nothing speaks for another try."""
    return replace(
        state,
        caps={name: cap for name, cap in state.caps.items() if name not in stages},
        tried=frozenset(change for change in state.tried if change[0] not in stages),
        quiet_until=0,
        release_looks=state.settings.patience_ticks,
        trial=None,
        window=(),
    )


def _moved(state: PlannerState, learned: PlannerState, name: str, stage: StageRates) -> bool:
    """Returns whether the costs of a busy stage have changed."""
    if name not in state.services:
        return False
    before, now = state.services[name], learned.services[name]
    moved = now.drifts > before.drifts or now.trends > before.trends
    return moved and stage.busy >= state.settings.min_busy_share * stage.workers


def _by_itself(state: PlannerState, latest: PipelineRates, now: StageCost) -> bool:
    """Returns whether costs changed in a way that a change of knobs does not explain: by a leap, or slowly.

    A cost leaps away from that of as many workers, so their number alone explains no leap. While a change is on trial,
    only a leap counts. The trial then ends without a verdict, because the rate would show the new cost and not the
    effect of the change. A leap that halves the rows may be harm that the change does late, so it is undone first. A
    stage that lost workers starts none that may explain a leap."""
    before, trial = state.services[now.name], state.trial
    leaped = now.leaps > before.leaps
    if trial is not None:
        fewer = latest.stages[now.name].workers < trial.before.workers.get(now.name, 0)
        may_start = trial.is_new(state.age) and not fewer
        return leaped and not may_start and not trial.crashed(state.age, latest)
    return leaped or now.trends > before.trends


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
        if state.reported is None
        else state.reported.elsewhere.get("requests_a_core", 0.0),
    )


def _expecting(state: PlannerState, snapshot: Snapshot, latest: PipelineRates) -> PlannerState:
    """Postpones the judgement of a trial while the workers that it has requested start. What is measured meanwhile is
    ignored."""
    starting = snapshot.elsewhere.get("starting") or any(s.starting for s in snapshot.stages)
    if state.trial is None or not starting or state.age >= state.settings.cap_ticks:
        return state
    trial = replace(
        state.trial, start_up=state.age + ticks(latest.seconds) + state.settings.settle_ticks
    )
    return replace(state, window=(), trial=trial)


def _learn(state: PlannerState, snapshot: Snapshot, latest: PipelineRates) -> PlannerState:
    settings, saturated = state.settings, latest.saturated(state.settings.full_share)
    services = {
        s.name: state.services[s.name].observe(s, saturated, state.is_starting)
        for s in snapshot.stages
        if s.name in state.services
    }
    demand = latest.demand_rows_per_s
    return replace(
        state,
        services={**state.services, **services},
        other_cpu=state.other_cpu
        + settings.learning_weight * (max(0.0, latest.cpu - latest.running) - state.other_cpu),
        average_rows_per_s=state.average_rows_per_s
        + settings.learning_weight * (latest.rows_per_s - state.average_rows_per_s),
        demands=(*state.demands, demand)[-settings.patience_ticks :] if demand else state.demands,
    )


def idle_stages(state: PlannerState, recent: PipelineRates) -> set[str]:
    """Returns the stages that have worked ahead and now wait for space, or have nothing left to read.

    They limit nothing, and may not report again for long."""
    assert state.last is not None, "a plan comes after a look"
    sources = (FETCH, state.limits.decoding)
    waiting = {
        name
        for name, stage in recent.stages.items()
        if stage.busy < state.settings.min_busy_share * stage.workers
        and (name in sources or stage.blocked >= state.settings.mostly_share * stage.workers)
    }
    return {stage.name for stage in state.last.stages if stage.items > 0 and stage.name in waiting}


def _undo(state: PlannerState, trial: TrialChange, recent: PipelineRates) -> Decision:
    """Goes back to the setting before the change, and keeps what was learned."""
    gain, settings = trial.gain(recent), state.settings
    text = (
        f"the last change brought {gain:.2f} times the rows "
        f"where {trial.hoped:.2f} were hoped for, so it is undone: {moves(state.knobs, trial.before)}"
    )
    # Only a failed growth or removal has a penalty. Other trials for more rows are experiments.
    if trial.rises and trial.kind != "grow":
        undone = state  # its measurements are in the curve now
    else:
        undone = replace(
            state,
            caps=caps_after_failure(state, trial),
            failures=state.failures + 1,
            quiet_until=state.tick
            + min(settings.cap_ticks, settings.patience_ticks * 2**state.failures),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outlook:
    """What a plan is made from."""

    forecast: Forecast
    latest: PipelineRates
    recent: PipelineRates
    rate: float
    """The rows a second that the forecast gives the present knobs."""
    bottleneck: str
    ranges: Ranges
    """The fewest and most workers of each stage to consider now."""

    def reason(self, text: str) -> Reason:
        """Returns the reason for no change."""
        return Reason(text=text, bottleneck=self.bottleneck, predicted_rows_per_s=self.rate)


def _plan(state: PlannerState, latest: PipelineRates, recent: PipelineRates) -> Decision:
    """Chooses the next change, or none."""
    forecast, settings = forecast_of(state, latest), state.settings
    unknown = state.services.keys() - forecast.costs.keys() - idle_stages(state, recent)
    if not forecast.costs or (unknown and state.tick <= settings.patience_ticks):
        return state.knobs, state, Reason(text="not every stage has reported work yet")
    outlook = _Outlook(
        forecast=forecast,
        latest=latest,
        recent=recent,
        rate=forecast.rate(state.knobs.workers),
        bottleneck=forecast.bottleneck(),
        ranges={name: range_of(state, name) for name in forecast.costs},
    )
    if (smaller := _save_memory(state, outlook)) is not None:
        return smaller
    input_bound = recent.stall > settings.negligible_share
    if input_bound:
        shapes = stage_layouts.locked(forecast, recent, StageCost.relieved)
        switch = reshape(state, forecast, recent, shapes)
        if switch is not None:
            return switch
    if doubtful := _doubtful_stages(state, recent):
        return state.knobs, state, outlook.reason(_doubt(doubtful))
    if state.tick < state.quiet_until:
        text = "waiting before the next try, as the last one failed"
        return state.knobs, state, outlook.reason(text)
    cause = why(outlook.bottleneck, forecast, recent)
    if input_bound and (faster := _go_faster(state, outlook, cause)) is not None:
        return faster
    if _is_draining(state, outlook) and (grown := _grow(state, outlook, cause)) is not None:
        return grown
    if not input_bound and recent.longest_stall > settings.negligible_share:
        calm = outlook.reason(f"{cause}, and the ranks wait for another host's input")
        return state.knobs, replace(state, release_looks=0), calm
    if outlook.bottleneck not in ("consumer", "cores"):
        calm = outlook.reason(f"{cause}, and nothing better is known")
        if not forecast.remote_stages:
            return state.knobs, replace(state, release_looks=0), calm
        kept = {
            name: (count, count)
            for name, count in state.knobs.workers.items()
            if name not in forecast.remote_stages and name in outlook.ranges
        }
        return release(state, forecast, recent, {**outlook.ranges, **kept}, calm)
    return release(state, forecast, recent, outlook.ranges, outlook.reason(cause))


def _is_draining(state: PlannerState, outlook: _Outlook) -> bool:
    """Returns whether a stage that became dearer by itself makes clearly fewer rows than the trainer takes.

    The trainer waits once the buffers are empty. Workers are added before that, while its own rate is still seen, if
    they cost no other host's cores and a core here is free."""
    recent, ratio = outlook.recent, state.settings.min_gain_ratio
    stage = recent.stages.get(outlook.bottleneck)
    if stage is None or outlook.bottleneck not in state.changed:
        return False
    if outlook.forecast.remote_stages or recent.saturated(state.settings.full_share):
        return False
    made = stage.rows_per_s
    return outlook.rate / ratio <= made and max(made, outlook.rate) < recent.rows_per_s / ratio


def _save_memory(state: PlannerState, outlook: _Outlook) -> Decision | None:
    """Returns a change to less memory if memory is short."""
    forecast, latest = outlook.forecast, outlook.latest
    needed = forecast.memory(state.knobs)
    alarm = latest.memory_used > state.settings.memory_alarm * forecast.memory_limit
    if not alarm and needed <= forecast.memory_limit:
        return None
    knobs, best = forecast.best(outlook.ranges, fewest=True, tight=True)
    if forecast.memory(knobs) >= needed:
        return None
    return change(
        state,
        knobs,
        "memory",
        outlook.recent,
        Reason(
            text=f"memory is short ({format_bytes(latest.memory_used)} of "
            f"{format_bytes(forecast.memory_limit)} used, {format_bytes(needed)} may be "
            f"needed): {moves(state.knobs, knobs)}",
            bottleneck="memory",
            predicted_rows_per_s=best,
            details=details(forecast, outlook.recent, knobs, best),
        ),
    )


def _doubtful_stages(state: PlannerState, recent: PipelineRates) -> list[str]:
    """Returns the busy stages whose costs may be changing now, except those that the trial explains."""
    return [
        n
        for n in _unexplained_doubts(state)
        if n in recent.stages
        and recent.stages[n].busy >= state.settings.min_busy_share * state.knobs.workers[n]
    ]


def _unexplained_doubts(state: PlannerState) -> list[str]:
    """Returns the stages whose costs may be changing now, except those that the trial explains."""
    trial = state.trial
    return [
        n
        for n, cost in state.services.items()
        if cost.doubtful and (trial is None or not trial.explains(n, state.knobs, state.age))
    ]


def _doubt(doubtful: list[str]) -> str:
    return f"the cost of a row rose in {' and in '.join(doubtful)}: waiting to see if it stays"


def _go_faster(state: PlannerState, outlook: _Outlook, cause: str) -> Decision | None:
    """Returns the first change that promises more rows: more workers, another back end, or a number of workers
    that has not been seen yet."""
    forecast, recent = outlook.forecast, outlook.recent
    grown = _grow(state, outlook, cause)
    if grown is not None:
        return grown
    shapes = stage_layouts.locked(forecast, recent, StageCost.unhindered)
    reshaped = reshape(state, forecast, recent, shapes)
    if reshaped is not None:
        return reshaped
    untried = probe(state, forecast, recent)
    if untried is None:
        return None
    name, count, hope = untried
    knobs = state.knobs.with_workers(**{name: count})
    return change(
        replace(state, tried=state.tried | {(name, count)}),
        knobs,
        "probe",
        recent,
        Reason(
            text=f"{name} is the bottleneck, and its scaling is not fully known: "
            f"trying {moves(state.knobs, knobs)}",
            bottleneck=name,
            predicted_rows_per_s=hope,
            details=details(forecast, recent, knobs, hope),
        ),
    )


def _grow(state: PlannerState, outlook: _Outlook, cause: str) -> Decision | None:
    """Returns the best numbers of workers, if they promise enough for their price."""
    forecast, recent = outlook.forecast, outlook.recent
    knobs, best = forecast.best(outlook.ranges, fewest=False)
    if knobs.workers == state.knobs.workers:
        return None
    needed = state.settings.min_gain_ratio * outlook.rate - forecast.price(state.knobs.workers)
    if best - forecast.price(knobs.workers) < needed:
        return None
    return change(
        state,
        knobs,
        "grow",
        lasting(recent, forecast),
        Reason(
            text=f"{cause}: {moves(state.knobs, knobs)}, {best / outlook.rate:.2g} times the rows predicted",
            bottleneck=outlook.bottleneck,
            predicted_rows_per_s=best,
            details=details(forecast, recent, knobs, best),
        ),
    )
