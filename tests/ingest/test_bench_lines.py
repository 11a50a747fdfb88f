"""What a person reads while `sluice bench` runs, and at its end."""

import pytest

from sluice import Knobs
from sluice.agent.costs.rates import PipelineRates, StageRates
from sluice.agent.report.format import measurement
from sluice.agent.tuning import TuningStatus, advice
from tests.raises import MISTAKES, assert_names


def test_a_line_has_rate_waiting_cores_memory_and_stages_and_how_often_work_was_held_back():
    stages = {"decode": {"busy": 1.25, "workers": 2}, "shuffle": {"busy": 0.6, "workers": 2}}
    metric = dict(rows_per_s=1234.5, stall=0.25, cpu=1.0, cpu_quota=2.0, memory_used=2**30)
    measured, shown = measurement({**metric, "held_back": 7, "stages": stages}).split(" | ")
    assert measured == "1,234 rows/s, stall 25 %, 1.0 of 2 cores, 1 GiB, held back 7× for memory"
    assert shown == "decode 1.2 of 2 busy; shuffle 0.6 of 2 busy"
    assert "held back" not in measurement({**metric, "held_back": 0, "stages": stages})


@pytest.mark.parametrize(
    ("stall", "cpu", "tuning", "facts"),
    MISTAKES["advice"],
)
def test_the_advice_names_the_gain_and_the_busiest_workers(stall, cpu, tuning, facts):
    def stage(busy: float, workers: int) -> StageRates:
        return StageRates(
            rows_per_s=1.0,
            busy=busy,
            cpu=busy,
            blocked=0.0,
            workers=workers,
            queue_bytes=0,
        )

    measured = PipelineRates(
        seconds=1.0,
        rows_per_s=100.0,
        stall=0.6,  # that of the start, too
        demand_rows_per_s=None,
        cpu=cpu,
        cpu_quota=2.0,
        memory_used=0,
        memory_limit=1,
        stages={"decode": stage(3.6, 4), "batch": stage(0.8, 1)},
    )
    status = TuningStatus(**{"mode": "fixed", "knobs": Knobs(), **tuning})
    assert_names(advice(measured, stall, status), *facts)
