"""`autotune`: what tf.data's AUTOTUNE does, from its public documentation and the description of its model.

Every stage is a producer with a buffer. Its output latency is the time to produce an element, times the chance that
its buffer is empty when one is wanted: that of a queue with n places, from the ratio of production to consumption
rate. From one worker each, the search adds the worker that shortens the modelled latency of the last stage most, until
the latency is below what the budget of cores can do, nothing helps, or the buffers exceed the budget of memory (by
default half of the machine's). It runs ever more seldom: the pause doubles up to a minute. The prefetch buffer doubles
whenever it was found empty. There is no term for contention, and what a user's function allocates does not count.

It keeps the number of cores that it saw at first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sluice.agent.costs.rates import PipelineRates, rates
from sluice.agent.tunable import Policy, Reason
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

_LONGEST_PAUSE_S = 60.0
_RAM_SHARE = 0.5


def empty_chance(production_rate: float, consumption_rate: float, places: float) -> float:
    """The chance that a buffer with so many places is found empty."""
    ratio = production_rate / consumption_rate
    if abs(ratio - 1) < 1e-6:
        return 1 / (places + 1)
    if (
        ratio > 1 and (places + 1) * (ratio - 1) > 50
    ):  # the power would overflow, and the chance is 0
        return 0.0
    return float((1 - ratio) / (1 - ratio ** (places + 1)))


def latency(costs: Sequence[float], workers: Sequence[int], consumer_s: float) -> float:
    """Modelled seconds that the consumer waits for an element; `costs` are a worker's seconds for one.

    This follows tf.data: a buffer's consumer is all that comes after it, and the buffer has a place for each worker
    that takes from it."""
    alone = [cost / count for cost, count in zip(costs, workers, strict=True)]
    places = [*workers[1:], workers[-1]]
    waits = 0.0
    for i, seconds in enumerate(alone):
        produce, consume = seconds + waits, sum(alone[i + 1 :]) + consumer_s
        waits = (
            produce * empty_chance(1 / produce, 1 / consume, places[i])
            if consume > 0 and produce > 0
            else produce
        )
    return waits


def climb(
    costs: Sequence[float],
    most: Sequence[int],
    consumer_s: float,
    *,
    cores: float,
    element_bytes: Sequence[float],
    ram: float,
) -> list[int]:
    """The workers at which the hill climb ends."""
    workers = [1] * len(costs)
    while latency(costs, workers, consumer_s) > sum(costs) / cores:
        if sum(n * b for n, b in zip(workers, element_bytes, strict=True)) > ram:
            break
        now = latency(costs, workers, consumer_s)
        tries = [
            (latency(costs, [*workers[:i], n + 1, *workers[i + 1 :]], consumer_s), i)
            for i, n in enumerate(workers)
            if n < most[i]
        ]
        if not tries or min(tries)[0] >= now:
            break
        workers[min(tries)[1]] += 1
    return workers


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneState:
    limits: Limits
    knobs: Knobs
    last: Snapshot | None = None
    costs: Mapping[str, float] | None = None
    cores: float = 0.0
    pause_s: float = 1.0
    next_at: float = 0.0


class Autotune(Policy):
    name = "autotune"

    def initial(self, limits: Limits, knobs: Knobs) -> AutotuneState:
        return AutotuneState(limits=limits, knobs=limits.clamp(knobs))

    def decide(
        self, snapshot: Snapshot, state: AutotuneState
    ) -> tuple[Knobs, AutotuneState, Reason]:
        if state.last is None:
            first = replace(
                state, last=snapshot, cores=snapshot.cpu_quota, next_at=snapshot.at + state.pause_s
            )
            return state.knobs, first, Reason(text="nothing was seen yet")
        assert state.last is not None
        seen = rates(state.last, snapshot)
        if snapshot.at < state.next_at or seen is None:
            return state.knobs, state, Reason(text=f"the next look is at {state.next_at:.0f} s")
        costs = _costs(state.costs or {}, seen)
        pause = min(_LONGEST_PAUSE_S, 2 * state.pause_s)
        state = replace(
            state, last=snapshot, costs=costs, pause_s=pause, next_at=snapshot.at + pause
        )
        if len(costs) < len(state.limits.workers):
            return state.knobs, state, Reason(text="not every stage has reported yet")
        ram, stages = _RAM_SHARE * snapshot.memory_limit, snapshot.stages
        batch = snapshot.rows / max(1, snapshot.batches)
        width = [s.bytes / max(1, s.rows) for s in stages]
        computed = snapshot.consumer_compute_s / max(1, snapshot.batches)
        workers = climb(
            [costs[s.name] * batch for s in stages],
            [min(state.limits.workers[s.name][1], max(1, int(state.cores))) for s in stages],
            computed,
            cores=state.cores,
            element_bytes=[w * batch for w in width],
            ram=ram,
        )
        fetch = state.knobs.prefetch_bytes
        if seen.stall > 0 and 2 * fetch < ram:
            fetch *= 2
        knobs = state.limits.clamp(
            replace(
                state.knobs,
                prefetch_bytes=fetch,
                workers={s.name: n for s, n in zip(stages, workers, strict=True)},
            )
        )
        return (
            knobs,
            replace(state, knobs=knobs),
            Reason(
                text=f"the modelled latency is least at {knobs}", details={"costs": dict(costs)}
            ),
        )


def _costs(known: Mapping[str, float], seen: PipelineRates) -> dict[str, float]:
    """The useful seconds a row of each stage, from the newest measurement if there is one."""
    now = {n: s.busy / s.rows_per_s for n, s in seen.stages.items() if s.rows_per_s > 0}
    return {**known, **now}
