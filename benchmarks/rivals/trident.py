"""`trident`: a Gaussian process per stage for its capacity, a mixed-integer programme for the allocation, bounded
memory (after arXiv 2603.02075, which does this for the operators of a cluster; this is one host's share of it).

    maximise X    X ≤ Σ_n y_in · capacity_i(n)      capacity by the process, from useful time
                  Σ_n y_in = 1, y_in ∈ {0, 1}       one number of workers a stage, out of a ladder
                  X · Σ cpu seconds a row ≤ cores
                  Σ y_in · n · bytes_i ≤ memory     bytes an item and worker: mean plus two deviations of what was seen

The process works on the logarithms of useful seconds a row and of workers. A programme is solved when a plan is four
snapshots old, and its plan is taken if it promises 5 % more, or if memory asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sluice.agent.costs.rates import PipelineRates, rates
from sluice.agent.tunable import Policy, Reason
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

_EVERY = 4
_GAIN = 1.05
_KEEP = 24  # observations of a stage
_LENGTH, _SIGNAL, _NOISE = 1.5, 0.5, 0.05
_FILL = 0.85


def process(
    seen: Sequence[tuple[float, float]], at: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """The process's mean and deviation at `at`, given pairs (place, value); squared-exponential kernel, constant
    mean."""
    x, y = np.array([p for p, _ in seen]), np.array([v for _, v in seen])

    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.asarray(_SIGNAL**2 * np.exp(-0.5 * ((a[:, None] - b[None, :]) / _LENGTH) ** 2))

    places, middle = np.asarray(at, float), float(y.mean())
    gram = kernel(x, x) + _NOISE**2 * np.eye(len(x))
    across = kernel(places, x)
    mean = middle + across @ np.linalg.solve(gram, y - middle)
    variance = _SIGNAL**2 - np.einsum("ij,ji->i", across, np.linalg.solve(gram, across.T))
    return mean, np.sqrt(np.maximum(variance, 0.0))


def ladder(low: int, high: int) -> list[int]:
    """The numbers of workers to choose from: all the small ones, then in steps of about a sixth."""
    rungs, n = [], low
    while n < high:
        rungs.append(n)
        n += max(1, n // 6)
    return [*rungs, high]


def allocate(
    rungs: Sequence[Sequence[int]],
    capacity: Sequence[Sequence[float]],
    cpu_per_row: float,
    *,
    cores: float,
    bytes_each: Sequence[float],
    memory: float,
) -> tuple[float, list[int]] | None:
    """The rate and the workers at the optimum, or None if not even the fewest fit in memory."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    unit = max(max(c) for c in capacity)
    sizes = [len(r) for r in rungs]
    count = 1 + sum(sizes)
    starts = np.cumsum([1, *sizes])[:-1]
    rows, low, high = [], [], []
    room = np.zeros(count)
    objective = np.zeros(count)
    objective[0] = -1.0
    for i, (options, rate) in enumerate(zip(rungs, capacity, strict=True)):
        here = slice(starts[i], starts[i] + sizes[i])
        limit, one = np.zeros(count), np.zeros(count)
        limit[0], limit[here], one[here] = 1.0, -np.asarray(rate) / unit, 1.0
        room[here] = np.asarray(options) * bytes_each[i] / max(1.0, memory)
        objective[here] = 1e-6 * np.asarray(options)  # among equal optima, the fewest workers
        rows += [limit, one]
        low += [-np.inf, 1.0]
        high += [0.0, 1.0]
    most = cores / (cpu_per_row * unit) if cpu_per_row > 0 else np.inf
    integral = np.ones(count)
    integral[0] = 0
    found = milp(
        objective,
        constraints=LinearConstraint(np.array([*rows, room]), [*low, -np.inf], [*high, 1.0]),
        integrality=integral,
        bounds=Bounds(np.zeros(count), np.array([most] + [1.0] * (count - 1))),
        options={"time_limit": 0.5},
    )
    if found.x is None:
        return None
    chosen = [
        options[int(np.argmax(found.x[s : s + len(options)]))]
        for options, s in zip(rungs, starts, strict=True)
    ]
    return float(found.x[0]) * unit, chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class TridentState:
    limits: Limits
    knobs: Knobs
    last: Snapshot | None = None
    age: int = 0
    seen: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    """Stage → (log workers, log useful seconds a row)."""
    sizes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Stage → bytes of an item."""


class Trident(Policy):
    name = "trident"

    def initial(self, limits: Limits, knobs: Knobs) -> TridentState:
        return TridentState(limits=limits, knobs=limits.clamp(knobs))

    def decide(self, snapshot: Snapshot, state: TridentState) -> tuple[Knobs, TridentState, Reason]:
        now = rates(state.last, snapshot) if state.last else None
        state = replace(state, last=snapshot, age=state.age + 1)
        if now is None:
            return state.knobs, state, Reason(text="nothing was seen yet")
        if state.age > 1:  # the first interval after a change belongs to neither setting
            state = _learn(state, now, snapshot)
        if len(state.seen) < len(state.limits.workers) or state.age < _EVERY:
            return state.knobs, state, Reason(text="observing")
        names = list(state.limits.workers)
        most = max(2, math.ceil(4 * now.cpu_quota))
        rungs = [
            ladder(low, max(low, min(high, most))) for low, high in state.limits.workers.values()
        ]
        capacity, at_present = [], math.inf
        for name, options in zip(names, rungs, strict=True):
            places = [math.log(n) for n in [*options, state.knobs.workers[name]]]
            mean, spread = process(state.seen[name], places)
            estimate = [
                n / math.exp(m + 0.5 * s * s)
                for n, m, s in zip([*options, state.knobs.workers[name]], mean, spread, strict=True)
            ]
            capacity.append(estimate[:-1])
            at_present = min(at_present, estimate[-1])
        cpu = sum(s.cpu / s.rows_per_s for s in now.stages.values() if s.rows_per_s > 0)
        size = [float(np.mean(state.sizes[n]) + 2 * np.std(state.sizes[n])) for n in names]
        held = sum(state.knobs.workers[n] * b for n, b in zip(names, size, strict=True))
        memory = max(0.0, _FILL * now.memory_limit - max(0.0, now.memory_used - held))
        found = allocate(rungs, capacity, cpu, cores=now.cpu_quota, bytes_each=size, memory=memory)
        if found is None:
            knobs = state.limits.resized(state.knobs, dict.fromkeys(names, 1))
            return (
                knobs,
                replace(state, knobs=knobs, age=0),
                Reason(text="memory is too short for more than the least"),
            )
        rate, workers = found
        if (
            rate < _GAIN * min(at_present, now.cpu_quota / cpu if cpu > 0 else math.inf)
            and held <= memory
        ):
            return (
                state.knobs,
                replace(state, age=1),
                Reason(text="no plan promises enough", predicted_rows_per_s=rate),
            )
        knobs = state.limits.resized(state.knobs, dict(zip(names, workers, strict=True)))
        return (
            knobs,
            replace(state, knobs=knobs, age=0),
            Reason(
                text=f"the programme gives {rate:.0f} rows/s at {knobs}", predicted_rows_per_s=rate
            ),
        )


def _learn(state: TridentState, now: PipelineRates, snapshot: Snapshot) -> TridentState:
    seen, sizes = dict(state.seen), dict(state.sizes)
    for name, stage in now.stages.items():
        if stage.rows_per_s <= 0 or stage.busy <= 0:
            continue
        counters = snapshot.stage(name)
        point = (math.log(stage.workers), math.log(stage.busy / stage.rows_per_s))
        seen[name] = (*seen.get(name, ()), point)[-_KEEP:]
        sizes[name] = (*sizes.get(name, ()), counters.bytes / max(1, counters.items))[-_KEEP:]
    return replace(state, seen=seen, sizes=sizes)
