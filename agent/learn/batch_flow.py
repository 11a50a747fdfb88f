"""The rates at which rows flow through many simulated pipelines at once: `BatchTruth`, `BatchFlow`.

The laws are those of `sluice.agent.simulator.physics`, for arrays of stage × pipeline instead of one pipeline's lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from sluice.agent.simulator.base import CHUNK_S
from sluice.agent.simulator.physics import UNBOUNDED, TrueCosts

_STAGE = {
    "cost_s": 0.0,
    "rows_per_item": 1.0,
    "bytes_per_row": 0.0,
    "cpu": 0.0,
    "lock": 0.0,
    "memory_bound": 0.0,
    "sigma": 0.0,
    "kappa": 0.0,
    "cliff_workers": 0.0,
    "cliff_factor": 1.0,
    "cap_rows_per_s": 0.0,
    "credit_rows": 0.0,
    "tail": 0.0,
    "burst_factor": 1.0,
    "burst_every_s": 0.0,
    "burst_s": 0.0,
    "drift": 0.0,
    "held_bytes": 0.0,
    "worker_bytes": 0.0,
    "process_bytes": 0.0,
    "start_s": 0.0,
    "process_start_s": 0.0,
    "process_cost_s": 0.0,
    "buffer_items": 0.0,
}
"""What is read of each stage, and the value where there is none."""
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
_ITERATIONS = 24  # of the search for the factors; what has not settled goes on in the next step


class BatchTruth:
    """How some pipelines truly are. A pipeline's last stage is in the last row; rows before its first one belong to no
    stage."""

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
        """Takes over how a pipeline is from now on."""
        self.truths[b] = truth
        columns = zip(*map(attrgetter(*_STAGE), truth.stages), strict=True)
        for name, values in zip(_STAGE, columns, strict=True):
            self.stage[name][len(self.real) - len(truth.stages) :, b] = values
        for part, numbers in ((truth.machine, self.machine), (truth.consumer, self.consumer)):
            for name, column in numbers.items():
                column[b] = getattr(part, name)


class BatchFlow:
    """The rates of the present step, and the factors by which the next one's search begins."""

    def __init__(self, truth: BatchTruth) -> None:
        stages, count = truth.real.shape
        self._truth = truth
        self.rates = self.busy = np.zeros((stages + 1, count))
        """Rows a second of the stages and, last, of the consumers; the shares of their workers at work."""
        self.cpu_per_item, self.used_cores = np.zeros((stages, count)), np.zeros(count)
        self.slow, self._slow_memory, self._slow_lock, self._smt = (
            np.ones(count) for _ in range(4)
        )
        """`slow`: how many times slower than alone a thread is, as others want the cores as well."""

    def settle(
        self,
        *,
        workers: np.ndarray,
        process: np.ndarray,
        starting: np.ndarray,
        factors: np.ndarray,
        bursts: np.ndarray,
        credit_rows: np.ndarray,
        queue: np.ndarray,
        limits: np.ndarray,
    ) -> None:
        """Works the rates out for so many workers at work, on threads or in processes, while so many more are
        `starting`. `factors` are those on each stage's cost, `bursts` those on its waiting; `queue` rows wait behind
        each stage, of `limits` that may."""
        truth = self._truth
        stage = truth.stage
        machine = truth.machine
        consumer = truth.consumer
        cores = np.maximum(0.05, machine["cores"] - machine["neighbour_cores"])
        overhead = np.minimum(starting, 0.5 * machine["cores"])
        n, rows = np.where(truth.real, np.maximum(workers, 1e-6), 1.0), stage["rows_per_item"]
        beyond = (stage["cliff_workers"] > 0) & (n > stage["cliff_workers"])
        dearer = np.where(beyond, stage["cliff_factor"], 1.0) * factors
        cost = (stage["cost_s"] + process * stage["process_cost_s"]) * dearer
        computing = cost * stage["cpu"] / machine["speed"]
        cpu, memory = computing * (1 - stage["memory_bound"]), computing * stage["memory_bound"]
        lock = np.where(process, 0.0, computing * stage["lock"])
        waiting = (
            cost * (1 - stage["cpu"]) * bursts + stage["sigma"] * np.maximum(0.0, n - 1) * cost
        )
        waiting = np.where(truth.real, waiting, 1 / UNBOUNDED)
        crowd, locks = 1 + stage["kappa"] * n * (n - 1), lock > 0
        cap = np.where(
            stage["cap_rows_per_s"] > 0, stage["cap_rows_per_s"] + credit_rows / CHUNK_S, UNBOUNDED
        )
        handed = machine["handover_s"] / machine["speed"] * truth.real
        handed[truth.first] = 0.0
        traffic = rows * stage["bytes_per_row"] * (stage["memory_bound"] > 0)
        pressure = np.where(
            consumer["cpu"] > 0,
            np.maximum(
                0.0,
                (consumer["cores"] * consumer["cpu"] + (n * stage["cpu"]).sum(axis=0)) / cores - 1,
            ),
            0.0,
        )
        step_cpu = (
            consumer["step_s"]
            * consumer["cpu"]
            / machine["speed"]
            * (1 + consumer["interference"] * pressure)
        )
        step_wait = consumer["step_s"] * (1 - consumer["cpu"])
        waits_before, room_behind = queue / CHUNK_S, (limits - queue) / CHUNK_S
        others = machine["neighbour_threads"]
        last, count = n.shape
        capacity = np.empty((last + 1, count))
        rates = np.empty_like(capacity)
        stride, rising = np.full(count, 0.65), np.ones(count, bool)
        slow = self.slow
        slow_memory = self._slow_memory
        slow_lock = self._slow_lock
        smt = self._smt
        item = used = cpu
        for _ in range(_ITERATIONS):
            on_core = slow * smt
            alone = cpu + memory * slow_memory
            on_cpu = alone * crowd * on_core
            wall = on_cpu + lock * ((slow_lock - 1) * slow) + waiting
            capacity[:last] = np.minimum(n * rows / wall, cap)
            step = step_wait + step_cpu * on_core
            capacity[last] = np.where(
                step > 0, consumer["batch_rows"] / np.maximum(step, 1e-12), UNBOUNDED
            )
            rates[:] = capacity
            for i in range(1, last + 1):
                np.minimum(rates[i], rates[i - 1] + waits_before[i - 1], out=rates[i])
            for i in range(last - 1, -1, -1):
                np.minimum(rates[i], rates[i + 1] + room_behind[i], out=rates[i])
            np.maximum(rates, 0.0, out=rates)
            active, per_s = n * rates[:last] / capacity[:last], rates[:last] / rows
            item = alone * (1 + stage["kappa"] * np.maximum(0.0, active * (active - 1)))
            used = (per_s * (item + handed)).sum(axis=0) * smt + (
                rates[last] / consumer["batch_rows"] * step_cpu * consumer["cores"] * smt
            )
            runnable = (active * on_cpu / wall).sum(axis=0)
            locked, contenders = (per_s * lock).sum(axis=0), (active * locks).sum(axis=0)
            shared = np.where(
                others > 0,
                np.maximum(cores - others, cores * runnable / np.maximum(1e-12, runnable + others)),
                cores,
            )
            switching = machine["switch_cost"] * np.maximum(0.0, runnable / cores - 1)
            available = np.maximum(0.02, shared - overhead) / (1 + switching)
            ratio = used / available
            stride = np.where(
                (ratio > 1) == rising, np.minimum(8.0, stride * 1.6), np.maximum(0.6, stride * 0.4)
            )
            rising = ratio > 1
            wanted = np.maximum(1.0, slow * np.maximum(ratio, 1e-9) ** stride)
            wanted_memory = np.where(
                machine["bandwidth"] > 0,
                np.maximum(
                    1.0,
                    slow_memory
                    * (per_s * traffic).sum(axis=0)
                    / np.maximum(1e-9, machine["bandwidth"]),
                ),
                1.0,
            )
            wanted_lock = np.maximum(
                1.0,
                slow_lock
                * locked
                * (1 + machine["convoy"] * np.minimum(np.maximum(0.0, contenders - 1), 8.0)),
            )
            upper = np.where(machine["smt"] < 1, np.clip(2 * used / cores - 1, 0.0, 1.0), 0.0)
            wanted_smt = 1 + upper * (2 / (1 + machine["smt"]) - 1)
            off = (
                abs(wanted - slow)
                + abs(wanted_memory - slow_memory)
                + abs(wanted_lock - slow_lock)
                + abs(wanted_smt - smt)
            )
            settled = bool((off < 2e-3 * slow).all())
            slow = wanted
            slow_memory = wanted_memory
            slow_lock = wanted_lock
            smt = smt + 0.5 * (wanted_smt - smt)
            if settled:
                break
        self.slow = slow
        self._slow_memory = slow_memory
        self._slow_lock = slow_lock
        self._smt = smt
        self.rates = rates
        self.busy = rates / capacity
        self.cpu_per_item = item * smt
        self.used_cores = np.minimum(used, cores) + overhead
