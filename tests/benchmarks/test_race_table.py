"""The tables of the races say what the log says."""

from __future__ import annotations

import pytest

from benchmarks.pictures import read_log
from benchmarks.race_table import BEGIN, END, PAGES, written


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_the_figures_of_the_log(page):
    assert BEGIN + PAGES[page](read_log()) + END in page.read_text(), (
        "run python -m benchmarks.race_table"
    )


def test_a_changed_figure_in_the_log_changes_the_table():
    log = read_log()
    assert written(log.replace(" (2.5)", "9 (2.5)")) != written(log)
