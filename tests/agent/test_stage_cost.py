"""What is learned of a stage: from full intervals, through empty ones, resizes, saturation and change."""

import json
import random
from dataclasses import replace

import pytest

from sluice.agent.costs.stage_cost import StageCost
from tests.agent.made_figures import stage_stats


def _stats(items, busy_s, cpu_s=0.0, workers=1, item_bytes=100, **more):
    counts = {"items": items, "rows": items * 10, "bytes": items * item_bytes}
    return stage_stats(busy_s=busy_s, cpu_s=cpu_s, workers=workers, **counts, **more)


def _watch(*observations, saturated=False):
    service = StageCost(name="decode")
    for stats in observations:
        service = service.observe(stats, saturated)
    return service


def test_useful_time_a_row_is_learned_and_scales_with_workers():
    service = _watch(_stats(0, 0.0), _stats(10, 5.0, 1.0))
    assert service.capacity(1) == pytest.approx(20)
    assert service.capacity(4) == pytest.approx(80)
    assert service.waiting(1) == pytest.approx(0.8)
    assert service.item_bytes == 100


def test_a_stage_that_reports_nothing_stays_unknown():
    assert not _watch(_stats(0, 0.0), _stats(0, 0.0), _stats(0, 3.0)).points


@pytest.mark.parametrize(
    ("seen", "busy_s"),
    [
        ([(1, 1.0), (1, 1.0), (3, 6.0)], 6.0 / 30),
        ([(10, 10.0), (2, 0.1), (12, 10.1)], 0.1),
    ],
    ids=["short intervals are added up", "counters that fall begin anew"],
)
def test_a_cost_is_measured_over_enough_items(seen, busy_s):
    service = _watch(_stats(0, 0.0), *(_stats(*figures) for figures in seen))
    assert service.points[1].busy_s == pytest.approx(busy_s)


def test_what_was_under_way_during_a_resize_teaches_nothing():
    service = _watch(
        _stats(0, 0.0), _stats(10, 10.0), _stats(20, 99.0, workers=4), _stats(40, 119.0, workers=4)
    )
    assert service.points[1].busy_s == pytest.approx(0.1)
    assert service.points[4].busy_s == pytest.approx(0.1)


def test_waiting_for_a_core_is_not_taken_for_the_stages_own_cost():
    free = _watch(_stats(0, 0.0), _stats(10, 10.0, 10.0))
    for later in (_stats(20, 30.0, 20.0), _stats(30, 50.0, 30.0), _stats(40, 70.0, 40.0)):
        free = free.observe(later, saturated=True)
    assert free.points[1].busy_s == pytest.approx(0.1)
    assert free.drifts == 0


def test_the_curve_between_beyond_and_below_what_was_seen():
    service = _watch(
        _stats(0, 0.0), _stats(10, 1.0), _stats(10, 1.0, workers=3), _stats(20, 4.0, workers=3)
    )
    assert service.busy_s(1) == pytest.approx(0.01)
    assert service.busy_s(2) == pytest.approx(0.02)
    assert service.busy_s(3) == pytest.approx(0.03)
    assert service.busy_s(5) == pytest.approx(0.05)  # no more capacity beyond: the slope eats it
    assert service.unbent(2).capacity(2) == pytest.approx(200)


def _costs(*factors):
    """The cost of a stage after looks at which a row took so many times a tenth of a second."""
    busy_s, service, seen = 0.0, StageCost(name="decode").observe(_stats(0, 0.0), False), []
    for items, factor in enumerate(factors, start=1):
        busy_s += factor
        service = service.observe(_stats(10 * items, 10 * busy_s), False)
        seen.append(service)
    return seen


def test_a_rise_that_passed_is_noise_and_only_a_larger_one_is_believed():
    noisy = [1, 1, 1, 1.3, 1, 1, 1]
    assert _costs(*noisy, 1.4, 1.4)[-1].drifts == 0
    assert _costs(*noisy, 1.7, 1.7)[-1].drifts == 1


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.2])
def test_noise_is_taken_for_a_rise_at_most_once_in_ten_minutes_and_a_threefold_cost_is_seen(spread):
    looks, lives, false, missed = 120, 40, 0, 0
    for seed in range(lives):
        draw = random.Random(seed)
        noise = [draw.lognormvariate(0, spread) for _ in range(looks + 5)]
        seen = _costs(*noise[:looks], *(3 * busy for busy in noise[looks:]))
        false += seen[looks - 1].drifts
        missed += seen[-1].busy_s(1) < 0.2
    assert false <= lives * looks / 600
    assert missed == 0


def test_work_under_way_costs_nothing_yet():
    service = _watch(_stats(0, 0.0), _stats(10, 5.0, finished_s=1.0))
    assert service.points[1].busy_s == pytest.approx(0.01)


def test_waits_for_a_core_that_are_counted_are_left_out():
    service = _watch(_stats(0, 0.0), _stats(10, 9.0, 2.0, core_wait_s=4.0), saturated=True)
    assert service.points[1].busy_s == pytest.approx(0.05)
    assert service.points[1].wait_s == pytest.approx(0.03)
    late = _watch(
        _stats(0, 0.0), _stats(10, 5.0, 4.0, core_wait_s=4.0)
    )  # counters read a moment apart
    assert late.points[1].busy_s == pytest.approx(0.04)


def test_each_back_end_has_a_curve_of_its_own():
    service = _watch(
        _stats(0, 0.0),
        _stats(10, 1.0, 1.0),
        _stats(10, 1.0, workers=4),
        _stats(20, 5.0, 2.0, workers=4),
    )
    assert service.locked
    assert dict(service.on("process").points) == {1: service.points[1]}
    moved = service
    for stats in (
        _stats(20, 5.0, workers=4, backend="process"),
        _stats(40, 7.2, workers=4, backend="process"),
    ):
        moved = moved.observe(stats, False)
    assert moved.points[4].busy_s == pytest.approx(0.011)
    assert not moved.locked
    assert moved.on("thread").points == service.points
    back = moved.observe(_stats(40, 7.2, workers=4), False)
    assert back.points == service.points
    stored = replace(moved, process_bytes=2**28, residual=0.25).to_dict()
    assert StageCost.from_dict("decode", json.loads(json.dumps(stored))).to_dict() == stored
    for items, busy_s in ((60, 16.0), (80, 24.8)):
        moved = moved.observe(_stats(items, busy_s, workers=4, backend="process"), False)
    assert moved.drifts == 1
    assert not moved.other_backends, "they were measured before rows became dearer"


def test_a_slow_store_is_no_lock():
    assert not _watch(
        _stats(0, 0.0), _stats(10, 1.0), _stats(10, 1.0, workers=4), _stats(20, 2.0, workers=4)
    ).locked
    dearer = _watch(
        _stats(0, 0.0),
        _stats(10, 1.0, 1.0),
        _stats(10, 1.0, 1.0, workers=4),
        _stats(20, 3.0, 3.0, workers=4),
    )
    assert not dearer.locked  # by processor time: other workers do not help
