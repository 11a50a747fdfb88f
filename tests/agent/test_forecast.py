"""What fits into memory and into the cores, by arithmetic."""

import math

import pytest

from sluice import Knobs
from sluice.agent.costs.forecast import what_if
from tests.agent.made_figures import forecast, pipeline_rates, stage_cost, stage_rates
from tests.product import Limits

MIB = 2**20


def _best(limit, *, wait_s=1.0):
    """A reader whose rows take so long to come, each 16 MiB, four of them at work. The last worker makes 64 MiB."""
    limits = Limits(workers={"decode": (1, 64), "collate": (1, 1)})
    knobs = Knobs(
        workers={"decode": 4, "collate": 1},
        read_ahead_bytes=64 * MIB,
        prefetch_bytes=256 * MIB,
    )
    stages = {
        n: stage_rates(rows_per_s=4 / wait_s, busy=busy, cpu=0.001, workers=4)
        for n, busy in {"decode": 4.0, "collate": 0.0}.items()
    }
    seen = pipeline_rates(
        rows_per_s=4 / wait_s,
        cpu=0.1,
        cpu_quota=8,
        memory_used=600 * MIB,
        memory_limit=limit,
        stages=stages,
    )
    look = forecast(
        seen,
        knobs,
        limits,
        stage_cost("decode", {4: (wait_s, 1e-4)}, item_bytes=16 * MIB),
        stage_cost("collate", {1: (1e-4, 1e-4)}, item_bytes=64 * MIB),
    )
    best, rate = look.best({"decode": (1, 32), "collate": (1, 1)}, fewest=False)
    return best, rate, look.fits(best)


@pytest.mark.parametrize("missing", [set(), {"decode"}, {"collate"}])
def test_other_resources_are_estimated_only_with_the_cost_of_every_stage(missing):
    """Planted: each stage takes 0.1 ms a row on one of 8 cores, and the trainer 100 ms on them."""
    names = ("decode", "collate")
    limits = Limits(workers=dict.fromkeys(names, (1, 4)))
    knobs = Knobs(workers=dict.fromkeys(names, 1))
    seen = pipeline_rates(cpu=1, cpu_quota=8, memory_used=600 * MIB, memory_limit=6000 * MIB)
    costs = [stage_cost(n, {1: (1e-4, 1e-4)}) for n in names if n not in missing]
    slow, fast = (
        forecast(seen, knobs, limits, *costs, other_cpu_s=0.1, demand=demand)
        for demand in (10, math.inf)
    )
    cases = what_if(slow)
    if missing:
        assert cases == {}
    else:
        assert cases["as it is"]["rows_per_s"] == 10
        assert cases["a trainer that only takes"]["rows_per_s"] > 30_000
        assert fast.rate(knobs.workers) == pytest.approx(8 / 0.1002), "the trainer's cores count"


def test_buffers_get_less_where_readers_in_their_place_bring_more():
    knobs, rate, fits = _best(1400 * MIB)
    # 504 MiB are what neither worker nor buffer holds, 96 the last worker; 1260 may be used. Readers hold 24 MiB
    # and have half an item waiting; two batches of 64 MiB wait for the trainer.
    assert knobs.workers["decode"] == math.floor((1260 - 504 - 96 - 128) / (24 + 8)) == 16
    assert (knobs.read_ahead_bytes, knobs.prefetch_bytes) == (128 * MIB, 128 * MIB)
    assert fits
    assert rate == pytest.approx(16 / 1.05)


def test_processes_that_idle_hold_their_memory_once():
    seen = pipeline_rates(
        memory_used=1024 * MIB,
        memory_limit=4096 * MIB,
        stages={"t": stage_rates(workers=4)},
    )
    knobs = Knobs(
        workers={"t": 4}, backend={"t": "process"}, read_ahead_bytes=MIB, prefetch_bytes=MIB
    )
    limits = Limits(workers={"t": (1, 8)}, backends={"t": ("thread", "process")})
    look = forecast(seen, knobs, limits, stage_cost("t", {4: (1e-6, 1e-6)}))
    assert look.memory(knobs) == 1026 * MIB
