"""Remote workers: their time at work, and how many of them are worth their price, by arithmetic."""

from dataclasses import replace

import pytest

from sluice import Knobs
from sluice.agent.costs import forecast as forecasts
from sluice.agent.costs.remote_work import at_work
from tests.agent.made_figures import (
    forecast,
    pipeline_rates,
    snapshot,
    stage_cost,
    stage_rates,
    stage_stats,
)
from tests.product import REQUESTS_A_CORE, Limits


def _seen(at, busy_s, workers, **more):
    read = stage_stats(busy_s=busy_s, workers=8, backend="remote")
    collate = replace(read, name="collate", backend="thread")
    return snapshot(at, read, collate, elsewhere={"workers": workers, **more})


@pytest.mark.parametrize(
    ("asking", "workers", "work"),
    [
        (8.0, 4, 8.0),  # all four have two requests each: what is measured is right
        (2.0, 4, 4.0),  # there is room for all: a request takes half as long as it would then
        (8.0, 1, 2.0),  # three of the four are not there yet, and six requests wait for them
        (0.0, 4, 0.0),
    ],
)
def test_time_at_work_of_remote_workers_does_not_depend_on_who_waits(asking, workers, work):
    before = _seen(1.0, 3.0, workers, requests_a_core=REQUESTS_A_CORE)
    weighed = replace(before, stages=(replace(before.stages[0], busy_s=7.0), before.stages[1]))
    after = at_work(
        _seen(2.0, 3.0 + asking, workers, requests_a_core=REQUESTS_A_CORE), before, weighed
    )
    assert after.stages[0].busy_s == pytest.approx(7.0 + work)
    ranks = {"requests_a_core": REQUESTS_A_CORE, "ranks": 3}
    alike = at_work(
        _seen(2.0, 3.0 + asking, 3 * workers, **ranks),
        _seen(1.0, 3.0, 3 * workers, **ranks),
        weighed,
    )
    assert alike.stages[0].busy_s == after.stages[0].busy_s, (
        "three ranks, each with as many workers"
    )
    assert after.stages[1].busy_s == 3.0 + asking, "what this host does is left as it is"
    assert at_work(_seen(2.0, 4.0, workers), before, before).stages[0].busy_s == 4.0, (
        "a fleet that does not scale"
    )


@pytest.mark.parametrize(("price", "least", "most"), [(1e-6, 24, 64), (0.03, 2, 12)])
def test_the_last_worker_has_to_bring_its_price(monkeypatch, price, least, most):
    """Each further worker brings less."""
    monkeypatch.setattr(forecasts, "REMOTE_CORE_PRICE", price)
    limits, knobs = (
        Limits(workers={"decode": (1, 64)}, backends={"decode": ("remote", "thread")}),
        Knobs(workers={"decode": 2}, backend={"decode": "remote"}),
    )
    cost = {n: (1e-3 * (1 + 0.08 * (n - 2)), 1e-6) for n in (2, 40, 64)}
    seen = pipeline_rates(memory_limit=2**34, stages={"decode": stage_rates(busy=2.0, workers=2)})
    remote = stage_cost("decode", cost, backend="remote")
    look = forecast(seen, knobs, limits, remote, requests_a_core=REQUESTS_A_CORE)
    wanted, _ = look.best({"decode": (1, 64)}, fewest=False)
    assert least <= wanted.workers["decode"] <= most
