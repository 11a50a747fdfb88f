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
    assert written(log.replace(" (2.5)", "9 (2.5)")) != written(log)
