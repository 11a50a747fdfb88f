"""Live set-ups: their settings are ones that their pipelines take, and a session measures whole stretches."""

from __future__ import annotations

import pytest

from benchmarks.small_table import small_table
from sluice.agent.tunable import Tunable
from sluice.benchmarks import live_setups
from sluice.benchmarks.live_setups import BATCH_ROWS, SETUPS, Session, Setup
from sluice.ingest import stage_spec
from sluice.ingest.knobs import BACKENDS, Knobs


@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: s.name)
def test_settings_fit_their_pipeline_on_two_cores(setup):
    stages = stage_spec.pipeline(
        [stage_spec.transform(name, movable=True) for name in setup.transforms]
    )
    names, limits = [stage.name for stage in stages], stage_spec.limits_of(stages, 2, BACKENDS)
    for text in setup.settings:
        limits.check(Knobs(workers=dict.fromkeys(names, 1)).parse(text))
    assert len(set(setup.settings)) == len(setup.settings)
    assert all(callable(getattr(live_setups, name)) for name in setup.transforms)


@pytest.mark.slow
def test_a_session_measures_a_setting_over_whole_stretches(tmp_path):
    table = small_table(
        tmp_path / "clicks", rows=65_536, row_group_rows=8192, splits={"train": 1.0}
    )
    setup = Setup(
        name="small", about="", settings=("light=2",), transforms=("light",), spare_bytes=64 * 2**20
    )
    with Session(setup, table) as session:
        assert isinstance(session.tunable, Tunable)
        assert session.tunable.snapshot().memory_limit > session.tunable.minimum_memory
        knobs = session.setting("light=2")
        session.tunable.apply(knobs)
        before, after = session.run(0.0)
        assert after.stage("light").workers == 2
        assert (after.rows - before.rows) % (8 * BATCH_ROWS) == 0
        assert after.rows > before.rows
