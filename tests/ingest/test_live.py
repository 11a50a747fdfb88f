"""What the line above the live table says."""

from __future__ import annotations

from sluice.tools.terminal import summary
from tests.ingest.test_stats import snapshot


def test_why_work_was_held_back_is_told():
    before = snapshot(at=1.0, held_back=2, held_back_pressure=1)
    after = snapshot(at=2.0, held_back=9, held_back_pressure=3)
    assert summary(before, after).endswith("held back 7× for memory (5 limit, 2 pressure)")
    assert "held back" not in summary(before, before)
