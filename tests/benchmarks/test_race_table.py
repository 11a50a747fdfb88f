"""The tables of the races say what docs/pictures/tables.md says."""

from benchmarks.pictures import TABLES
from benchmarks.race_table import BEGIN, END, PAGES, written


def test_pages_have_the_figures_of_the_tables():
    """If not, run `python -m benchmarks.race_table`."""
    for page, table in PAGES.items():
        assert BEGIN + table(TABLES.read_text()) + END in page.read_text()


def test_a_changed_figure_changes_the_table():
    tables = TABLES.read_text()
    assert written(tables.replace(" (2.5)", "9 (2.5)")) != written(tables)
