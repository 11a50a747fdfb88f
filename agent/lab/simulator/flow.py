"""Computes the rates at which rows flow through a simulated pipeline: `flow` and `steady`.

Cores, lock and bandwidth each slow all their users by one factor. The search for these factors is compiled by numba, as
it takes most of the time of a simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy import ndarray

from sluice.agent.lab.simulator.physics import UNBOUNDED, Factors, Load, TrueCosts

_ROUNDS = 60


@dataclass(slots=True)
class Flow:
    """The rates at one moment. Lists have one entry for each stage and, last, one for the consumer."""

    rates: list[float]
    """Rows a second."""
    busy: list[float]
    """Share of the workers that are at work, 0 to 1."""
    cpu_per_item: list[float]
    used_cores: float
    lock: float
    """Share of the time in which the interpreter's lock is held."""
    factors: Factors
    """The next call starts its search from them."""


def flow(
    load: Load,
    empty: Sequence[bool],
    full: Sequence[bool],
    overhead_cores: float = 0.0,
    guess: Factors = (1.0, 1.0, 1.0, 1.0),
) -> Flow:
    """Returns the rates of all stages.

    A stage is as fast as its workers can be. If the queue before it is `empty`, it is no faster than its input. If the
    queue after it is `full`, it is no faster than its output. Starting workers use `overhead_cores`."""
    rates, busy, cpu_item, used, held, factors = _settle(
        load.table, load.shared, np.array([empty, full]), float(overhead_cores), guess
    )
    return Flow(
        rates.tolist(),
        busy.tolist(),
        cpu_item.tolist(),
        min(used, load.cores) + overhead_cores,
        held,
        factors,
    )


@njit(cache=True)
def _settle(
    table: ndarray,
    shared: tuple[float, ...],
    queues: ndarray,
    overhead_cores: float,
    guess: Factors,
) -> tuple[ndarray, ndarray, ndarray, float, float, Factors]:
    """Each round computes the rates with the present factors, and then moves the factors to what these rates need."""
    consumer_wait, consumer_cpu, consumer_cores, batch = shared[:4]
    cores, neighbours, switch_cost, bandwidth, convoy, second = shared[4:]
    empty, full = queues[0], queues[1]
    count = table.shape[1]
    figures = np.zeros((3, count + 1))
    capacity, _, cpu_item = figures
    rates = capacity
    used = held = 0.0
    stride = 0.65
    rising = True
    slow, slow_memory, slow_lock, smt = guess
    for _ in range(_ROUNDS):
        on_core = slow * smt
        factors = slow, slow_memory, slow_lock, smt
        _find_capacity(table, factors, held, figures)
        step = consumer_wait + consumer_cpu * on_core
        capacity[-1] = batch / step if step else UNBOUNDED
        rates = _limit_by_queues(capacity, empty, full)
        used, traffic, locked, runnable, contenders = _find_use(table, factors, rates, figures)
        cpu_item[-1] = consumer_cpu * consumer_cores * smt
        used += rates[-1] / batch * cpu_item[-1]
        # Our work gets the cores that other programs and starting workers cannot use, and at least its fair share.
        others = neighbours + overhead_cores
        free = max(cores - others, cores * runnable / (runnable + others)) if others else cores
        ratio = used / (max(0.02, free) / (1 + switch_cost * max(0.0, runnable / cores - 1)))
        # If stages mostly wait, rates hardly depend on the factor. So steps get longer while the sign stays.
        stride = min(8.0, stride * 1.6) if (ratio > 1) == rising else max(0.6, stride * 0.4)
        rising = ratio > 1
        wanted = max(1.0, slow * ratio**stride)
        wanted_memory = max(1.0, slow_memory * traffic / bandwidth) if bandwidth else 1.0
        wasted = convoy * min(max(0.0, contenders - 1), 8.0)
        wanted_lock = max(1.0, slow_lock * locked * (1 + wasted))
        upper = min(1.0, max(0.0, 2 * used / cores - 1)) if second < 1 else 0.0
        wanted_smt = 1 + upper * (2 / (1 + second) - 1)
        error = abs(wanted - slow) + abs(wanted_memory - slow_memory) + abs(wanted_lock - slow_lock)
        error += abs(min(1.0, locked) - held)
        held += 0.5 * (min(1.0, locked) - held)
        settled = error + abs(wanted_smt - smt) < 2e-3 * slow
        slow, slow_memory, slow_lock = wanted, wanted_memory, wanted_lock
        if second < 1:
            smt += 0.5 * (wanted_smt - smt)
        if settled:
            break
    cpu_item[:-1] *= smt
    return rates, rates / capacity, cpu_item, used, held, (slow, slow_memory, slow_lock, smt)


@njit(cache=True)
def _find_capacity(table: ndarray, factors: Factors, held: float, figures: ndarray) -> None:
    """Writes each stage's highest rate, and the share of the time in which its workers are on a core."""
    slow, slow_memory, slow_lock, smt = factors
    on_core = slow * smt
    capacity, share, _ = figures
    workers, rows, cpu, memory, lock, waiting = table[:6]
    turns, crowd, cap = table[6:9]
    for i in range(len(workers)):
        on_cpu = (cpu[i] + memory[i] * slow_memory) * crowd[i] * on_core
        wall = on_cpu + lock[i] * (slow_lock - 1) * slow + turns[i] * held + waiting[i]
        rate = workers[i] * rows[i] / wall
        capacity[i] = cap[i] if cap[i] < rate else rate
        share[i] = on_cpu / wall


@njit(cache=True)
def _find_use(
    table: ndarray, factors: Factors, rates: ndarray, figures: ndarray
) -> tuple[float, float, float, float, float]:
    """Writes the processor time of an item of each stage. Returns the cores in use, the traffic, the share of the time
    with the lock held, and the numbers of workers that want a core and that want the lock."""
    _, slow_memory, _, smt = factors
    capacity, share, cpu_item = figures
    workers, rows, cpu, memory, lock = table[:5]
    kappa, bytes_, handover = table[9:]
    used = traffic = locked = runnable = contenders = 0.0
    for i in range(len(workers)):
        active = workers[i] * rates[i] / capacity[i]
        item = cpu[i] + memory[i] * slow_memory
        if kappa[i]:
            item *= 1 + kappa[i] * max(0.0, active * (active - 1))
        cpu_item[i] = item
        per_s = rates[i] / rows[i]
        used += per_s * (item + handover[i]) * smt
        runnable += active * share[i]
        traffic += per_s * bytes_[i]
        if lock[i]:
            locked += per_s * lock[i]
            contenders += active
    return used, traffic, locked, runnable, contenders


@njit(cache=True)
def _limit_by_queues(capacity: ndarray, empty: ndarray, full: ndarray) -> ndarray:
    """Returns the rates that empty queues before, and full queues after these stages allow."""
    rates = capacity.copy()
    count = len(empty)
    for i in range(count):
        if empty[i]:
            rates[i + 1] = min(rates[i + 1], rates[i])
    for i in range(count - 1, -1, -1):
        if full[i]:
            rates[i] = min(rates[i], rates[i + 1])
    for i in range(count):
        if empty[i]:
            rates[i + 1] = min(rates[i + 1], rates[i])
    return rates


def steady(
    truth: TrueCosts,
    workers: Sequence[float],
    backends: Sequence[str],
    bursts: Sequence[float] = (),
) -> Flow:
    """Returns the rates once every queue has settled. Then all stages have the rate of the slowest."""
    linked = [True] * len(workers)
    return flow(Load.of(truth, workers, backends, bursts=bursts), linked, linked)
