"""Each baseline against an answer that was worked out by hand, by enumeration, or is published."""

import itertools

import numpy as np
import pytest

from sluice.benchmarks.rivals.autotune import empty_chance
from sluice.benchmarks.rivals.plumber import solve

pytestmark = pytest.mark.slow

ROWS = 1024


# The queue behind autotune.


@pytest.mark.parametrize(
    ("production", "consumption", "places", "expected"),
    [
        (1.0, 2.0, 2, 4 / 7),  # ρ = 1/2: (1 − 1/2) / (1 − 1/8)
        (2.0, 1.0, 1, 1 / 3),  # ρ = 2: (1 − 2) / (1 − 4)
        (3.0, 3.0, 4, 1 / 5),  # equally fast: each filling equally likely
        (1.0, 10.0, 1, 0.9 / 0.99),
        (1e9, 1.0, 1000, 0.0),  # does not overflow
    ],
)
def test_the_chance_that_a_buffer_is_empty_by_hand(production, consumption, places, expected):
    assert empty_chance(production, consumption, places) == pytest.approx(expected)


# Plumber's linear programme.


def test_the_linear_programme_is_that_of_an_enumeration():
    costs, most, cores = [0.01, 0.03, 0.02], [4.0, 4.0, 1.0], 6.0
    rate, given = solve(costs, most, cores)
    steps = np.linspace(0, 4, 41)
    best = max(
        min(a / costs[0], b / costs[1], c / costs[2])
        for a, b, c in itertools.product(steps, steps, steps)
        if a + b + c <= cores + 1e-9 and c <= 1
    )
    assert rate == pytest.approx(best, rel=0.03)
    assert rate == pytest.approx(50)  # the third stage has one core: 1 / 0.02
    assert sum(given) <= cores + 1e-6
    assert solve([0.01, 0.03], [64, 64], 8.0)[0] == pytest.approx(8 / 0.04)
