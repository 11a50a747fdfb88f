"""The demo of a schema change: its page agrees with the two runs, and with few rows the whole of it runs."""

import json
import os
import re
from pathlib import Path

import pytest

from examples.demo.schema_change import AGENT, Comparison
from tests.product import Run
from tests.raises import assert_names
from tests.run_program import last_json, run_program

RANKS, BATCH = 2, 4096


def _knobs(levels):
    return {
        "workers": {"decode": 1, **({"levels": levels} if levels else {})},
        "backend": {},
        "read_ahead_bytes": 2**20,
        "prefetch_bytes": 2**20,
    }


def _drawn(path, came, after, waiting, decides=False):
    """A run that looks once a second: 10 k rows a second a rank, which fall to 1 k when the new columns come and are
    `after` from the fifth second on."""
    looks = [
        {
            "at": float(at),
            "kind": "loader",
            "rows": 1,
            "rows_per_s": rate,
            "stall": stall,
            "away": 0.0,
            "stages": {},
            "knobs": _knobs(at > came),
        }
        for at in range(1, came + 31)
        for rate, stall in [
            (1e4, 0.0) if at <= came else (1e3, 0.9) if at < came + 5 else (after, waiting)
        ]
    ]
    events = [
        {"at": came + 0.5, "kind": "follow", "before": 0, "after": 1, "dense_added": ["I7", "I8"]}
    ]
    if decides:
        events.append(
            {
                "at": came + 3.0,
                "kind": "decision",
                "sequence": 1,
                "before": _knobs(1),
                "after": _knobs(4),
                "reason": {"text": "levels is the bottleneck"},
            }
        )
    trained, steps = 0.0, []
    for look in looks:
        trained += look["rows_per_s"] * RANKS / BATCH
        steps.append({"at": look["at"], "kind": "train", "step": trained})
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"kind": "train", "ranks": RANKS}))
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [*looks, *steps])
    )
    return Run.read(path)


def test_the_page_shows_both_runs_from_the_change_on_and_its_figures_are_those_of_the_curves(
    tmp_path,
):
    """They take the new columns up at different times."""
    both = Comparison(
        _drawn(tmp_path / "agent", 20, 9e3, 0.01, decides=True),
        _drawn(tmp_path / "frozen", 5, 2e3, 0.7),
    )
    text, figures = both.page(), both.figures()
    assert_names(both.headline, "4.5 times", "4 k → 18 k rows/s", "70 % → 1.0 %")
    assert both.headline in text
    assert figures["with_agent"]["rows"] == RANKS * (3.5e3 + 26 * 9e3)
    assert figures["without"]["rows"] == RANKS * (3.5e3 + 26 * 2e3)
    assert "29.5 s after the new columns came: 111 k → 475 k." in text
    assert not re.search(r"""(src|href)=["']?https?:""", text), "the page must open offline"
    assert text.count(AGENT) == 1 + 2 + 1, "the key, each panel, and the table"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_trainings_take_up_new_columns_and_one_page_tells_of_both(tmp_path):
    result = run_program(
        "-m",
        "examples.demo.schema_change",
        "--out",
        tmp_path / "out",
        "--rows",
        "30000",
        "--seconds",
        "2",
        "--ranks",
        "1",
        timeout=590,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=True,
    )
    last = last_json(result)
    page = Path(last["report"]).read_text()
    for name in ("agent", "frozen"):
        (followed,) = Run.read(tmp_path / "out" / f"run-{name}").of("follow")
        assert followed["dense_added"] == ["I7", "I8", "I9", "I10", "I11", "I12", "I13"]
    knobs = {
        json.dumps(look["knobs"]["workers"])
        for look in Run.read(tmp_path / "out" / "run-frozen").of("loader")
    }
    assert len(knobs) == 2, "the new stage came with one worker, and nothing was turned"
    assert not Run.read(tmp_path / "out" / "run-frozen").of("decision")
    assert page.count("version 1 of the table") >= 2
    assert f"Open {last['report']}" in result.stderr
    assert "Traceback" not in result.stderr
