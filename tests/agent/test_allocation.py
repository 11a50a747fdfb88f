"""`allocate` against trying everything, and the costs that it is given."""

import itertools
import random

import numpy as np
import pytest

from sluice.agent.costs.forecast import StageRequest, allocate
from tests.agent.made_figures import stage_cost


def _by_enumeration(requests, enough, memory):
    best = (-1.0, 0, None)
    for steps in itertools.product(*(range(len(r.capacities)) for r in requests)):
        counts = tuple(r.least + more for more, r in zip(steps, requests, strict=True))
        if sum(n * r.worker_bytes for n, r in zip(counts, requests, strict=True)) > memory:
            continue
        rate = min([enough, *(r.capacities[i] for i, r in zip(steps, requests, strict=True))])
        best = max(best, (rate, -sum(counts), counts))
    return best


@pytest.mark.parametrize("seed", range(60))
def test_finds_what_enumeration_finds(seed):
    draw = random.Random(seed)
    requests = []
    for i in range(draw.randint(2, 4)):
        cost, fixed, bend = (
            draw.uniform(0.5, 9),
            draw.uniform(0, 0.4),
            draw.choice([0, 0, 0.02, 0.1]),
        )
        least = draw.randint(1, 2)
        n = np.arange(least, draw.randint(3, 7) + 1)
        requests.append(
            StageRequest(
                name=f"s{i}",
                least=least,
                worker_bytes=draw.choice([0, 1, 5]),
                capacities=n / (cost * (1 + fixed * (n - 1) + bend * n * (n - 1))),
            )
        )
    enough = draw.choice([float("inf"), draw.uniform(0.2, 2)])
    memory = draw.choice([float("inf"), draw.uniform(25, 60)])
    rate, few, counts = _by_enumeration(requests, enough, memory)
    chosen = allocate(requests, enough=enough, memory=memory)
    assert counts is not None
    assert chosen.rows_per_s == pytest.approx(rate)
    assert sum(chosen.workers.values()) == -few


def test_the_least_of_all_where_nothing_fits():
    requests = [StageRequest(name="a", least=2, capacities=np.arange(2.0, 6.0), worker_bytes=10)]
    assert allocate(requests, memory=5).workers == {"a": 2}


@pytest.mark.parametrize("counts", [[3], [1, 4], [2, 3, 9]])
def test_the_costs_of_many_numbers_of_workers_are_those_of_each(counts):
    seconds = {n: (1 + 0.3 * i, 0.5 + 0.1 * i) for i, n in enumerate(counts)}
    cost = stage_cost("read", seconds)
    assert [(cost.busy_s(n), cost.cpu_s(n)) for n in counts] == list(seconds.values())
    workers = np.arange(1, 13)
    busy, cpu = cost.curves(workers)
    assert busy.tolist() == [cost.busy_s(n) for n in workers.tolist()]
    assert cpu.tolist() == [cost.cpu_s(n) for n in workers.tolist()]
