"""What a person reads while `sluice bench` runs, and at its end."""

from __future__ import annotations

import pytest

from sluice.ingest.knobs import Knobs
from sluice.tools.bench_lines import advice, measurement
from tests.ingest.test_stats import snapshot, stage
from tests.raises import assert_names

TIMES = {"decode": (0.3, 0.1), "shuffle": (0.6, 0.0), "batch": (0.8, 0.2)}
"""Reading is busy for 30 %, and shuffling, which its workers do, for 60 % of their time."""
KNOBS = Knobs(workers={"decode": 4, "batch": 1}, fused={"shuffle"})


def at(share, wait_s=0.25, used_s=1.0):
    return snapshot(
        at=share,
        rows=int(100 * share),
        consumer_wait_s=wait_s * share,
        consumer_compute_s=(1 - wait_s) * share,
        cpu_used_s=used_s * share,
        memory_used=2**30,
        memory_limit=2**32,
        held_back=int(share * 7),
        held_back_pressure=int(share * 2),
        stages=tuple(
            stage(name, busy_s=share * busy, wait_input_s=share * waits, wait_output_s=0.0)
            for name, (busy, waits) in TIMES.items()
        ),
    )


def test_a_line_has_rate_waiting_cores_memory_and_stages_and_why_work_was_held_back():
    measured, stages = measurement(at(0), at(1), KNOBS.fused).split(" | ")
    assert measured == (
        "100 rows/s, stall 25 %, 1.0 of 2 cores, 1 GiB, held back 7× for memory (5 limit, 2 pressure)"
    )
    assert stages == "decode 1×, 30 % busy; shuffle fused, 60 % busy; batch 1×, 80 % busy"
    assert "held back" not in measurement(at(1), at(1))


@pytest.mark.parametrize(
    ("wait_s", "used_s", "facts"),
    [
        (0.01, 1.0, ["1.0 %", "brings nothing"]),
        (0.5, 1.0, ["50 %", "2 times the rows", "decode (90 %)", "--knobs decode=5"]),
        (0.5, 1.5, ["decode (90 %)", "1.5 of 2 cores", "--workers"]),
    ],
)
def test_the_advice_names_the_gain_and_the_busiest_stage(wait_s, used_s, facts):
    assert_names(advice(at(0, wait_s, used_s), at(1, wait_s, used_s), KNOBS), *facts)
