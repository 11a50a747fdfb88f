"""A ladder in a run's report."""

from __future__ import annotations

import re

from sluice.agent.report import page, tables
from sluice.agent.report.run_folder import Run, RunFolder

STEPS = [
    {
        "lever": "the plainest",
        "step": "512 rows",
        "samples_per_s": 1000.0,
        "auc": 0.7512,
        "table_bytes": 2**20,
        "state_bytes": 4096,
        "bytes_per_step": 0,
        "verdict": "kept",
    },
    {
        "lever": "batch size",
        "step": "<4,096>",
        "samples_per_s": 4000.0,
        "auc": 0.75,
        "table_bytes": 2**20,
        "state_bytes": 4096,
        "bytes_per_step": 512,
        "verdict": "kept",
    },
    {"lever": "overlap", "step": "beside", "verdict": "on GPUs alone"},
]


def test_every_step_is_shown_with_what_is_known_of_it(tmp_path):
    with RunFolder.create(tmp_path / "run", {}) as folder:
        folder.event({"kind": "start"})
        folder.event({"kind": "ladder", "steps": STEPS})
    text = page.write(tmp_path / "run").read_text()
    assert "<h2>Ladder</h2>" in text
    rows = re.findall(r'<tr class="step">.*?</tr>', text)
    assert len(rows) == 3
    assert all(words in rows[0] for words in ("0.7512", "1 MiB", "4 KiB", "0 B", "kept"))
    assert "&lt;4,096&gt;" in rows[1]
    widths = [int(n) for n in re.findall(r"width:(\d+)px", "".join(rows))]
    assert widths == [30, 120]
    assert "on GPUs alone" in rows[2]


def test_a_run_without_a_ladder_has_no_section(tmp_path):
    with RunFolder.create(tmp_path / "run", {}) as folder:
        folder.event({"kind": "start"})
    assert tables.ladder(Run.read(tmp_path / "run")) == ""
