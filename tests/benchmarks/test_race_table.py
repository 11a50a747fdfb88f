"""The tables of the races say what the log says."""

from benchmarks.pictures import read_log
from benchmarks.race_table import BEGIN, END, PAGES, written


def test_pages_have_the_figures_of_the_log():
    """If not, run `python -m benchmarks.race_table`."""
    for page, table in PAGES.items():
        assert BEGIN + table(read_log()) + END in page.read_text()


def test_a_changed_figure_in_the_log_changes_the_table():
    log = read_log()
    assert written(log.replace(" (2.5)", "9 (2.5)")) != written(log)
