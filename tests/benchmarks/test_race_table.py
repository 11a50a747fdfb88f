"""The table of loaders in README says what the log's race says."""

from __future__ import annotations

from benchmarks.pictures import read_log
from benchmarks.race_table import BEGIN, END, README, written


def test_readme_has_the_figures_of_the_log():
    assert BEGIN + written(read_log()) + END in README.read_text(), (
        "run python -m benchmarks.race_table"
    )


def test_a_changed_figure_in_the_log_changes_the_table():
    log = read_log()
    torch = next(
        line for line in written(log).splitlines() if line.startswith("| torch DataLoader")
    )
    ratio = torch.split("|")[2].strip(" *")
    assert f"| {ratio} (2.5)" in log
    assert "| **7.77** |" in written(log.replace(f"| {ratio} (2.5)", "| 7.77 (2.5)"))
