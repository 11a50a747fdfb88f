"""The benchmark of growing work: it runs at a tiny size, and its ratios are those of one round."""

from __future__ import annotations

import pytest

from benchmarks import scale


@pytest.mark.slow
def test_it_runs_at_a_tiny_size(tmp_path):
    found = scale.main(
        [
            *("epochs", "--rounds", "1", "--seconds", "0.1", "--smaller", "1000"),
            *("--data", str(tmp_path / "data")),
        ]
    )
    assert [row["epochs"] for row in found["epochs"]] == ["10", "100"]
    for row in found["epochs"]:
        assert row["fixed, ns a row"] > 0 < row["peak, MiB"]


def test_ratios_are_of_values_within_a_round():
    cases = {"40": scale.Case(rows=1, columns=40), "80": scale.Case(rows=1, columns=80)}
    turn = {"open_s": 1, "first_batch_s": 1, "peak_mib": 1}
    found = {
        (name, arm): [{**turn, "ns_a_row": pace * ns} for pace in (1, 3, 10)]
        for name, ns in (("40", 100), ("80", 240))
        for arm in ("fixed", "default", "decode")
    }
    rows = scale.summary("columns", cases, found)
    assert [row["÷ first"] for row in rows] == [1, 1.2]
