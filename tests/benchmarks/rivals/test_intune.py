"""The reconstruction of InTune: its reward, its steps, its layers, and that it learns."""

from __future__ import annotations

import pytest

from sluice.benchmarks.rivals.intune import (
    STEPS,
    move,
    reward,
)
from sluice.ingest.knobs import Knobs, Limits


@pytest.mark.parametrize(("used", "expected"), [(0, 100.0), (25, 75.0), (100, 0.0), (150, 0.0)])
def test_the_reward_is_throughput_times_the_free_share_and_never_negative(used, expected):
    assert reward(100.0, used, 100) == expected


def test_a_step_is_bounded_and_the_workers_stay_within_the_cores():
    limits = Limits(workers={"a": (1, 64), "b": (1, 64)})
    knobs = Knobs(workers={"a": 3, "b": 4})
    for first in STEPS:
        for second in STEPS:
            after = move(knobs, limits, [first, second], 1.0, cores=10)
            assert all(
                n >= 1 and abs(n - before) <= max(STEPS)
                for n, before in zip(after.workers.values(), knobs.workers.values(), strict=True)
            )
            assert after.total_workers <= 10
    assert dict(move(knobs, limits, [5, 0], 1.0, cores=10).workers) == {"a": 6, "b": 4}
    assert dict(move(knobs, limits, [-5, 1], 1.0, cores=10).workers) == {"a": 1, "b": 5}
