import dataclasses

import numpy as np
import pytest

from sluice.ingest.stats import (
    Durations,
    Snapshot,
    StageStats,
    StatsError,
    doublings,
    quantile,
)
from tests.agent.made_figures import stage_stats
from tests.raises import raises


def stage(name="decode", **changes):
    return stage_stats(name, **{"items": 1, "rows": 10, "busy_s": 1.0, "cpu_s": 0.5, **changes})


def snapshot(**changes):
    return Snapshot(
        **{
            "at": 1.0,
            "sequence": 0,
            "stages": (stage(), stage("collate")),
            "batches": 1,
            "rows": 10,
            "consumer_wait_s": 0.1,
            "consumer_compute_s": 0.9,
            "memory_used": 1,
            "memory_limit": 2,
            "cpu_quota": 2.0,
            "cpu_used_s": 1.0,
            **changes,
        }
    )


def test_json_and_back():
    assert Snapshot.from_dict(snapshot().to_dict()) == snapshot()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, None, "1", True])
def test_a_counter_that_cannot_be_is_refused_by_name(value):
    for field in dataclasses.fields(StageStats):
        if field.name not in ("name", "backend"):
            with raises(StatsError, field.name, value):
                stage(**{field.name: value})


@pytest.mark.parametrize("missing", ["rows", "busy_s"])
def test_a_counter_that_is_missing_is_named(missing):
    values = snapshot().to_dict()
    for counters in (values, *values["stages"]):
        counters.pop(missing, None)
    with raises(TypeError, missing):
        Snapshot.from_dict(values)


def test_stages_are_found_by_name():
    assert snapshot().stage("collate").name == "collate"
    with raises(StatsError, "'encode'", "'decode', 'collate'"):
        snapshot().stage("encode")


def test_quantiles_are_at_most_a_quarter_too_large():
    drawn = np.random.default_rng(0).lognormal(-6, 3, 10_000)
    durations = Durations()
    for seconds in drawn:
        durations.add(seconds)
    for share in (0.5, 0.99):
        exact = np.quantile(drawn, share, method="inverted_cdf")
        assert exact <= quantile(durations.counts, share) <= 1.25 * exact
    assert dict(doublings(durations.counts))[0.5] == (drawn < 0.5).sum()
