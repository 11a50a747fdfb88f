"""Predicts the rate and the memory of a setting from the measured costs of the stages: `Forecast`.

All functions are pure. `allocate` is the search behind it: it divides workers among stages.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy import ndarray

from sluice.agent.costs.contention import Contention
from sluice.agent.costs.rates import PipelineRates
from sluice.agent.costs.stage_cost import StageCost
from sluice.ingest.knobs import MAX_WORKERS, REMOTE, Knobs, Limits
from sluice.ingest.machine import WORKER_PROCESS_BYTES

_MIB = 2**20
REMOTE_CORE_PRICE = 0.01
"""A remote core must bring this share of the rows that the trainer would take. A trainer with a GPU costs about as much
as a hundred cores."""
MEMORY_ALARM = 0.95
"""Memory is given back at once when a larger share of the memory limit is in use."""
_FULL = 0.9  # of the memory limit: a setting may fill this share
_HEADROOM = 1.05  # planned over needed capacity, because averages hide unevenness
_HELD_ITEM = 1.5  # times an item's bytes that a worker holds: its output, and a part of its input
_PREFETCH_BATCHES = 4.0  # that may wait for the trainer
_BUFFER_SHARE = 0.25  # of the memory limit that one buffer may take
_BURST_BYTES = 64 * _MIB  # at most, for what a store answers at once
_HALF = 0.5  # of the free memory for new processes, and of the wanted buffers where memory is short
_SEARCH_STEPS = 6  # halvings of a search, and smaller sets of remote workers that are considered
_STEP_DOWN = 0.75  # the factor of each step down before that search has a lower end
Workers = Mapping[str, int]
Ranges = Mapping[str, tuple[int, int]]
"""Stage → (its fewest workers, its most workers)."""
Choice = tuple[Knobs, float]
"""(knobs, predicted rows a second)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Everything that bounds the rate of a pipeline: its stages, the cores, the trainer and memory.

    A forecast holds for the back ends of `knobs`. Only the numbers of workers are arguments of its methods. `switched`
    returns the forecast for another back end."""

    knobs: Knobs
    limits: Limits
    costs: Mapping[str, StageCost]
    """Stage → its cost, for the stages with measured costs. A stage that is not here keeps its workers."""
    cores: float
    """All cores that this process may use. The stages get `stage_cores`, because other programs use some too."""
    stage_cores: float
    other_cpu_s: float
    """Processor seconds a row outside the stages. Mostly the trainer spends them, on the same cores."""
    demand: float
    """Rows a second that the trainer would take if it never waited."""
    base_bytes: float
    """Memory that belongs to no worker and no buffer: batches being filled, the trainer, libraries."""
    memory_limit: int
    admitted_bytes: int
    """Memory in use, and what the governor still admits. It holds back the work of a setting that needs more."""
    processes: Workers
    """Stage → its present workers, for the stages on processes."""
    free_bytes: float
    """Unused memory."""
    slow: float = 1.0
    """How many times longer a computation takes than on a free core, because other programs use the cores too."""
    buffers: float = 1.0
    """The share of their wanted bytes that the buffers get."""
    requests_a_core: float = 0.0
    """How many remote workers share a core. 0: remote workers have no price."""

    @classmethod
    def of(
        cls,
        rates: PipelineRates,
        knobs: Knobs,
        limits: Limits,
        costs: Mapping[str, StageCost],
        *,
        contention: Contention,
        other_cpu_s: float,
        demand: float,
        requests_a_core: float = 0.0,
    ) -> Forecast:
        """Returns the forecast for the back ends of `knobs`. `rates` are the latest ones, at these knobs."""
        without_base = cls(
            knobs=knobs,
            limits=limits,
            costs=costs,
            demand=demand,
            base_bytes=0.0,
            memory_limit=rates.memory_limit,
            admitted_bytes=rates.memory_used + rates.memory_free,
            slow=contention.slow,
            cores=rates.cpu_quota,
            processes={
                n: count for n, count in knobs.workers.items() if knobs.backend.get(n) == "process"
            },
            free_bytes=max(0.0, min(rates.memory_limit - rates.memory_used, rates.memory_free)),
            stage_cores=contention.cores,
            other_cpu_s=other_cpu_s,
            requests_a_core=requests_a_core,
        )
        # Only a busy worker holds an item. A process holds its libraries even when it is idle.
        held_by_workers = sum(
            min(rates.stages[n].busy, knobs.workers[n]) * without_base._item_bytes(n)
            + knobs.workers[n] * without_base._process_bytes(n)
            for n in without_base.costs
            if n in rates.stages
        )
        queued = sum(stage.queue_bytes for stage in rates.stages.values())
        return replace(
            without_base, base_bytes=max(0.0, rates.memory_used - held_by_workers - queued)
        )

    def capacity(self, name: str, workers: int) -> float:
        """Returns the rows a second that `workers` of a stage are expected to do if the cores stay as loaded as now."""
        cost = self.costs[name]
        waited_s = (self.slow - 1) * cost.cpu_s(workers) if self.slow > 1 else 0.0
        return workers / (cost.busy_s(workers) + waited_s)

    def cores_rate(self, workers: Workers) -> float:
        """Returns the most rows a second that the cores allow with these workers."""
        stages = sum(s.cpu_s(workers[n]) for n, s in self.costs.items())
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
        """Returns the rows a second that the pipeline is expected to reach with these workers."""
        return min(
            [
                self.cores_rate(workers),
                self.demand,
                *(self.capacity(n, workers[n]) for n in self.costs),
            ]
        )

    @property
    def remote_stages(self) -> list[str]:
        """The stages whose workers use cores of other hosts that have a price."""
        return [
            name
            for name in self.costs
            if self.requests_a_core and self.knobs.backend.get(name) == REMOTE
        ]

    def price(self, workers: Workers) -> float:
        """Returns the price of the cores of other hosts that these workers use, in rows a second.

        The price of a core is a share of the rate that the trainer and the cores allow."""
        cores = sum(workers[name] for name in self.remote_stages) / (self.requests_a_core or 1)
        if not cores:
            return 0.0
        now = self.knobs.workers
        most = min(self.demand, self.cores_rate(now))
        return cores * (REMOTE_CORE_PRICE * (most if math.isfinite(most) else self.rate(now)))

    def memory(self, knobs: Knobs) -> float:
        """Returns the bytes that the process needs at most with these knobs."""
        held = sum(knobs.workers[n] * self._worker_bytes(n) for n in self.costs)
        return self.base_bytes + held + knobs.read_ahead_bytes + knobs.prefetch_bytes

    @property
    def most_bytes(self) -> float:
        """The bytes that a setting may need."""
        return min(_FULL * self.memory_limit, self.admitted_bytes)

    def fits(self, knobs: Knobs) -> bool:
        """Returns whether the knobs leave the margin of memory that every choice must leave."""
        return self.memory(knobs) <= self.most_bytes

    def best(self, ranges: Ranges, *, fewest: bool, tight: bool = False) -> Choice:
        """Returns the knobs with the highest rate within the `ranges` and the memory, and that rate.

        A stage with more workers than it needs keeps them, unless `fewest` is set. Buffers grow to the size that they
        need. They shrink to that size only if memory is `tight`, or would become so. They shrink below it only if the
        memory brings more rows in workers. Remote workers must bring more rows than their price."""
        chosen = self._find_best(ranges, fewest=fewest, tight=tight)
        if sum(ranges[n][1] * self._worker_bytes(n) for n in self.costs) > self._worker_memory:
            leaner = replace(self, buffers=_HALF)._find_best(ranges, fewest=fewest, tight=tight)
            if leaner[1] >= _HEADROOM * chosen[1]:
                chosen = leaner
        return max(
            [chosen, *self._find_cheaper(chosen, ranges, fewest=fewest, tight=tight)],
            key=lambda choice: choice[1] - self.price(choice[0].workers),
        )

    def _find_cheaper(
        self,
        chosen: Choice,
        ranges: Ranges,
        *,
        fewest: bool,
        tight: bool,
    ) -> Iterator[Choice]:
        """Yields the best choices for lower rates. The last few rows may need more remote cores than they are worth."""
        for name in self.remote_stages:
            least = ranges[name][0]
            most = chosen[0].workers[name]
            for count in range(least, most, max(1, (most - least) // _SEARCH_STEPS)):
                lower_rate = self.capacity(name, count) / _HEADROOM
                if lower_rate < chosen[1]:
                    yield replace(self, demand=lower_rate)._find_best(
                        ranges, fewest=fewest, tight=tight
                    )

    def _find_best(self, ranges: Ranges, *, fewest: bool, tight: bool) -> Choice:
        """Returns the choice for `best` without regard to the price of remote cores and with one size of buffers."""
        requests = []
        for name, cost in self.costs.items():
            least, most = ranges[name]
            most = max(least, min(most, self._most_on_processes(name)))
            current = self.knobs.workers[name]
            if (
                not fewest
                and least < current <= most
                and self.capacity(name, current) >= self.capacity(name, least)
            ):
                least = current  # The stage keeps its workers, because a change has a cost.
            read_ahead_bytes = (
                self.buffers * cost.item_bytes if name == self.limits.decoding else 0.0
            )
            requests.append(
                StageRequest(
                    name=name,
                    least=least,
                    capacities=self._capacities_with_headroom(name, least, most),
                    worker_bytes=self._worker_bytes(name) + read_ahead_bytes,
                )
            )
        allocation = self._allocate(requests, self._worker_memory)
        if (
            not fewest
            and any(request.least > ranges[request.name][0] for request in requests)
            and allocation.rows_per_s < self.rate(self.knobs.workers)
        ):
            # The workers that the stages keep leave no memory for a better choice.
            return self._find_best(ranges, fewest=True, tight=tight)
        knobs = self.with_buffers({**self.knobs.workers, **allocation.workers}, tight=tight)
        return knobs, allocation.rows_per_s

    def with_buffers(self, workers: Workers, *, tight: bool = False) -> Knobs:
        """Returns knobs with these workers and the buffers that they need. Larger buffers stay if they fit."""
        needed: dict[str, Any] = self._buffers(workers)
        kept: dict[str, Any] = {n: max(size, getattr(self.knobs, n)) for n, size in needed.items()}
        knobs = replace(self.knobs, workers=workers, **kept)
        return replace(knobs, **needed) if tight or not self.fits(knobs) else knobs

    def switched(self, name: str) -> Forecast:
        """Returns the forecast for a stage on its other back end."""
        other = self.costs[name].other
        assert other is not None, f"{name} has one back end"
        return replace(
            self,
            knobs=replace(self.knobs, backend={**self.knobs.backend, name: other.backend}),
            costs={**self.costs, name: other},
        )

    def _capacities_with_headroom(self, name: str, least: int, most: int) -> ndarray:
        """Returns a stage's capacities from `least` to `most` workers, less some headroom.

        There is no headroom at `most` workers, because the stage cannot get more."""
        workers = np.arange(least, most + 1)
        busy, cpu = self.costs[name].curves(workers)
        capacities = workers / (busy + (self.slow - 1) * cpu if self.slow > 1 else busy)
        capacities[:-1] /= _HEADROOM
        return np.asarray(capacities)

    def _allocate(self, requests: list[StageRequest], memory: float) -> Allocation:
        """Returns the best allocation of workers within `memory` and the cores.

        More workers can make a row dearer, and then the cores allow fewer rows. So a lower target can bring a higher
        rate. A search by halves finds the best target, as a share of the highest rate."""
        fewest = {**self.knobs.workers, **{r.name: r.least for r in requests}}
        enough = min(self.demand, max(self.cores_rate(self.knobs.workers), self.cores_rate(fewest)))
        allocations = []
        low = 0.0
        high = 1.0
        share = 1.0
        for _ in range(_SEARCH_STEPS):
            allocation = allocate(requests, enough=share * enough, memory=memory)
            cores_rate = self.cores_rate({**self.knobs.workers, **allocation.workers})
            allocations.append(
                replace(allocation, rows_per_s=min(allocation.rows_per_s, cores_rate))
            )
            if cores_rate >= allocation.rows_per_s:  # The cores do not limit this allocation.
                low = share
            else:
                high = share
            if low >= high:
                break
            share = (low + high) / 2 if low else max(share * _STEP_DOWN, cores_rate / enough)
        return max(allocations, key=lambda a: a.rows_per_s)

    @property
    def _worker_memory(self) -> float:
        """The bytes that workers and the items read ahead may use."""
        prefetch_bytes = self._buffers(self.knobs.workers)["prefetch_bytes"]
        return self.most_bytes - self.base_bytes - prefetch_bytes

    def _item_bytes(self, name: str) -> float:
        """Returns the bytes that a busy worker holds."""
        return _HELD_ITEM * self.costs[name].item_bytes

    def _process_bytes(self, name: str) -> float:
        """Returns the bytes of a worker's process.

        The value is a lower bound while a process has not been measured. The pipeline then starts others only in
        memory that is free for them."""
        if self.knobs.backend.get(name) != "process":
            return 0.0
        return self.costs[name].process_bytes or WORKER_PROCESS_BYTES

    def _most_on_processes(self, name: str) -> int:
        """Returns the most workers that a stage may have after one change, if its workers are processes.

        The new processes of all stages together take no more than a share of the free memory."""
        process_bytes = self._process_bytes(name)
        if not process_bytes:
            return MAX_WORKERS
        share = _HALF / sum(self.knobs.backend.get(n) == "process" for n in self.costs)
        return self.processes.get(name, 0) + max(1, int(share * self.free_bytes / process_bytes))

    def _worker_bytes(self, name: str) -> float:
        """Returns the bytes of one more worker."""
        return self._item_bytes(name) + self._process_bytes(name)

    def _buffers(self, workers: Workers) -> dict[str, int]:
        """Returns the bytes that each buffer needs, in whole MiB and within its limits.

        What a store is asked for at once may come at once. Then it should not wait in the place of later requests."""

        def item_bytes(name: str) -> float:
            return self.costs[name].item_bytes if name in self.costs else 0.0

        decoding, last = self.limits.decoding, list(self.limits.workers)[-1]
        burst = min(workers[self.limits.asking] * item_bytes(decoding), _BURST_BYTES)
        items = {
            "read_ahead_bytes": max(workers[decoding] * item_bytes(decoding), burst),
            "prefetch_bytes": _PREFETCH_BATCHES * item_bytes(last),
        }
        most = _BUFFER_SHARE * self.memory_limit
        sizes = {}
        for name, bytes_ in items.items():
            low, high = getattr(self.limits, name)
            sizes[name] = min(
                max(_MIB * math.ceil(min(self.buffers * bytes_, most) / _MIB), low), high
            )
        return sizes


def what_if(forecast: Forecast) -> dict[str, Any]:
    """Returns the expected rows a second and workers for each of these cases, by its name.

    The cases are: the machine as it is, half or twice the cores, twice the memory, and a trainer that never limits the
    rate and uses no core. A case whose effect is unknown is left out, for example because the demand is unknown. If the
    cost of a stage is unknown, there are no cases."""
    if forecast.limits.workers.keys() - forecast.costs.keys():
        return {}
    cases = {
        "as it is": forecast,
        "twice the memory": replace(
            forecast,
            memory_limit=2 * forecast.memory_limit,
            admitted_bytes=forecast.admitted_bytes + forecast.memory_limit,
        ),
    }
    if forecast.cores > 0:
        cases |= {
            f"{name} the cores": replace(
                forecast, cores=factor * forecast.cores, stage_cores=factor * forecast.stage_cores
            )
            for name, factor in (("half", 0.5), ("twice", 2.0))
        }
    if math.isfinite(forecast.demand):
        cases["a trainer that only takes"] = replace(forecast, demand=math.inf, other_cpu_s=0.0)
    rates_of_cases = {}
    for name, case in cases.items():
        ranges = {stage: forecast.limits.workers[stage] for stage in case.costs}
        knobs, best = case.best(ranges, fewest=True)
        rate = min(best, case.demand)
        if math.isfinite(rate):
            rates_of_cases[name] = {"rows_per_s": rate, "workers": dict(knobs.workers)}
    return rates_of_cases


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """A stage as `allocate` sees it: how many workers it may have, how fast they are, and the bytes of each."""

    name: str
    least: int
    capacities: ndarray
    """The rows a second of `least` workers, of one more, and so on. More workers may bring fewer rows."""
    worker_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The result of `allocate`."""

    workers: Workers
    rows_per_s: float
    """The rate of the slowest stage, but at most `enough`."""


def allocate(
    requests: Sequence[StageRequest], *, enough: float = math.inf, memory: float = math.inf
) -> Allocation:
    """Returns the fewest workers for the highest rate, up to `enough`, whose workers fit in `memory`.

    For a rate, each stage gets the smallest number of workers that reaches it. A lower rate never needs more memory.
    So a binary search over the rates that occur finds the best one. If no rate fits, each stage gets its fewest
    workers."""
    # The first number of workers that reaches a rate is the first one whose best capacity so far does.
    rising = {r.name: np.maximum.accumulate(r.capacities) for r in requests}
    top = min([enough, *(float(curve[-1]) for curve in rising.values())])
    every = np.concatenate([r.capacities for r in requests])
    rates = np.append(np.unique(every[every < top]), top)

    def workers_for(rate: float) -> dict[str, int]:
        return {r.name: r.least + int(np.searchsorted(rising[r.name], rate)) for r in requests}

    def too_large(rate: float) -> bool:
        needed = workers_for(rate)
        return sum(needed[r.name] * r.worker_bytes for r in requests) > memory

    fitting = bisect.bisect_left(rates, True, key=too_large)
    workers = workers_for(rates[fitting - 1]) if fitting else {r.name: r.least for r in requests}
    slowest = min(float(r.capacities[workers[r.name] - r.least]) for r in requests)
    return Allocation(workers=workers, rows_per_s=min(slowest, enough))
