"""The benchmark of growing work: it runs, and its ratios are those of one round."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from benchmarks import scale


@pytest.mark.slow
def test_it_measures_ten_and_a_hundred_epochs(tmp_path):
    found = scale.main(
        [
            *("epochs", "--rounds", "1", "--seconds", "0.1", "--smaller", "1"),
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


class _ReadAhead:
    """A loader of ten epochs of one batch. It has read 50 rows when the consumer has ten, and 100 at the end."""

    def __init__(self, *_given, **_options):
        self._taken = 0

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        return None

    def __len__(self):
        return 1

    def __iter__(self):
        self._taken += 10
        yield SimpleNamespace(rows=10, step=0)

    def snapshot(self):
        read = SimpleNamespace(rows=min(100, self._taken + 40))
        return SimpleNamespace(stages=[read], rows=self._taken)


def test_rows_that_were_read_ahead_count_with_the_time_that_they_took(monkeypatch):
    monkeypatch.setattr("sluice.Loader", _ReadAhead)
    monkeypatch.setattr(scale, "cpu_s", itertools.count().__next__)
    turn = scale.measure("", seconds=0.0, epochs=10, arm="default")
    assert turn["ns_a_row"] == pytest.approx(9e9 / 50)
