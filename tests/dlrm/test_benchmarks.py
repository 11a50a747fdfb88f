"""What the trainer's benchmarks conclude from what they measured."""

from __future__ import annotations

import json

import pytest

from benchmarks.ladder import PLAINEST, Rung, climb
from benchmarks.tuned_training import Training, ratio
from sluice.agent.report.run_folder import Run
from sluice.ingest.knobs import Knobs

BYTES = {"table_bytes": 100, "state_bytes": 10, "bytes_per_step": 1}


def test_a_step_is_kept_if_it_is_faster_or_smaller_and_costs_no_auc():
    found = {
        "start": (100, 0.80, {}),
        "faster": (150, 0.799, {}),
        "worse": (300, 0.79, {}),
        "no faster": (151, 0.80, {}),
        "smaller": (149, 0.80, {"table_bytes": 50}),
        "cheaper": (120, 0.80, {}),
        "smaller but slow": (70, 0.80, {"table_bytes": 20, "cpu_s": 9.0}),
    }
    asked = []

    def measure(rung):
        asked.append(rung)
        rate, auc, less = found[rung.words.get("what", "start")]
        return {
            "samples_per_s": float(rate),
            "auc": auc,
            "cpu_s": 10.0 / (1 + ("cheaper" in rung.words)),
            **BYTES,
            **less,
        }

    rungs = [
        Rung(lever="l", step=name, words={"what": name, name: "1"})
        for name in found
        if name != "start"
    ]
    rungs.insert(2, Rung(lever="beside", step="s", beside=("case", "figure")))
    rungs.insert(3, Rung(lever="not here", step="s", why_not="as it is"))
    rows, top = climb(rungs, measure, loses=0.002)
    assert [(row["step"], row["verdict"]) for row in rows] == [
        (PLAINEST.step, "kept"),
        ("faster", "kept"),
        ("worse", "AUC -0.0090"),
        ("s", "measured beside"),
        ("s", "as it is"),
        ("no faster", "1.01 times as fast"),
        ("smaller", "kept"),
        ("cheaper", "kept"),
        ("smaller but slow", "0.58 times as fast"),
    ]
    assert top.words == {
        **PLAINEST.words,
        "what": "cheaper",
        "faster": "1",
        "smaller": "1",
        "cheaper": "1",
    }
    assert top.table == "all"
    assert "worse" not in asked[-1].words  # what was not kept was taken back


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
            "knobs": Knobs(workers={"read": 2}).to_dict(),
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
        Knobs(workers={"read": 2}).text,
    )
    assert found.whole == pytest.approx(56.0)
