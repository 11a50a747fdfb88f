"""What a setting would bring at today's costs: `Outlook`. Pure.

The rate is the smallest of these, and what workers and buffers hold must fit in memory (`sluice.agent.costs.forecast`):

- for each stage, its workers over the seconds of a row (drawn from `StageModel`);
- the cores over the processor seconds a row of all stages, less the use by other programs;
- what the interpreter's lock allows (drawn from `LockModel`);
- what the trainer takes.

All settings are compared over the same draws, so what is unknown of both does not blur their difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy import ndarray

from sluice.agent.costs.contention import Contention
from sluice.agent.costs.forecast import Forecast, Ranges
from sluice.agent.costs.rates import PipelineRates
from sluice.agent.costs.stage_cost import StageCost
from sluice.agent.tuner.lock import lock_capacity
from sluice.agent.tuner.settings import TunerSettings
from sluice.agent.tuner.stage_model import COMPUTES, StageModel
from sluice.agent.tuner.state import TunerState
from sluice.ingest.knobs import FETCH, REQUESTS_A_CORE, Knobs

_SEED = 7
_OVERHEAD = (1.01, 1.3)  # how many times dearer a row may be in a process
_GRID = [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128]
_GRID += [2**k for k in range(8, 13)]
_HOLDS = 0.02  # of the lock's time: with less, a stage is no holder
_SETTLED_S = 1.5  # in less time, rows come to the trainer in lumps
UNBOUNDED = 1e15


class Outlook:
    """What is known at a look, as draws of what a setting would bring."""

    def __init__(self, settings: TunerSettings, state: TunerState, recent: PipelineRates) -> None:
        self.settings, self.state, self.recent = settings, state, recent
        self.at, self.knobs, self.limits = state.last.at, state.knobs, state.limits
        self.known = {n: stage for n, stage in state.stages.items() if stage.known}
        rows = recent.rows_per_s
        spent = max(0.0, recent.cpu - recent.running)
        starting = any(stage.starting for stage in state.last.stages)  # that takes cores, too
        self.is_settled = rows > 0 and recent.seconds >= _SETTLED_S and not starting
        """Whether the rates are of enough rows to tell what the trainer takes of the cores."""
        self.other_cpu_s = spent / rows if self.is_settled else state.other_cpu_s
        self.demand = max((d for _, d in state.demands), default=math.inf)
        self.contention = Contention.of(recent, self.limits.cores)
        self._draw()
        self.forecast = self.forecast_with()
        self.ranges: Ranges = {n: self._range(n) for n in self.forecast.costs}

    def _draw(self) -> None:
        """Draws shape and level of each stage, the lock's shares and what a process costs."""
        random, count = np.random.default_rng(_SEED), self.settings.draws
        places = (np.arange(count) + 0.5) / count * 0.999999
        self._known = {n: stage.posterior() for n, stage in self.known.items()}
        self._shape: dict[str, ndarray] = {}
        self._noise: dict[str, ndarray] = {}
        for name, known in self._known.items():
            shape = np.searchsorted(np.cumsum(known.p), places)[random.permutation(count)]
            self._shape[name] = shape
            self._noise[name] = np.sqrt(known.variance[shape]) * random.standard_normal(count)
        self._overhead = np.exp(
            random.uniform(math.log(_OVERHEAD[0]), math.log(_OVERHEAD[1]), count)
        )
        self._under, self._trainer = self.state.lock.draw(random, count)

    # ---- one stage

    def workers(self, name: str) -> int:
        return self.knobs.workers[name]

    def item_s(self, name: str) -> float:
        """Returns the seconds that an item of a stage takes now. 0: unknown."""
        stage = self.known.get(name)
        if stage is None:
            return 0.0
        return math.exp(stage.level(self.workers(name))[0]) * stage.item_rows

    def cpu_s(self, name: str) -> float:
        """Returns the processor seconds of a row of a stage now."""
        stage = self.known[name]
        return stage.cpu_share * math.exp(stage.level(self.workers(name))[0])

    def process_bytes(self, name: str) -> int:
        """Returns the size of a stage's process. One that never ran is taken to be like the others. 0: unknown."""
        most = max(stage.process_bytes for stage in self.known.values())
        return self.known[name].process_bytes or most

    def is_idle(self, name: str) -> bool:
        """Whether a stage does little, because the stages after it have enough."""
        stage = self.recent.stages.get(name)
        if stage is None or stage.busy >= 0.3 * stage.workers:
            return False
        ahead = stage.blocked >= 0.5 * stage.workers or name in (FETCH, self.limits.decoding)
        return ahead and self.state.last.stage(name).items > 0

    def _range(self, name: str) -> tuple[int, int]:
        least, most = self.limits.workers[name]
        state = self.state
        if name == self.limits.asking and state.most_asking and self.at < state.most_asking_until:
            most = max(least, min(most, state.most_asking))
        return least, most

    def _seconds(self, name: str, workers: int, backend: str) -> tuple[ndarray, ndarray]:
        """Returns draws of the useful and of the processor seconds of a row, without waits for the lock."""
        stage = self.known[name]
        shape, known, noise = self._shape[name], self._known[name], self._noise[name]
        now = np.exp(known.at(self.workers(name))[0][shape] + noise)
        then = np.exp(known.at(workers)[0][shape] + noise)
        cpu = stage.cpu_share * now
        if backend == stage.backend:
            cpu = np.where(COMPUTES[shape], cpu * then / now, cpu)
            return then, np.minimum(cpu, then)
        left = stage.on(backend)
        if left is not None:
            busy = np.full(len(now), left.curve(np.array([workers]))[0])
            return busy, np.minimum(cpu, busy)
        over = self._overhead if backend == "process" else 1.0
        return now * over, cpu * over

    # ---- a setting

    def rate(self, knobs: Knobs) -> ndarray:
        """Returns draws of the rows a second that a setting brings."""
        count = self.settings.draws
        cpu, under = np.zeros(count), np.zeros(count)
        alone: dict[str, ndarray] = {}
        holders = []
        for name in self.known:
            if name not in knobs.workers:
                continue
            busy, own = self._seconds(name, knobs.workers[name], self._backend(name, knobs))
            busy = busy + (self.contention.slow - 1) * own
            alone[name], cpu = busy, cpu + own
            if self._backend(name, knobs) != "process":
                share = self._under[name]
                under = under + share * own
                if float(np.mean(share)) > _HOLDS:
                    holders.append((knobs.workers[name], busy, share * own))
        rate = np.full(count, min(self.demand, UNBOUNDED))
        if (quota := self.recent.cpu_quota) > 0:
            rate = np.minimum(rate, quota / np.maximum(self.other_cpu_s + cpu, 1e-12))
            rate = np.minimum(rate, self.contention.cores / np.maximum(cpu, 1e-12))
        if self.state.lock.seen:
            rate = np.minimum(rate, lock_capacity(under, holders, self._trainer, self.settings))
        for name, busy in alone.items():
            turn_s = self._turn_s(name) if self._backend(name, knobs) != "process" else 0.0
            # The more rows a second, the longer is the lock held, and each item waits for it.
            fixed, rising = busy + turn_s * self._trainer, turn_s * under
            root = np.sqrt(fixed * fixed + 4 * rising * knobs.workers[name])
            rate = np.minimum(rate, 2 * knobs.workers[name] / (fixed + root))
        return rate

    def _backend(self, name: str, knobs: Knobs) -> str:
        return knobs.backend.get(name, self.limits.backends_of(name)[0])

    def _turn_s(self, name: str) -> float:
        """Returns the seconds for which a row of a stage in threads waits for a lock that is always held."""
        stage = self.known[name]
        if not self.state.lock.seen or not self.state.lock.is_bystander(name):
            return 0.0
        turn_s = self.settings.turn_s if stage.turn_s is None else stage.turn_s
        return turn_s / max(1.0, stage.item_rows)

    def bound_by_lock(self, knobs: Knobs) -> float:
        """Returns the rows a second that the lock allows if as few threads as possible want it."""
        if not self.state.lock.seen:
            return math.inf
        under = 0.0
        for name in self.known:
            if self._backend(name, knobs) != "process":
                under += self.state.lock.share(name) * self.cpu_s(name)
        return max(0.05, 1 - float(self.state.lock.mean[-1])) / max(under, 1e-15)

    @property
    def bottleneck(self) -> str:
        """What limits the rate: a stage, `cores`, `lock` or `consumer`."""
        bounds = {
            "consumer": self.demand,
            "cores": self.forecast.cores_rate(self.knobs.workers),
            "lock": self.bound_by_lock(self.knobs),
        }
        for name in self.forecast.costs:
            bounds[name] = self.forecast.capacity(name, self.workers(name))
        return min(bounds, key=lambda name: bounds[name])

    def holder(self) -> str | None:
        """Returns the stage that holds the lock longest for a row. None: no stage in threads does."""
        held = {
            n: self.state.lock.share(n) * self.cpu_s(n)
            for n, stage in self.known.items()
            if stage.backend != "process"
        }
        name = max(held, key=lambda n: held[n], default=None)
        return name if name is not None and held[name] > 0 else None

    # ---- for the allocation of workers

    def forecast_with(self, favour: float = 0.0, held: float | None = None) -> Forecast:
        """Returns the forecast of the present layout, by the expected costs, or by more favourable ones.

        `held`: the share of the time in which the lock is held, if it is not as it is now."""
        reported = self.state.last.elsewhere
        held = (self.recent.lock or 0.0) if held is None else held
        return Forecast.of(
            self.recent,
            self.knobs,
            self.limits,
            {n: self._cost(stage, favour, held) for n, stage in self.known.items()},
            contention=self.contention,
            other_cpu_s=self.other_cpu_s,
            demand=self.demand,
            requests_a_core=reported.get("requests_a_core", REQUESTS_A_CORE) if reported else 0.0,
        )

    def moved(self, names: Iterable[str] = (), favour: float = 0.0) -> Forecast:
        """Returns the forecast with these stages on their other back ends, and no more rows than the lock allows."""
        forecast = self.forecast
        names = tuple(names)
        for name in names:
            forecast = forecast.switched(name)
        bound = self.bound_by_lock(forecast.knobs)
        most = min(self.demand, bound, forecast.cores_rate(self.knobs.workers))
        held = min(1.0, most / bound) if math.isfinite(bound) else 0.0
        forecast = self.forecast_with(favour, held)
        for name in names:
            forecast = forecast.switched(name)
        return replace(forecast, demand=min(self.demand, bound))

    def _cost(self, stage: StageModel, favour: float, held: float) -> StageCost:
        """Returns a stage's cost as the forecast wants it."""
        workers, most = self.workers(stage.name), self.limits.workers[stage.name][1]
        counts = np.array(sorted({*(n for n in _GRID if n <= most), workers, most}))
        now = float(stage.curve(np.array([workers]), favour)[0])
        turns_s = held * self._turn_s(stage.name) if stage.backend != "process" else 0.0
        busy, cpu_s = stage.curve(counts, favour) + turns_s, stage.cpu_share * now
        cost = StageCost(
            name=stage.name,
            workers=counts,
            busy=busy,
            cpu=np.minimum(cpu_s, busy),
            item_bytes=stage.item_bytes,
            process_bytes=self.process_bytes(stage.name),
            backend=stage.backend,
        )
        if not self.limits.movable(stage.name, stage.backend):
            return cost
        other = "process" if stage.backend == "thread" else "thread"
        left = stage.on(other)
        over = math.sqrt(_OVERHEAD[0] * _OVERHEAD[1]) if other == "process" else 1.0
        busy = np.full(len(counts), now * over) if left is None else left.curve(counts)
        moved = replace(cost, backend=other, busy=busy, cpu=np.minimum(cpu_s * over, busy))
        return replace(cost, other=moved)
