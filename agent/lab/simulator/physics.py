"""The physics of a simulated pipeline: its parts, what slows them, and the rates at which rows flow through it.

A stage's item takes processor time and waiting time. Part of the processor time is under the interpreter lock or bound
by memory bandwidth. Waiting needs no core. Cores, lock and bandwidth are shared. Each has one factor that slows all its
users: the smallest at which its use fits its capacity. This is processor sharing, and it conserves work. A worker
without input, or with a full queue after it, uses nothing and leaves its share to the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy import ndarray

from sluice.common.number_checks import is_number
from sluice.ingest.knobs import FETCH, MAX_WORKERS, PLACES
from sluice.ingest.machine import WORKER_PROCESS_BYTES
from sluice.ingest.stage_spec import StageSpec

GIB = 2**30
MIB = 2**20
SWITCH_S = 0.005
"""Seconds for which a thread keeps the interpreter's lock while another wants it."""
_BUFFER_LIMITS = ("workers", "read_ahead_bytes", "window", "series", "prefetch_bytes")
UNBOUNDED = 1e15  # The rows a second of a consumer without a limit.


Factors = tuple[float, float, float, float]
"""The slow-down by cores, bandwidth, lock and second threads."""


class MechanismError(ValueError):
    """An invalid part of a pipeline. The message names the field and the value."""


def _check(owner: object, low: float, *names: str, high: float = math.inf) -> None:
    for name in names:
        value = getattr(owner, name)
        if not is_number(value, low, high):
            above = f"to {high:g}" if math.isfinite(high) else "up"
            raise MechanismError(f"{name}: {value!r} is not a number from {low:g} {above}")
        if not math.isfinite(value):
            raise MechanismError(f"{name}: {value!r} is not finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimStage(StageSpec):
    """One stage with its true costs, in addition to the properties of every `StageSpec`."""

    buffer_limit: str = "series"
    """The limit on the bytes that wait after it. `TrueCosts` sets it for the first stage and for the last."""
    workers: int = 8
    workers_a_core: int = 1
    cost_s: float
    """Seconds of one worker for an item, while it shares no core, lock or bandwidth."""
    rows_per_item: float = 1024.0
    bytes_per_row: float = 160.0
    """Bytes of a row in the queue after the stage."""
    cpu: float = 1.0
    """Share of `cost_s` on a core. 1: it always computes. 0: it only waits, for example for a store."""
    lock: float = 0.0
    """Share of the processor time under the interpreter lock, for thread workers. 1: pure Python."""
    lock_turns: float = 4.0
    """How often a thread needs the lock for an item, if it does not hold it for long (`lock` is 0). It waits for it
    while another stage holds it."""
    memory_bound: float = 0.0
    """Share of the processor time that waits for memory bandwidth."""
    sigma: float = 0.0
    """Contention: each further worker adds this share of `cost_s` as waiting. 1: no gain from a second worker."""
    kappa: float = 0.0
    """Coherence: each pair of workers adds this share of the processor time. Above 0, many workers are slower."""
    cliff_workers: int = 0
    """With more workers than this, all costs are multiplied by `cliff_factor`, as when a cache overflows. 0: never."""
    cliff_factor: float = 1.0
    cap_rows_per_s: float = 0.0
    """The most rows a second with any number of workers, as a store may allow. 0: no limit."""
    credit_rows: float = 0.0
    """Rows that may exceed this limit: a token bucket, full at the start. `cap_rows_per_s` fills it."""
    tail: float = 0.0
    """Coefficient of variation of an item's cost. Above 1, the tail is heavy."""
    burst_factor: float = 1.0
    """The factor by which the waiting part grows during a burst."""
    burst_every_s: float = 0.0
    """Mean seconds between bursts. 0: no bursts."""
    burst_s: float = 0.0
    drift: float = 0.0
    """The cost's logarithm is a random walk, and this is its standard deviation after a second.

    After t seconds, the standard deviation is the root of t times as large."""
    item_bytes: float = 0.0
    """Memory of an item while a worker holds it. 0: the bytes of its rows."""
    process_bytes: float = float(WORKER_PROCESS_BYTES)
    """Memory of a process worker."""
    start_s: float = 0.0
    """Seconds until a new thread worker begins to work."""
    process_start_s: float = 1.0
    process_cost_s: float = 0.0
    """Additional seconds that an item costs in a process, for the transfer."""
    buffer_items: float = 2.0
    """Items that may wait after the stage, if no knob sets a limit."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "backends", tuple(self.backends))
        if not isinstance(self.name, str) or not self.name:
            raise MechanismError(f"name: {self.name!r} is not a name")
        if not self.backends or any(b not in PLACES for b in self.backends):
            raise MechanismError(f"backends: {list(self.backends)!r} are not among {list(PLACES)}")
        if self.buffer_limit not in _BUFFER_LIMITS:
            raise MechanismError(
                f"buffer_limit: {self.buffer_limit!r} is not one of {', '.join(_BUFFER_LIMITS)}"
            )
        _check(self, 1, "workers")
        _check(self, 0, "workers_a_core")
        _check(self, 1e-9, "cost_s")
        _check(self, 1, "rows_per_item")
        _check(self, 0, "cpu", "lock", "memory_bound", "sigma", high=1)
        _check(self, 0, "kappa", high=10)
        _check(self, 1, "cliff_factor", "burst_factor")
        _check(self, 0, "cliff_workers", high=MAX_WORKERS)
        _check(self, 0.1, "buffer_items")
        _check(
            self,
            0,
            *(
                f.name
                for f in fields(self)
                if f.name.endswith(("_s", "_bytes")) and f.name != "cost_s"
            ),
            "bytes_per_row",
            "tail",
            "drift",
            "cap_rows_per_s",
            "credit_rows",
            "lock_turns",
        )
        if self.credit_rows and not self.cap_rows_per_s:
            raise MechanismError(
                f"credit_rows: {self.credit_rows!r} needs cap_rows_per_s, which fills it"
            )

    @property
    def held_bytes(self) -> float:
        return self.item_bytes or self.rows_per_item * self.bytes_per_row


@dataclass(frozen=True, slots=True, kw_only=True)
class SimMachine:
    """The machine on which the pipeline runs."""

    cores: float = 8.0
    """Cores that the pipeline may use: the `cpu_quota` of a snapshot."""
    host_cores: int = 0
    """Cores of the host, and the most workers of a stage that sets no other limit. 0: `cores`."""
    neighbour_cores: float = 0.0
    """Cores that another program takes first. No counter shows it."""
    neighbour_threads: float = 0.0
    """Threads of other programs that always want a core. They share the cores fairly with ours."""
    smt: float = 1.0
    """The speed of a core's second thread, as a share of the first. The upper half of `cores` are second threads."""
    bandwidth: float = 0.0
    """Bytes of rows a second that memory can move for the memory-bound parts. 0: unlimited."""
    convoy: float = 0.05
    """The share of the interpreter lock that each further waiting thread wastes."""
    handover_s: float = 0.0
    """Processor seconds to pass an item on to the next stage."""
    switch_cost: float = 0.03
    """Share of the cores lost when twice as many threads as cores want to run."""
    memory_limit: float = 64.0 * GIB
    base_bytes: float = 512.0 * MIB
    """Memory in use before the first worker starts."""
    memory_lag_s: float = 1.0
    """Seconds until two thirds of freed memory are returned."""
    timer_noise: float = 0.02
    """Standard deviation of the timers' reports, as a share."""

    def __post_init__(self) -> None:
        _check(self, 0.05, "cores")
        _check(
            self,
            0,
            "neighbour_cores",
            "neighbour_threads",
            "bandwidth",
            "base_bytes",
            "memory_lag_s",
            "host_cores",
            "handover_s",
        )
        _check(self, 1, "memory_limit")
        _check(self, 0, "smt", "timer_noise", "convoy", "switch_cost", high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """The trainer that takes the batches."""

    batch_rows: int = 8192
    step_s: float = 0.0
    """Seconds of a step without any wait. 0: the trainer takes every batch at once."""
    cpu: float = 0.0
    """Share of the step that runs on cores of this machine."""
    cores: float = 1.0
    """Cores that it uses during that share."""
    interference: float = 0.0
    """How much longer that share takes if the number of threads that wait for a core equals the number of cores."""

    def __post_init__(self) -> None:
        _check(self, 1, "batch_rows")
        _check(self, 0, "step_s", "cores", "interference")
        _check(self, 0, "cpu", high=1)


@dataclass(frozen=True, slots=True, eq=False)
class TrueCosts:
    """A pipeline's true costs at one moment. An object is equal only to itself, so it is a cheap key.

    The read-ahead buffer comes after the first stage that does not fetch, and the prefetch buffer after the last."""

    machine: SimMachine
    stages: tuple[SimStage, ...]
    consumer: Consumer

    def __post_init__(self) -> None:
        limits = {self.decoding: "read_ahead_bytes", len(self.stages) - 1: "prefetch_bytes"}
        object.__setattr__(
            self,
            "stages",
            tuple(
                stage
                if stage.buffer_limit == limits.get(i, stage.buffer_limit)
                else replace(stage, buffer_limit=limits[i])
                for i, stage in enumerate(self.stages)
            ),
        )

    @property
    def decoding(self) -> int:
        """The number of the first stage that does not fetch."""
        return int(self.stages[0].name == FETCH)


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """The true costs with given workers and back ends as plain numbers, for the inner loop. It is equal only to
    itself."""

    table: ndarray
    """A column for each stage, with the numbers of `_stage_numbers`."""
    shared: tuple[float, ...]
    """What the stages share: the trainer's numbers, and the machine's."""
    cores: float

    @classmethod
    def of(
        cls,
        truth: TrueCosts,
        workers: Sequence[float],
        backends: Sequence[str],
        *,
        factors: Sequence[float] = (),
        bursts: Sequence[float] = (),
        uncapped: Sequence[int] = (),
    ) -> Load:
        """Returns the load. The stores of the stages `uncapped` still give credit."""
        machine, consumer = truth.machine, truth.consumer
        cores = max(0.05, machine.cores - machine.neighbour_cores)
        contending = consumer.cores * consumer.cpu
        columns = []
        for i, stage in enumerate(truth.stages):
            n = float(workers[i])
            numbers = _stage_numbers(
                stage,
                n,
                factor=factors[i] if factors else 1.0,
                burst=bursts[i] if bursts else 1.0,
                process=backends[i] == "process",
                capped=i not in uncapped,
            )
            columns.append((*numbers, machine.handover_s * (i > 0)))
            contending += n * stage.cpu
        pressure = max(0.0, contending / cores - 1.0) if consumer.cpu else 0.0
        shared = (
            consumer.step_s * (1 - consumer.cpu),
            consumer.step_s * consumer.cpu * (1 + consumer.interference * pressure),
            float(consumer.cores),
            float(consumer.batch_rows),
            cores,
            float(machine.neighbour_threads),
            float(machine.switch_cost),
            float(machine.bandwidth),
            float(machine.convoy),
            float(machine.smt),
        )
        return cls(np.array(columns).T.copy(), shared, cores)


def _stage_numbers(
    stage: SimStage, n: float, *, factor: float, burst: float, process: bool, capped: bool
) -> tuple[float, ...]:
    """Returns the numbers of a stage with `n` workers. `flow` unpacks them in this order."""
    cost = stage.cost_s + (stage.process_cost_s if process else 0.0)
    if stage.cliff_workers and n > stage.cliff_workers:
        factor *= stage.cliff_factor
    cpu = cost * stage.cpu * factor
    waiting = cost * (1 - stage.cpu) * factor * burst
    return (
        n,
        stage.rows_per_item,
        cpu * (1 - stage.memory_bound),
        cpu * stage.memory_bound,
        0.0 if process else cpu * stage.lock,
        waiting + stage.sigma * max(0.0, n - 1) * cost * factor,
        # the seconds for which an item waits for a lock that is always held
        0.0 if process or stage.lock else stage.lock_turns * SWITCH_S,
        # the factor on the cost of a row while all workers are busy
        1 + stage.kappa * n * (n - 1),
        (stage.cap_rows_per_s if capped else 0.0) or UNBOUNDED,
        stage.kappa,
        stage.rows_per_item * stage.bytes_per_row if stage.memory_bound else 0.0,
    )


def memory_need(
    truth: TrueCosts, workers: Sequence[float], backends: Sequence[str], queue_bytes: float
) -> float:
    """Returns the bytes in use if every worker holds an item and the queues hold `queue_bytes`."""
    return (
        truth.machine.base_bytes
        + queue_bytes
        + sum(
            n * (s.held_bytes + s.process_bytes * (b == "process"))
            for s, n, b in zip(truth.stages, workers, backends, strict=True)
        )
    )
