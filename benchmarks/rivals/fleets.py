"""How others size a fleet of workers elsewhere: `RayThresholds`, and `Ds2Fleet`. All other knobs stay as they are.

Read in Ray 2.60.0 (`ray/data/_internal/actor_autoscaler/default_actor_autoscaler.py`, its settings in
`ray/data/context.py`; ray-project/ray#61385 made starting actors count): a pool's use is the requests at its actors by
the actors, starting ones too; from 1.75 on it grows by use / 1.75, by at least one, and down to .5 one actor goes,
unless some are starting. An actor holds two requests at most. Price, stall and what the trainer takes play no part.

DS2 is `sluice.benchmarks.rivals.ds2` for this one stage: as many workers as useful time says, all at once. It looks
while nobody is starting, as DS2 measures once a job has been deployed anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TypeVar

from sluice.agent.costs.rates import rates
from sluice.agent.costs.remote_work import at_work
from sluice.agent.tunable import Policy, Reason
from sluice.benchmarks.rivals.ds2 import parallelism
from sluice.benchmarks.rivals.stopwatch import Stopwatch
from sluice.ingest.knobs import REMOTE, REQUESTS_A_CORE, Knobs, Limits
from sluice.ingest.stats import Snapshot

_UP, _DOWN = 1.75, 0.5
_SETTLE, _WINDOW, _TOLERANCE = 1, 2, 0.1


def remote_stage(knobs: Knobs) -> str:
    return next(name for name, backend in knobs.backend.items() if backend == REMOTE)


def with_workers(limits: Limits, knobs: Knobs, count: int) -> Knobs:
    name = remote_stage(knobs)
    return limits.resized(knobs, {**knobs.workers, name: max(1, count) * REQUESTS_A_CORE})


@dataclass(frozen=True, slots=True, kw_only=True)
class RayState:
    limits: Limits
    knobs: Knobs
    last: Snapshot | None = None


class RayThresholds(Policy):
    name = "ray-thresholds"

    def initial(self, limits: Limits, knobs: Knobs) -> RayState:
        return RayState(limits=limits, knobs=limits.clamp(knobs))

    def decide(self, snapshot: Snapshot, state: RayState) -> tuple[Knobs, RayState, Reason]:
        seen = rates(state.last, snapshot) if state.last is not None else None
        state = replace(state, last=snapshot)
        if seen is None:
            return state.knobs, state, Reason(text="first look")
        size = math.ceil(state.knobs.workers[remote_stage(state.knobs)] / REQUESTS_A_CORE)
        at_actors = min(
            seen.stages[remote_stage(state.knobs)].busy,
            REQUESTS_A_CORE * snapshot.elsewhere["workers"],
        )
        use = at_actors / size
        count = size
        if use >= _UP:
            count = size + max(1, math.ceil(size * (use / _UP - 1)))
        elif use <= _DOWN and not snapshot.elsewhere["starting"]:
            count = size - 1
        knobs = with_workers(state.limits, state.knobs, count)
        return knobs, replace(state, knobs=knobs), Reason(text=f"use {use:.2f}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ds2FleetState:
    limits: Limits
    knobs: Knobs
    watch: Stopwatch = field(default_factory=Stopwatch)
    told: Snapshot | None = None
    last: Snapshot | None = None


State = TypeVar("State", bound=Ds2FleetState)


def weighed(told: Snapshot, state: State) -> tuple[Snapshot, State]:
    """What a fleet tells, with useful time as a worker's own, and the state that knows it."""
    snapshot = (
        told if state.told is None or state.last is None else at_work(told, state.told, state.last)
    )
    return snapshot, replace(state, told=told, last=snapshot)


class Ds2Fleet(Policy):
    name = "ds2"

    def initial(self, limits: Limits, knobs: Knobs) -> Ds2FleetState:
        return Ds2FleetState(limits=limits, knobs=limits.clamp(knobs))

    def decide(
        self, snapshot: Snapshot, state: Ds2FleetState
    ) -> tuple[Knobs, Ds2FleetState, Reason]:
        told, name = snapshot, remote_stage(state.knobs)
        snapshot, state = weighed(told, state)
        if told.elsewhere["starting"]:
            return (
                state.knobs,
                replace(state, watch=Stopwatch()),
                Reason(text="workers are starting"),
            )
        watch, seen = state.watch.look(snapshot, settle=_SETTLE, window=_WINDOW)
        if seen is None:
            return state.knobs, replace(state, watch=watch), Reason(text="measuring useful time")
        state = replace(state, watch=Stopwatch(0, snapshot))
        stage, target = seen.stages[name], seen.demand_rows_per_s
        if not (target and stage.busy > 0 and stage.rows_per_s > 0):
            return state.knobs, state, Reason(text="not every stage has reported yet")
        useful = stage.rows_per_s / stage.busy
        if abs(target - useful * state.knobs.workers[name]) <= _TOLERANCE * target:
            return (
                state.knobs,
                state,
                Reason(text="useful time says that all is well", predicted_rows_per_s=target),
            )
        [requests] = parallelism({name: useful}, target).values()
        knobs = with_workers(state.limits, state.knobs, math.ceil(requests / REQUESTS_A_CORE))
        return (
            knobs,
            replace(state, knobs=knobs, watch=Stopwatch()),
            Reason(text=f"{target:.0f} rows/s need {knobs}", predicted_rows_per_s=target),
        )
