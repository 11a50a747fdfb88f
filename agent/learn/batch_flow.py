"""Computes the rates of many simulated pipelines at once: `BatchTruth`, `BatchFlow`.

The model is that of `sluice.agent.simulator.physics`, with arrays of stage × pipeline in place of lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from sluice.agent.simulator.base import CHUNK_S
from sluice.agent.simulator.physics import UNBOUNDED, TrueCosts

_STAGE = dict.fromkeys(("rows_per_item", "cliff_factor", "burst_factor"), 1.0) | dict.fromkeys(
    (
        "cost_s",
        "bytes_per_row",
        "cpu",
        "lock",
        "memory_bound",
        "sigma",
        "kappa",
        "cliff_workers",
        "cap_rows_per_s",
        "credit_rows",
        "tail",
        "burst_every_s",
        "burst_s",
        "drift",
        "held_bytes",
        "worker_bytes",
        "process_bytes",
        "start_s",
        "process_start_s",
        "process_cost_s",
        "buffer_items",
    ),
    0.0,
)
"""The properties of a stage, and their values where there is no stage."""
_MACHINE = (
    "cores",
    "neighbour_cores",
    "neighbour_threads",
    "speed",
    "smt",
    "bandwidth",
    "convoy",
    "handover_s",
    "switch_cost",
    "memory_limit",
    "base_bytes",
    "memory_lag_s",
    "timer_noise",
)
_CONSUMER = ("batch_rows", "step_s", "cpu", "cores", "interference")
_ITERATIONS = 24  # at most, of the search for the factors; the next step continues it


class BatchTruth:
    """The true costs of some pipelines. A pipeline's last stage is in the last row. Rows before its first stage are
    empty."""

    def __init__(self, truths: Sequence[TrueCosts]) -> None:
        shape = max(len(truth.stages) for truth in truths), len(truths)
        self.stage = {name: np.full(shape, default) for name, default in _STAGE.items()}
        self.machine = {name: np.zeros(len(truths)) for name in _MACHINE}
        self.consumer = {name: np.zeros(len(truths)) for name in _CONSUMER}
        self.truths = list(truths)
        self.real = np.zeros(shape, bool)
        """Where there is a stage."""
        for b, truth in enumerate(truths):
            self.real[shape[0] - len(truth.stages) :, b] = True
            self.read(b, truth)
        self.first = self.real.argmax(axis=0), np.arange(len(truths))
        """Where each pipeline's first stage is."""

    def read(self, b: int, truth: TrueCosts) -> None:
        """Sets the true costs of a pipeline from now on."""
        self.truths[b] = truth
        columns = zip(*map(attrgetter(*_STAGE), truth.stages), strict=True)
        for name, values in zip(_STAGE, columns, strict=True):
            self.stage[name][len(self.real) - len(truth.stages) :, b] = values
        for part, numbers in ((truth.machine, self.machine), (truth.consumer, self.consumer)):
            for name, column in numbers.items():
                column[b] = getattr(part, name)


class _Factors(NamedTuple):
    """How many times slower each shared resource makes its users: cores, bandwidth, lock and second threads."""

    cores: ndarray
    memory: ndarray
    lock: ndarray
    smt: ndarray


class _Costs(NamedTuple):
    """The seconds of an item in each stage and of the consumer's step, before any slow-down by a shared resource."""

    cpu: ndarray
    memory: ndarray
    lock: ndarray
    waiting: ndarray
    handed: ndarray
    """Seconds to pass the item on to the next stage."""
    traffic: ndarray
    """Bytes that an item moves through memory."""
    crowd: ndarray
    """The factor on the cost while all workers are busy."""
    cap: ndarray
    """The most rows a second."""
    step_cpu: ndarray
    step_wait: ndarray


class BatchFlow:
    """The rates of the present step. The search for the next step's factors starts from the present ones."""

    def __init__(self, truth: BatchTruth) -> None:
        stages, count = truth.real.shape
        self._truth = truth
        self.rates = self.busy = np.zeros((stages + 1, count))
        """Rows a second of the stages and, last, of the consumers; the shares of their workers at work."""
        self.cpu_per_item, self.used_cores = np.zeros((stages, count)), np.zeros(count)
        self._factors = _Factors(*(np.ones(count) for _ in _Factors._fields))

    @property
    def slow(self) -> ndarray:
        """How many times slower a thread runs because others want the cores too."""
        return self._factors.cores

    def settle(
        self,
        *,
        workers: ndarray,
        process: ndarray,
        starting: ndarray,
        factors: ndarray,
        bursts: ndarray,
        credit_rows: ndarray,
        queue: ndarray,
        limits: ndarray,
    ) -> None:
        """Computes the rates for these workers, on threads or in processes.

        `starting` more workers are starting. `factors` multiply each stage's cost, and `bursts` its waiting. `queue`
        rows wait after each stage, of at most `limits`."""
        truth = self._truth
        machine, consumer = truth.machine, truth.consumer
        cores = np.maximum(0.05, machine["cores"] - machine["neighbour_cores"])
        overhead = np.minimum(starting, 0.5 * machine["cores"])
        n, rows = np.where(truth.real, np.maximum(workers, 1e-6), 1.0), truth.stage["rows_per_item"]
        costs = self._costs(n, cores, process, factors, bursts, credit_rows)
        arriving, space = queue / CHUNK_S, (limits - queue) / CHUNK_S
        stride, rising = np.full(cores.shape, 0.65), np.ones(cores.shape, bool)
        slow = self._factors
        item = used = costs.cpu
        rates = capacity = self.rates
        for _ in range(_ITERATIONS):
            alone = costs.cpu + costs.memory * slow.memory
            on_cpu = alone * costs.crowd * (slow.cores * slow.smt)
            wall = on_cpu + costs.lock * ((slow.lock - 1) * slow.cores) + costs.waiting
            capacity = self._capacity(costs, n * rows / wall, slow)
            rates = _limit_by_queues(capacity, arriving, space)
            active, per_s = n * rates[:-1] / capacity[:-1], rates[:-1] / rows
            crowd = 1 + truth.stage["kappa"] * np.maximum(0.0, active * (active - 1))
            item = alone * crowd
            used = (per_s * (item + costs.handed)).sum(axis=0) * slow.smt + (
                rates[-1] / consumer["batch_rows"] * costs.step_cpu * consumer["cores"] * slow.smt
            )
            runnable = (active * on_cpu / wall).sum(axis=0)
            ratio = used / self._available_cores(cores, overhead, runnable)
            stride = np.where(
                (ratio > 1) == rising, np.minimum(8.0, stride * 1.6), np.maximum(0.6, stride * 0.4)
            )
            rising = ratio > 1
            wanted = self._wanted(slow, costs, active, per_s, 2 * used / cores - 1)._replace(
                cores=np.maximum(1.0, slow.cores * np.maximum(ratio, 1e-9) ** stride)
            )
            off = sum(abs(new - old) for new, old in zip(wanted, slow, strict=True))
            settled = bool((off < 2e-3 * slow.cores).all())
            slow = wanted._replace(smt=slow.smt + 0.5 * (wanted.smt - slow.smt))
            if settled:
                break
        self._factors = slow
        self.rates, self.busy = rates, rates / capacity
        self.cpu_per_item = item * slow.smt
        self.used_cores = np.minimum(used, cores) + overhead

    def _costs(  # noqa: PLR0917
        self,
        n: ndarray,
        cores: ndarray,
        process: ndarray,
        factors: ndarray,
        bursts: ndarray,
        credit_rows: ndarray,
    ) -> _Costs:
        """Returns the costs with `n` workers in each stage."""
        truth = self._truth
        stage = truth.stage
        machine, consumer = truth.machine, truth.consumer
        beyond = (stage["cliff_workers"] > 0) & (n > stage["cliff_workers"])
        dearer = np.where(beyond, stage["cliff_factor"], 1.0) * factors
        cost = (stage["cost_s"] + process * stage["process_cost_s"]) * dearer
        computing = cost * stage["cpu"] / machine["speed"]
        waiting = (
            cost * (1 - stage["cpu"]) * bursts + stage["sigma"] * np.maximum(0.0, n - 1) * cost
        )
        handed = machine["handover_s"] / machine["speed"] * truth.real
        handed[truth.first] = 0.0
        wanting = consumer["cores"] * consumer["cpu"] + (n * stage["cpu"]).sum(axis=0)
        pressure = np.where(consumer["cpu"] > 0, np.maximum(0.0, wanting / cores - 1), 0.0)
        slowed = 1 + consumer["interference"] * pressure
        return _Costs(
            cpu=computing * (1 - stage["memory_bound"]),
            memory=computing * stage["memory_bound"],
            lock=np.where(process, 0.0, computing * stage["lock"]),
            waiting=np.where(truth.real, waiting, 1 / UNBOUNDED),
            handed=handed,
            traffic=stage["rows_per_item"] * stage["bytes_per_row"] * (stage["memory_bound"] > 0),
            crowd=1 + stage["kappa"] * n * (n - 1),
            cap=np.where(
                stage["cap_rows_per_s"] > 0,
                stage["cap_rows_per_s"] + credit_rows / CHUNK_S,
                UNBOUNDED,
            ),
            step_cpu=consumer["step_s"] * consumer["cpu"] / machine["speed"] * slowed,
            step_wait=consumer["step_s"] * (1 - consumer["cpu"]),
        )

    def _capacity(self, costs: _Costs, rates: ndarray, slow: _Factors) -> ndarray:
        """Returns the rows a second that the stages and, last, the consumers can do with enough input."""
        step = costs.step_wait + costs.step_cpu * (slow.cores * slow.smt)
        batch_rows = self._truth.consumer["batch_rows"]
        taken = np.where(step > 0, batch_rows / np.maximum(step, 1e-12), UNBOUNDED)
        return np.concatenate([np.minimum(rates, costs.cap), taken[None]])

    def _available_cores(self, cores: ndarray, overhead: ndarray, runnable: ndarray) -> ndarray:
        """Returns the cores for the pipelines' work, next to other programs and starting workers."""
        machine = self._truth.machine
        others = machine["neighbour_threads"]
        shared = np.where(
            others > 0,
            np.maximum(cores - others, cores * runnable / np.maximum(1e-12, runnable + others)),
            cores,
        )
        switching = machine["switch_cost"] * np.maximum(0.0, runnable / cores - 1)
        return np.asarray(np.maximum(0.02, shared - overhead) / (1 + switching))

    def _wanted(
        self,
        slow: _Factors,
        costs: _Costs,
        active: ndarray,
        per_s: ndarray,
        upper: ndarray,
    ) -> _Factors:
        """Returns the factors that bandwidth, lock and second threads need now. `upper` is the used share of the second
        threads."""
        machine = self._truth.machine
        moved = slow.memory * (per_s * costs.traffic).sum(axis=0)
        contenders = (active * (costs.lock > 0)).sum(axis=0)
        convoy = machine["convoy"] * np.minimum(np.maximum(0.0, contenders - 1), 8.0)
        locked = (per_s * costs.lock).sum(axis=0)
        upper = np.where(machine["smt"] < 1, np.clip(upper, 0.0, 1.0), 0.0)
        return slow._replace(
            memory=np.where(
                machine["bandwidth"] > 0,
                np.maximum(1.0, moved / np.maximum(1e-9, machine["bandwidth"])),
                1.0,
            ),
            lock=np.maximum(1.0, slow.lock * locked * (1 + convoy)),
            smt=1 + upper * (2 / (1 + machine["smt"]) - 1),
        )


def _limit_by_queues(capacity: ndarray, arriving: ndarray, space: ndarray) -> ndarray:
    """Returns the rates that the queues before and after each stage allow."""
    rates = capacity.copy()
    for i in range(1, len(rates)):
        np.minimum(rates[i], rates[i - 1] + arriving[i - 1], out=rates[i])
    for i in range(len(rates) - 2, -1, -1):
        np.minimum(rates[i], rates[i + 1] + space[i], out=rates[i])
    return np.asarray(np.maximum(rates, 0.0, out=rates))
