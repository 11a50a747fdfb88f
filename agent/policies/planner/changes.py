"""The planner's changes other than growing: another back end, a probe, fewer workers. Also puts changes on
trial. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from sluice.agent.costs.forecast import Forecast, Ranges
from sluice.agent.costs.rates import PipelineRates
from sluice.agent.costs.stage_layouts import BackEndSwitch
from sluice.agent.policies.planner.explain import details, moves
from sluice.agent.policies.planner.state import Decision, PlannerState
from sluice.agent.policies.planner.trial_change import TrialChange
from sluice.agent.tunable import Reason
from sluice.ingest.knobs import Knobs


def reshape(
    state: PlannerState,
    forecast: Forecast,
    recent: PipelineRates,
    candidates: Iterable[BackEndSwitch],
) -> Decision | None:
    """Moves a stage to its other back end: the first candidate that promises enough."""
    for shape in candidates:
        if shape.key in state.tried:
            continue
        name = shape.stage
        # No stage's curve includes waits for a lock, which a switch ends.
        present_rate = min(forecast.rate(state.knobs.workers), recent.rows_per_s)
        ranges = ranges_of_move(state, shape.forecast, name)
        knobs, best = shape.forecast.best(ranges, fewest=False)
        if best < state.settings.min_gain_ratio * present_rate or not shape.forecast.fits(knobs):
            continue
        sharing = {
            n: (s.relieved() if state.limits.movable(n, s.backend) else s).stale()
            for n, s in forecast.costs.items()
            if n != name and s.backend == "thread"
        }
        trying = replace(
            state,
            tried=state.tried | {shape.key},
            services={**state.services, **sharing},
            caps={},
        )
        return change(
            trying,
            knobs,
            "switch",
            recent,
            Reason(
                text=f"{shape.cause}: trying {moves(state.knobs, knobs)}, {best / present_rate:.2g} times the rows "
                "predicted",
                bottleneck=forecast.bottleneck(),
                predicted_rows_per_s=best,
                details=details(shape.forecast, recent, knobs, best),
            ),
        )
    return None


def ranges_of_move(state: PlannerState, forecast: Forecast, moved: str) -> Ranges:
    """Returns the fewest and most workers of each stage to consider if one moves to its other back end.

    A change that failed while workers waited for a lock may succeed without these waits."""
    free = replace(state, caps={})
    most = min(state.limits.workers[moved][1], max(2, math.ceil(forecast.cores)))
    return {**{n: range_of(free, n) for n in forecast.costs}, moved: (1, most)}


def range_of(state: PlannerState, name: str) -> tuple[int, int]:
    """Returns the fewest and most workers to consider now."""
    least, most = state.allowed(name)
    most_seen = state.services[name].most_seen
    reach = max(
        state.knobs.workers[name],
        state.settings.growth_factor * most_seen
        if most_seen > 1
        else state.settings.growth_from_one,
    )
    return least, max(least, min(most, reach))


def probe(
    state: PlannerState, forecast: Forecast, recent: PipelineRates
) -> tuple[str, int, float] | None:
    """Returns the busiest stage with an untried number of workers and the rate hoped for. None: no real gain."""
    share = {
        n: recent.stages[n].busy / state.knobs.workers[n]
        for n in forecast.costs
        if n in recent.stages
    }
    name = max(share, key=lambda n: share[n], default=None)
    if name is None or share[name] < state.settings.probe_busy_share:
        return None
    service = forecast.costs[name]
    workers = state.knobs.workers
    present_rate = forecast.rate(state.knobs.workers)
    least, most = range_of(state, name)
    most = max(
        workers[name], most, service.most_seen
    )  # between two settings seen, any may be tried
    worth = {}
    for count, hope in service.hopes(recent.cpu_quota, state.settings.min_gain_ratio).items():
        unbent = replace(forecast, costs={**forecast.costs, name: service.unbent(count)})
        hoped_for = min(hope, unbent.rate_around(name, {**workers, name: count}))
        is_new = least <= count <= most and (name, count) not in state.tried
        if (
            is_new
            and hoped_for >= state.settings.min_gain_ratio * present_rate
            and (count < workers[name] or forecast.fits(state.knobs.with_workers(**{name: count})))
        ):
            worth[count] = hoped_for
    if not worth:
        return None
    count = max(worth, key=lambda n: worth[n])
    return name, count, worth[count]


def release(
    state: PlannerState,
    forecast: Forecast,
    recent: PipelineRates,
    ranges: Ranges,
    calm: Reason,
) -> Decision:
    """Removes workers that are not needed, once the trainer or the cores have been the bottleneck for a while."""
    knobs_before, settings = state.knobs, state.settings
    alone = (
        forecast if calm.bottleneck == "consumer" else forecast.uncontended
    )  # perhaps our own threads slow us
    lean, _ = alone.best(ranges, fewest=True)
    workers = {n: min(count, lean.workers[n]) for n, count in knobs_before.workers.items()}
    knobs = replace(knobs_before, workers=workers)
    now = state.last.at if state.last is not None else 0.0
    if forecast.remote_stages:
        needed = {
            name: max(knobs.workers[name], state.needed.get(name, 0) if state.release_looks else 0)
            for name in forecast.remote_stages
        }
        state = replace(
            state, needed=needed, release_since=state.release_since if state.release_looks else now
        )
        knobs = knobs.with_workers(**needed)
    spare = knobs_before.total_workers - knobs.total_workers
    saved = alone.price(knobs_before.workers) - alone.price(knobs.workers)
    gain = (alone.rate(knobs.workers) + saved) / alone.rate(knobs_before.workers)
    few = knobs.total_workers > settings.step_down * knobs_before.total_workers
    if spare < 1 or gain < 1 + settings.negligible_share * (1 if few else -1):
        return knobs_before, replace(state, release_looks=0), calm
    # Idle remote workers are kept as long as keeping one costs no more than starting it again. A start costs the
    # worker's price and the rows that it would have brought meanwhile.
    kept_s = 0.0
    if saved and alone.core_rows_per_s > 0:
        brought = alone.rate(knobs_before.workers) / alone.remote_cores(knobs_before.workers)
        price = settings.restart_price_share * state.start_s
        kept_s = price * (1 + brought / alone.core_rows_per_s)
    if state.release_looks + 1 < settings.patience_ticks or (
        saved and now - state.release_since < kept_s
    ):
        return knobs_before, replace(state, release_looks=state.release_looks + 1), calm
    return change(
        state,
        knobs,
        "release",
        recent,
        replace(
            calm,
            text=f"{calm.text}: {moves(knobs_before, knobs)} costs it nothing",
            predicted_rows_per_s=recent.rows_per_s,
            details=details(forecast, recent, knobs, recent.rows_per_s),
        ),
    )


def lasting(recent: PipelineRates, forecast: Forecast) -> PipelineRates:
    """Returns the rates before a change, with no more rows than the bottleneck makes.

    While buffers drain, the consumer takes more. Compared with that rate, a change would seem useless although it
    restores what was lost."""
    stage = recent.stages.get(forecast.bottleneck())
    if stage is None:
        return recent
    made = max(forecast.rate(forecast.knobs.workers), stage.rows_per_s)
    return replace(recent, rows_per_s=min(recent.rows_per_s, made))


def change(
    state: PlannerState, knobs: Knobs, kind: str | None, recent: PipelineRates, reason: Reason
) -> Decision:
    """Puts `knobs` in force; with a `kind`, on trial."""
    starting = any(
        backend == "process" and state.knobs.backend.get(n) != "process"
        for n, backend in knobs.backend.items()
    )
    trial = (
        TrialChange(
            kind=kind,
            before=state.knobs,
            rows_per_s=recent.rows_per_s,
            settings=state.settings,
            predicted=reason.predicted_rows_per_s or recent.rows_per_s,
            start_up=state.settings.certain_ticks if starting or kind == "switch" else 0,
        )
        if kind
        else None
    )
    changed = replace(
        state,
        knobs=knobs,
        age=0,
        release_looks=0,
        window=(),
        trial=trial,
        demands=(),
        changed=frozenset(),
        unexplained=frozenset(),
    )
    return knobs, changed, reason
