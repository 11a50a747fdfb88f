"""What fits into memory, by arithmetic."""

from __future__ import annotations

import math

import pytest

from sluice.agent.costs.forecast import Forecast, what_if
from sluice.agent.costs.rates import PipelineRates, StageRates
from sluice.agent.costs.stage_cost import Point, StageCost
from sluice.ingest.knobs import Knobs, Limits

MIB = 2**20


def _best(limit, *, wait_s=1.0):
    """A reader whose rows take so long to come, each 16 MiB, four of them at work; the last stage makes 64 MiB."""
    limits = Limits(workers={"read": (1, 64), "collate": (1, 1)})
    knobs = Knobs(
        workers={"read": 4, "collate": 1}, read_ahead_bytes=64 * MIB, prefetch_bytes=256 * MIB
    )
    stages = {
        n: StageRates(
            rows_per_s=4 / wait_s,
            busy=busy,
            cpu=0.001,
            starved=0,
            blocked=0,
            workers=4,
            queue_bytes=0,
        )
        for n, busy in {"read": 4.0, "collate": 0.0}.items()
    }
    seen = PipelineRates(
        seconds=1,
        rows_per_s=4 / wait_s,
        stall=1,
        demand_rows_per_s=None,
        cpu=0.1,
        cpu_quota=8,
        memory_used=600 * MIB,
        memory_limit=limit,
        stages=stages,
    )
    services = {
        "read": StageCost(
            name="read", points={4: Point(busy_s=wait_s, cpu_s=1e-4)}, item_bytes=16 * MIB
        ),
        "collate": StageCost(
            name="collate", points={1: Point(busy_s=1e-4, cpu_s=1e-4)}, item_bytes=64 * MIB
        ),
    }
    look = Forecast.of(seen, knobs, limits, services, other_cpu_s=0, demand=math.inf)
    found, rate = look.best({"read": (1, 32), "collate": (1, 1)}, fewest=False)
    return found, rate, look.fits(found)


@pytest.mark.parametrize("missing", [set(), {"read"}, {"collate"}])
def test_other_resources_are_estimated_only_with_the_cost_of_every_stage(missing):
    """Planted: each stage takes 0.1 ms a row on one of 8 cores, and the trainer 100 ms on them."""
    names = ("read", "collate")
    limits = Limits(workers=dict.fromkeys(names, (1, 4)))
    knobs = Knobs(workers=dict.fromkeys(names, 1))
    cost = {1: Point(busy_s=1e-4, cpu_s=1e-4)}
    seen = PipelineRates(
        seconds=1,
        rows_per_s=10,
        stall=0,
        demand_rows_per_s=10,
        cpu=1,
        cpu_quota=8,
        memory_used=600 * MIB,
        memory_limit=6000 * MIB,
        stages={},
    )
    services = {n: StageCost(name=n, points={} if n in missing else cost) for n in names}
    cases = what_if(Forecast.of(seen, knobs, limits, services, other_cpu_s=0.1, demand=10))
    if missing:
        assert cases == {}
    else:
        assert cases["as it is"]["rows_per_s"] == 10
        assert cases["a trainer that only takes"]["rows_per_s"] > 30_000


def test_buffers_get_less_where_readers_in_their_place_bring_more():
    found, rate, fits = _best(1400 * MIB)
    # 504 MiB are what neither worker nor buffer holds, 96 the last worker; 1260 may be used. Readers hold 24 MiB
    # and have half an item waiting; two batches of 64 MiB wait for the trainer.
    assert found.workers["read"] == math.floor((1260 - 504 - 96 - 128) / (24 + 8)) == 16
    assert (found.read_ahead_bytes, found.prefetch_bytes) == (128 * MIB, 128 * MIB)
    assert fits
    assert rate == pytest.approx(16 / 1.05)


def test_where_memory_is_no_bound_they_get_all():
    found, rate, fits = _best(4000 * MIB)
    assert found.workers["read"] == 32
    assert (found.read_ahead_bytes, found.prefetch_bytes) == (512 * MIB, 256 * MIB)
    assert fits
    assert rate == 32
