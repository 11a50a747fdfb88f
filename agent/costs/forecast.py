"""`Forecast`: predicts the rate and the memory of a setting from the known costs of the stages. Pure."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sluice.agent.costs.contention import Contention
from sluice.agent.costs.rates import PipelineRates
from sluice.agent.costs.stage_cost import StageCost
from sluice.agent.planner_settings import DEFAULT, PlannerSettings
from sluice.ingest.knobs import MAX_WORKERS, REMOTE, Knobs, Limits
from sluice.ingest.machine import WORKER_PROCESS_BYTES

_MIB = 2**20
Workers = Mapping[str, int]
Ranges = Mapping[str, tuple[int, int]]
"""Stage → its fewest and most workers."""
Choice = tuple[Knobs, float]
"""Knobs, and the predicted rows a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Everything that bounds the rate: stages, cores, the trainer and memory."""

    knobs: Knobs
    limits: Limits
    services: Mapping[str, StageCost]
    """The stages with known costs, fused ones as one. Other stages keep their workers."""
    each: Mapping[str, StageCost]
    """The same stages, but fused ones separately."""
    cores: float
    """All cores. The stages get `stage_cores`, because other programs use some too."""
    stage_cores: float
    other_cpu_s: float
    """Processor seconds a row that no stage accounts for: those of the trainer, on the same cores."""
    demand: float
    """Rows a second that the trainer would take if it never waited."""
    base_bytes: float
    """Memory that neither a worker nor a buffer accounts for: windows being shuffled, the trainer, libraries."""
    memory_limit: int
    processes: Workers
    """The workers on processes now, by stage."""
    free_bytes: float
    """Unused memory."""
    slow: float = 1.0
    """How many times slower a core is than a free one, as other programs use it too."""
    buffers: float = 1.0
    """The share of the buffers' wanted bytes that they get."""
    requests_a_core: float = 0.0
    """How many remote workers share a core. 0: remote workers have no price."""
    settings: PlannerSettings = DEFAULT

    @classmethod
    def of(
        cls,
        rates: PipelineRates,
        knobs: Knobs,
        limits: Limits,
        services: Mapping[str, StageCost],
        *,
        other_cpu_s: float,
        demand: float,
        requests_a_core: float = 0.0,
        settings: PlannerSettings = DEFAULT,
    ) -> Forecast:
        known = {name: service for name, service in services.items() if service.points}
        pressure = Contention.of(rates, settings)
        empty = cls(
            knobs=knobs,
            limits=limits,
            services=_joined(known, knobs, limits),
            each=known,
            demand=demand,
            base_bytes=0.0,
            memory_limit=rates.memory_limit,
            slow=pressure.slow,
            cores=rates.cpu_quota,
            processes={
                n: count for n, count in knobs.workers.items() if knobs.backend.get(n) == "process"
            },
            free_bytes=max(0.0, rates.memory_limit - rates.memory_used),
            stage_cores=pressure.cores,
            other_cpu_s=other_cpu_s,
            requests_a_core=requests_a_core,
            settings=settings,
        )
        # A worker at work holds an item; a process holds its libraries, at work or not.
        in_hand = sum(
            min(rates.stages[n].busy, knobs.workers[n]) * empty._item_bytes(n)
            + knobs.workers[n] * empty._process_bytes(n)
            for n in empty.services
            if n in rates.stages
        )
        queued = sum(stage.queue_bytes for stage in rates.stages.values())
        return replace(empty, base_bytes=max(0.0, rates.memory_used - in_hand - queued))

    def computing(self, name: str, rows_per_s: float) -> float:
        """The cores that a stage computes on at such a rate, as long as it has its present workers."""
        return rows_per_s * self.each[name].cpu_s(self.knobs.workers[name])

    def capacity(self, name: str, workers: int) -> float:
        """The rows a second that `workers` of a stage are expected to do on cores as they are now."""
        service = self.services[name]
        waited_s = (self.slow - 1) * service.cpu_s(workers) if self.slow > 1 else 0.0
        return workers / (service.busy_s(workers) + waited_s)

    @property
    def contended(self) -> bool:
        return self.slow >= self.settings.contended_ratio

    def cores_rate(self, workers: Workers) -> float:
        """The rows a second for which the cores are enough."""
        stages = sum(s.cpu_s(workers[n]) for n, s in self.services.items())
        return min(
            (
                cores / cpu_s
                for cores, cpu_s in (
                    (self.cores, self.other_cpu_s + stages),
                    (self.stage_cores, stages),
                )
                if cores > 0 and cpu_s > 0
            ),
            default=math.inf,
        )

    def rate(self, workers: Workers) -> float:
        """The rows a second that this many workers are expected to bring."""
        return self.rate_around("", workers)

    def rate_around(self, name: str, workers: Workers) -> float:
        """The same, if the stage of that name were never the narrowest; it takes its cores all the same."""
        return min(
            [
                self.cores_rate(workers),
                self.demand,
                *(self.capacity(n, workers[n]) for n in self.services if n != name),
            ]
        )

    @property
    def remote_stages(self) -> list[str]:
        """The stages whose workers hold cores of other hosts."""
        return [
            name
            for name in self.services
            if self.requests_a_core and self.knobs.backend.get(name) == REMOTE
        ]

    def remote_cores(self, workers: Workers) -> float:
        return sum(workers[name] for name in self.remote_stages) / (self.requests_a_core or 1)

    @property
    def core_rows_per_s(self) -> float:
        """The price of a remote core, in rows a second."""
        most = min(self.demand, self.cores_rate(self.knobs.workers))
        return self.settings.remote_core_price * (
            most if math.isfinite(most) else self.rate(self.knobs.workers)
        )

    def price(self, workers: Workers) -> float:
        """Returns the price of the remote cores of these workers, in rows a second."""
        held = self.remote_cores(workers)
        return held * self.core_rows_per_s if held else 0.0

    def bottleneck(self) -> str:
        """What bounds the rate now: a stage, `cores`, or `consumer`."""
        bounds = {
            "consumer": self.demand,
            "cores": self.cores_rate(self.knobs.workers),
            **{n: self.capacity(n, self.knobs.workers[n]) for n in self.services},
        }
        return min(bounds, key=lambda name: bounds[name])

    def memory(self, knobs: Knobs) -> float:
        """The bytes that these knobs may need at most."""
        held = sum(knobs.workers[n] * self._worker_bytes(n) for n in self.services)
        return self.base_bytes + held + knobs.read_ahead_bytes + knobs.prefetch_bytes

    def fits(self, knobs: Knobs) -> bool:
        """Whether the knobs leave the margin of memory that a choice has to leave."""
        return self.memory(knobs) <= self.settings.memory_target * self.memory_limit

    def best(self, ranges: Ranges, *, fewest: bool, tight: bool = False) -> Choice:
        """Finds the knobs of the highest rate within the `ranges` and memory, and that rate.

        A stage with enough workers keeps them, unless `fewest` is set. Buffers grow to what they need. They shrink to
        that only where memory is `tight`, or would become so, and below it where workers in their place bring more."""
        chosen = self._best(ranges, fewest=fewest, tight=tight)
        if sum(ranges[n][1] * self._worker_bytes(n) for n in self.services) > self._room:
            leaner = replace(self, buffers=self.settings.lean_buffer_share)._best(
                ranges, fewest=fewest, tight=tight
            )
            if leaner[1] >= self.settings.lean_gain_ratio * chosen[1]:
                chosen = leaner
        if not self.remote_stages:
            return chosen
        return max(
            [chosen, *self._cheaper(chosen, ranges, fewest=fewest, tight=tight)],
            key=lambda choice: choice[1] - self.price(choice[0].workers),
        )

    def _cheaper(
        self,
        chosen: Choice,
        ranges: Ranges,
        *,
        fewest: bool,
        tight: bool,
    ) -> Iterator[Choice]:
        """Yields the best knobs for fewer rows, because the last rows may need too many remote cores."""
        for name in self.remote_stages:
            least, most = ranges[name][0], chosen[0].workers[name]
            for count in range(least, most, max(1, (most - least) // self.settings.smaller_fleets)):
                aim = self.capacity(name, count) / self.settings.headroom
                if aim < chosen[1]:
                    yield replace(self, demand=aim)._best(ranges, fewest=fewest, tight=tight)

    def _best(self, ranges: Ranges, *, fewest: bool, tight: bool) -> Choice:
        requests = []
        for name, service in self.services.items():
            least, most = ranges[name]
            most = max(least, min(most, self._most_on_processes(name)))
            current = self.knobs.workers[name]
            if (
                not fewest
                and least < current <= most
                and self.capacity(name, current) >= self.capacity(name, least)
            ):
                least = current
            ahead = (
                self.buffers * self.settings.read_ahead_items * service.item_bytes
                if name == self._first
                else 0.0
            )
            capacity = functools.cache(self._with_headroom(name, most))  # asked for in each halving
            requests.append(
                StageRequest(
                    name=name,
                    least=least,
                    most=most,
                    capacity=capacity,
                    worker_bytes=self._worker_bytes(name) + ahead,
                )
            )
        allocation = self._allocate(requests, self._room)
        if (
            not fewest
            and any(request.least > ranges[request.name][0] for request in requests)
            and allocation.rows_per_s < self.rate(self.knobs.workers)
        ):
            return self._best(
                ranges, fewest=True, tight=tight
            )  # keeping what is there leaves no room for better
        workers = {**self.knobs.workers, **allocation.workers}
        needed = self._buffers(workers)
        knobs = replace(
            self.knobs,
            workers=workers,
            read_ahead_bytes=max(needed["read_ahead_bytes"], self.knobs.read_ahead_bytes),
            prefetch_bytes=max(needed["prefetch_bytes"], self.knobs.prefetch_bytes),
        )
        if tight or not self.fits(knobs):
            knobs = replace(
                knobs,
                read_ahead_bytes=needed["read_ahead_bytes"],
                prefetch_bytes=needed["prefetch_bytes"],
            )
        return knobs, allocation.rows_per_s

    def switched(self, name: str, freed: Callable[[StageCost], StageCost]) -> Forecast:
        """The forecast if a stage ran on its other back end, by itself, and `freed` changed those left on threads."""
        service = self.each[name]
        other = next(b for b in self.limits.backends_of(name) if b != service.backend)
        left = {
            n: freed(s) for n, s in self.each.items() if service.backend == s.backend == "thread"
        }
        knobs = replace(
            self.knobs,
            backend={**self.knobs.backend, name: other},
            fused=frozenset(n for n in self.knobs.fused if name not in (n, self.limits.fusable[n])),
        )
        return self._as(knobs, {**self.each, **left, name: service.on(other)})

    def fused(self, name: str) -> Forecast:
        """The forecast if the workers of the stage before did a stage's work: each item is handed over once less."""
        rows = self.each[name].item_rows
        saved_s = min(self.other_cpu_s, self.settings.handover_s / rows) if rows else 0.0
        saved = saved_s * self.rate(
            self.knobs.workers
        )  # in cores; until now they counted as taken by others
        forecast = self._as(replace(self.knobs, fused=self.knobs.fused | {name}), self.each)
        return replace(
            forecast,
            other_cpu_s=self.other_cpu_s - saved_s,
            stage_cores=min(self.cores, self.stage_cores + saved),
        )

    def split(self, name: str) -> Forecast:
        """The forecast if a fused stage had workers of its own."""
        return self._as(replace(self.knobs, fused=self.knobs.fused - {name}), self.each)

    def _as(self, knobs: Knobs, each: Mapping[str, StageCost]) -> Forecast:
        return replace(self, knobs=knobs, each=each, services=_joined(each, knobs, self.limits))

    def _with_headroom(self, name: str, most: int) -> Callable[[int], float]:
        """A stage's capacity less some headroom, except at the most workers that it may have: there is no more to
        get."""
        return lambda n: self.capacity(name, n) / (self.settings.headroom if n < most else 1.0)

    def _allocate(self, requests: list[StageRequest], room: float) -> Allocation:
        """Allocates workers. Where more workers make a row dearer, the cores are enough for fewer rows, so aiming a
        little lower than the highest rate may bring more."""
        fewest = {**self.knobs.workers, **{r.name: r.least for r in requests}}
        enough = min(self.demand, max(self.cores_rate(self.knobs.workers), self.cores_rate(fewest)))
        allocations = []
        low = 0.0
        high = 1.0
        share = 1.0
        for _ in range(self.settings.halvings):
            allocation = allocate(requests, enough=share * enough, memory=room)
            cores_rate = self.cores_rate({**self.knobs.workers, **allocation.workers})
            allocations.append(
                replace(allocation, rows_per_s=min(allocation.rows_per_s, cores_rate))
            )
            if cores_rate >= allocation.rows_per_s:  # the cores are not what limits it
                low = share
            else:
                high = share
            if low >= high:
                break
            share = (
                (low + high) / 2
                if low
                else max(share * self.settings.step_down, cores_rate / enough)
            )
        return max(allocations, key=lambda a: a.rows_per_s)

    @property
    def alone(self) -> Forecast:
        """The forecast if the stages kept the cores that they get now, however few of their threads want them."""
        return replace(self, slow=1.0)

    @property
    def _room(self) -> float:
        """The bytes that are left for workers and for what readers have finished."""
        room = self.settings.memory_target * self.memory_limit - self.base_bytes
        return room - self._buffers(self.knobs.workers)["prefetch_bytes"]

    @property
    def _first(self) -> str:
        return next(iter(self.limits.workers))

    def _item_bytes(self, name: str) -> float:
        return self.settings.held_item_ratio * self.services[name].item_bytes

    def _process_bytes(self, name: str) -> float:
        """The bytes of a worker's processes: one for each stage whose work it does. If a process was not measured yet,
        this is a lower bound, and the planner starts no second one."""
        return (
            sum(
                service.process_bytes or WORKER_PROCESS_BYTES
                for n, service in self.each.items()
                if self.limits.head(self.knobs, n) == name
            )
            if self.knobs.backend.get(name) == "process"
            else 0.0
        )

    def _most_on_processes(self, name: str) -> int:
        """The most workers that a stage may have at once, if they are processes: new ones of all stages take no more
        than their share of the memory that is free."""
        each = self._process_bytes(name)
        if not each:
            return MAX_WORKERS
        share = self.settings.process_share / sum(
            self.knobs.backend.get(n) == "process" for n in self.services
        )
        return self.processes.get(name, 0) + max(1, int(share * self.free_bytes / each))

    def _worker_bytes(self, name: str) -> float:
        return self._item_bytes(name) + self._process_bytes(name)

    def _buffers(self, workers: Workers) -> dict[str, int]:
        """The bytes that the two buffers need, in whole MiB and within their limits."""

        def item_bytes(name: str) -> float:
            return self.services[name].item_bytes if name in self.services else 0.0

        last = list(self.limits.workers)[-1]
        items = {
            "read_ahead_bytes": self.settings.read_ahead_items
            * workers[self._first]
            * item_bytes(self._first),
            "prefetch_bytes": self.settings.prefetch_batches * item_bytes(last),
        }
        most, sizes = self.settings.buffer_share * self.memory_limit, {}
        for name, bytes_ in items.items():
            low, high = getattr(self.limits, name)
            sizes[name] = min(
                max(_MIB * math.ceil(min(self.buffers * bytes_, most) / _MIB), low), high
            )
        return sizes


def _joined(each: Mapping[str, StageCost], knobs: Knobs, limits: Limits) -> Mapping[str, StageCost]:
    """Joins fused stages into one, with the work of all of them that are known."""
    joined = {name: service for name, service in each.items() if name not in knobs.fused}
    for name in each.keys() - joined.keys():
        head = limits.head(knobs, name)
        if head in joined:
            joined[head] = joined[head].joined(each[name])
    return joined


def what_if(forecast: Forecast) -> dict[str, Any]:
    """The rows a second now, and those expected with half or twice the cores, twice the memory, or no trainer that
    limits them.

    A case is left out where its effect is unknown (no limit on cores, nothing known of the demand)."""
    ranges = forecast.limits.workers

    def best(case: Forecast) -> tuple[float, dict[str, int]]:
        knobs, rate = case.best({name: ranges[name] for name in case.services}, fewest=True)
        return min(rate, case.demand), dict(knobs.workers)

    cases = {
        "as it is": forecast,
        "twice the memory": replace(forecast, memory_limit=2 * forecast.memory_limit),
    }
    if forecast.cores > 0:
        cases |= {
            f"{name} the cores": replace(
                forecast, cores=factor * forecast.cores, stage_cores=factor * forecast.stage_cores
            )
            for name, factor in (("half", 0.5), ("twice", 2.0))
        }
    if math.isfinite(forecast.demand):
        cases["a trainer that only takes"] = replace(forecast, demand=math.inf)
    rates_of_cases = {}
    for name, case in cases.items():
        rate, workers = best(case)
        if math.isfinite(rate):
            rates_of_cases[name] = {"rows_per_s": rate, "workers": workers}
    return rates_of_cases


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """One stage: how many workers it may have, how fast they are, and how many bytes they hold."""

    name: str
    least: int
    most: int
    capacity: Callable[[int], float]
    """Number of workers → rows a second. The curve need not rise all the way."""
    worker_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    workers: Workers
    rows_per_s: float
    """The rate of the slowest stage, at most `enough`."""


def allocate(
    requests: Sequence[StageRequest], *, enough: float = math.inf, memory: float = math.inf
) -> Allocation:
    """Finds the highest rate up to `enough` whose workers fit in `memory`, with the fewest workers for it.

    A rate needs of each stage the smallest number of workers that reaches it, so what fits at a rate fits at each
    lower one: a search over the rates that occur finds the best. If not even the lowest fits, each gets its least."""
    curves = {r.name: [r.capacity(n) for n in range(r.least, r.most + 1)] for r in requests}
    peaks = [max(curve) for curve in curves.values()]
    top = min([enough, *peaks])
    rates = sorted({rate for curve in curves.values() for rate in curve if rate < top} | {top})

    def workers_for(rate: float) -> dict[str, int]:
        return {
            r.name: r.least + next(i for i, c in enumerate(curves[r.name]) if c >= rate)
            for r in requests
        }

    def too_large(rate: float) -> bool:
        needed = workers_for(rate)
        return sum(needed[r.name] * r.worker_bytes for r in requests) > memory

    fitting = bisect.bisect_left(rates, True, key=too_large)
    workers = workers_for(rates[fitting - 1]) if fitting else {r.name: r.least for r in requests}
    slowest = min(curves[r.name][workers[r.name] - r.least] for r in requests)
    return Allocation(workers=workers, rows_per_s=min(slowest, enough))
