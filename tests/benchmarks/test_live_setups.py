"""Live set-ups: their settings are ones that their pipelines take, and a session measures whole stretches."""

import pytest

from sluice import Knobs
from sluice.benchmarks import live_setups
from sluice.benchmarks.live_setups import SETUPS
from sluice.ingest import stage_spec
from tests.product import BACKENDS


@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: s.name)
def test_settings_fit_their_pipeline_on_two_cores(setup):
    stages = stage_spec.pipeline(
        [stage_spec.transform(name, movable=True) for name in setup.transforms],
        fetches=setup.latency_s > 0,
    )
    names, limits = [stage.name for stage in stages], stage_spec.limits_of(stages, 2, BACKENDS)
    for text in setup.settings:
        limits.check(Knobs(workers=dict.fromkeys(names, 1)).parse(text))
    assert len(set(setup.settings)) == len(setup.settings)
    assert all(callable(getattr(live_setups, name)) for name in setup.transforms)
