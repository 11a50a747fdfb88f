"""Where operators belong, column by column, by arithmetic on a run whose stages are known."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from sluice.agent.report.operator_choice import choose
from sluice.ingest.row_costs import RowCosts, Share
from tests.raises import assert_names

US = 1e-6


@dataclass(frozen=True)
class Way:
    left: tuple[str, ...]
    bytes: float
    decode_s: float = 0.0
    apply_s: float = 0.0


def costs(*, step_s: float = 0.0, **stages: Share) -> RowCosts:
    """Sixteen cores, so that they bound nothing; the run was as fast as the model says, or the trainer."""
    found = RowCosts(
        stages=stages,
        head={"shuffle": "read"},
        cores=16.0,
        measured=1.0,
        consumer=Share(workers=1, cpu_s=0.0, wait_s=step_s),
    )
    return replace(found, measured=found.bound)


READ, MOVE = Share(workers=1, cpu_s=1 * US), Share(workers=1, cpu_s=1 * US)
FORMS = {
    "C1": [Way((), 4.0, 0.5 * US), Way(("hash",), 8.0, 0.5 * US, 2 * US)],
    "C2": [Way((), 4.0, 0.5 * US), Way(("hash",), 1.0, 0.5 * US, 1 * US)],
}


def test_what_costs_rows_goes_into_the_etl_whatever_its_bytes():
    """Reading takes 2 µs a row: one hash makes it 3, or 4."""
    found = choose(
        costs(read=READ, shuffle=MOVE), FORMS, {"C1": (), "C2": ()}, measured_s={}, row_bytes=8.0
    )
    one, two = found.choices
    assert (one.left, two.left) == ((), ())
    assert one.etl == two.etl == pytest.approx((0.5e6, 8.0))
    assert one.loader == pytest.approx((1e6 / 4, 12.0))
    assert two.loader == pytest.approx((1e6 / 3, 5.0))
    assert two.reason == "ETL: 50 % more rows/s"


def test_where_the_trainer_is_slower_the_smaller_table_wins_as_far_as_it_stays_so():
    found = choose(
        costs(read=READ, shuffle=MOVE, step_s=1 / 0.3e6),
        FORMS,
        {"C1": (), "C2": ()},
        measured_s={},
        row_bytes=8.0,
    )
    one, two = found.choices
    assert (one.left, two.left) == ((), ("hash",))
    assert (found.rows_per_s, found.row_bytes) == pytest.approx((0.3e6, 5.0))
    assert_names(two.reason, "loader", "3.0 bytes")
    assert_names(one.reason, "ETL", "50 %")  # 5 µs a row would be slower than the trainer


def test_what_the_run_measured_stands_above_what_the_sample_says():
    """A hash took it 4 µs that takes 1 here: its cores were so much slower."""
    found = choose(
        costs(read=replace(READ, cpu_s=4 * US), shuffle=replace(MOVE, cpu_s=5 * US)),
        FORMS,
        {"C1": (), "C2": ("hash",)},
        measured_s={"C2": 4 * US},
        row_bytes=97.0,
    )
    assert found.choices[1].loader == pytest.approx((1e6 / 9, 97.0))
    assert found.choices[1].etl == pytest.approx((1e6 / 5, 100.0))
    assert found.choices[0].loader == pytest.approx((1e6 / (5 + 8), 104.0))


def test_a_run_without_operators_says_by_its_decoding_how_much_dearer_work_was():
    """The stage took 4 µs a row, and these columns are half of its bytes: 2 µs, which took the sample 1."""
    found = choose(
        costs(read=replace(READ, cpu_s=4 * US)),
        FORMS,
        {"C1": (), "C2": ()},
        measured_s={},
        row_bytes=16.0,
    )
    assert found.choices[0].loader == pytest.approx((1e6 / (4 + 2 * 2), 20.0))
    assert found.choices[1].loader == pytest.approx((1e6 / (4 + 2 * 1), 13.0))


def test_other_programs_on_the_cores_make_each_second_of_work_longer():
    run = costs(
        read=replace(READ, wait_s=3 * US, core_wait_s=3 * US), shuffle=Share(workers=1, cpu_s=0.0)
    )
    more = run.with_work({"read": 1 * US}).stages["read"]
    assert more.cpu_s + more.wait_s == pytest.approx(8 * US)
