"""docs/faults.md has a test in every row, every test that it names exists, and a reader can read it."""

import re

ROW = re.compile(r"^\|[^|]+\|[^|]+\|[^|]+\|[^|]*`tests/[^|]+\|$")


def test_every_fault_names_tests_that_exist(repo):
    text = (repo / "docs" / "faults.md").read_text()
    rows = re.findall(r"^\|(?!---|.fault \|).*", text, re.M)
    assert rows
    assert [row[:60] for row in rows if not ROW.match(row)] == []
    names = re.findall(r"`(tests/[^`]*)`", text)
    assert [name for name in names if not _is_there(repo, name)] == []


def test_the_page_can_be_read(repo):
    """More words than this are most often rows that a merge has kept twice: take main's page, and add yours again."""
    text = re.sub(r"`tests/[^`]*`|[|]", " ", (repo / "docs" / "faults.md").read_text())
    assert len(text.split()) <= 7_000


def _is_there(repo, name):
    path, _, test = name.partition("::")
    file = repo / path
    return file.is_file() and (
        not test or re.search(rf"^\s*(async )?def {re.escape(test)}\(", file.read_text(), re.M)
    )
