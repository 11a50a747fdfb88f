"""Rivals that size a fleet: that they do what was read of them."""

from __future__ import annotations

import dataclasses

import pytest

from sluice.benchmarks.rivals.fleets import Ds2Fleet, RayThresholds
from sluice.ingest.knobs import REQUESTS_A_CORE, Knobs, Limits
from sluice.ingest.stats import Snapshot, StageStats

LIMITS = Limits(
    workers={"read": (1, 64), "collate": (1, 1)}, backends={"read": ("remote", "thread")}
)


def _knobs(workers):
    return Knobs(
        workers={"read": REQUESTS_A_CORE * workers, "collate": 1}, backend={"read": "remote"}
    )


def _looks(*, busy, rows_per_s, workers, starting=0, demand=1000.0, count=8):
    """Snapshots, a second apart, of readers of whom so many are at work."""
    for at in range(count):
        read = StageStats(
            name="read",
            items=at,
            rows=int(rows_per_s * at),
            bytes=0,
            busy_s=float(busy * at),
            cpu_s=0.0,
            wait_input_s=0.0,
            wait_output_s=0.0,
            workers=REQUESTS_A_CORE * workers,
            backend="remote",
        )
        yield Snapshot(
            at=float(at),
            sequence=at,
            stages=(read, dataclasses.replace(read, name="collate", backend="")),
            batches=0,
            rows=int(rows_per_s * at),
            consumer_wait_s=at * (1 - rows_per_s / demand),
            consumer_compute_s=at * rows_per_s / demand,
            memory_used=0,
            memory_limit=2**30,
            cpu_quota=4.0,
            cpu_used_s=0.0,
            elsewhere={
                "workers": workers - starting,
                "starting": starting,
                "requests_a_core": REQUESTS_A_CORE,
            },
        )


def _decided(policy, looks, workers):
    """The first number of workers that differs."""
    state = policy.initial(LIMITS, _knobs(workers))
    for look in looks:
        knobs, state, _ = policy.decide(look, state)
        if knobs != _knobs(workers):
            return knobs.workers["read"] / REQUESTS_A_CORE
    return workers


@pytest.mark.parametrize(
    ("busy", "workers", "starting", "then"),
    [
        (14.0, 7, 0, 8),  # 2 / 1.75 of seven
        (40.0, 20, 0, 23),
        (4.0, 4, 2, 4),  # those that are there have two each, but two of four are starting
        (3.0, 8, 0, 7),  # below a half: one goes
        (3.0, 8, 1, 8),  # not while one is starting
        (10.0, 8, 0, 8),
    ],
)
def test_rays_thresholds(busy, workers, starting, then):
    looks = _looks(busy=busy, rows_per_s=500.0, workers=workers, starting=starting)
    assert _decided(RayThresholds(), looks, workers) == then


def test_ds2_takes_what_useful_time_says_at_once_and_waits_for_who_starts():
    # Two workers that are all at work do 250 rows/s, and the trainer takes 1,000.
    assert _decided(Ds2Fleet(), _looks(busy=4.0, rows_per_s=250.0, workers=2), 2) == 8
    assert _decided(Ds2Fleet(), _looks(busy=4.0, rows_per_s=250.0, workers=2, starting=1), 2) == 2
    assert _decided(Ds2Fleet(), _looks(busy=8.0, rows_per_s=1000.0, workers=16), 16) == 8
