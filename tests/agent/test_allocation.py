"""`allocate` against trying everything."""

from __future__ import annotations

import itertools
import random

import pytest

from sluice.agent.costs.forecast import StageRequest, allocate


def _by_enumeration(requests, enough, memory):
    best = (-1.0, 0, None)
    for counts in itertools.product(*(range(r.least, r.most + 1) for r in requests)):
        if sum(n * r.worker_bytes for n, r in zip(counts, requests, strict=True)) > memory:
            continue
        rate = min([enough, *(r.capacity(n) for n, r in zip(counts, requests, strict=True))])
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
        requests.append(
            StageRequest(
                name=f"s{i}",
                least=draw.randint(1, 2),
                most=draw.randint(3, 7),
                worker_bytes=draw.choice([0, 1, 5]),
                capacity=lambda n, c=cost, f=fixed, b=bend: (
                    n / (c * (1 + f * (n - 1) + b * n * (n - 1)))
                ),
            )
        )
    enough = draw.choice([float("inf"), draw.uniform(0.2, 2)])
    memory = draw.choice([float("inf"), draw.uniform(25, 60)])
    rate, few, counts = _by_enumeration(requests, enough, memory)
    found = allocate(requests, enough=enough, memory=memory)
    assert counts is not None
    assert found.rows_per_s == pytest.approx(rate)
    assert sum(found.workers.values()) == -few


def test_the_least_of_all_where_nothing_fits():
    requests = [StageRequest(name="a", least=2, most=5, capacity=float, worker_bytes=10)]
    assert allocate(requests, memory=5).workers == {"a": 2}
