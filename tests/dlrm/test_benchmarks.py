"""What the trainer's benchmarks conclude from what they measured."""

from __future__ import annotations

import json

import pytest

from benchmarks.tuned_training import Training, ratio
from sluice.agent.report.run_folder import Run
from sluice.ingest.knobs import Knobs


def test_arms_are_compared_round_by_round_with_an_interval():
    assert ratio([20.0, 20.0], [10.0, 10.0]) == [2.0, 2.0, 2.0]
    middle, low, high = ratio([10.0, 40.0, 20.0], [10.0, 20.0, 10.0])
    assert (middle, low, high) == (2.0, 1.0, 2.0)


def test_what_counts_of_a_training_begins_with_its_first_rows_and_is_of_all_ranks(tmp_path):
    lines = [
        {
            "kind": "loader",
            "at": float(at),
            "rows": at,
            "rows_per_s": rate,
            "stall": stall,
            "knobs": Knobs(workers={"decode": 2}).to_dict(),
        }
        for at, (rate, stall) in enumerate(
            [(0.0, 1.0), (5.0, 1.0), *[(10.0, 0.5)] * 4, *[(40.0, 0.0)] * 6]
        )
    ]
    (tmp_path / "config.json").write_text(json.dumps({"kind": "train", "ranks": 2}))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = Training(tmp_path, settle_s=4.0).figures(Run.read(tmp_path))
    assert (found.settled, found.stall, found.decisions, found.knobs) == (
        80.0,
        0.0,
        0,
        Knobs(workers={"decode": 2}).text,
    )
    assert found.whole == pytest.approx(56.0)
