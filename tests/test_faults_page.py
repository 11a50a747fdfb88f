"""docs/faults.md names tests that exist, and a test in every row."""

from __future__ import annotations

import re

from tests.optional_folders import is_left_out

ROW = re.compile(
    r"^\|(?P<fault>[^|]+)\|(?P<happens>[^|]+)\|(?P<survives>[^|]+)\|(?P<tests>[^|]+)\|$"
)


def rows(repo):
    lines = [
        line
        for line in (repo / "docs" / "faults.md").read_text().splitlines()
        if line.startswith("|")
    ]
    return [line for line in lines if not line.startswith(("| fault |", "|---"))]


def test_every_row_has_four_cells_and_a_test(repo):
    found = rows(repo)
    assert len(found) >= 24
    wrong = [
        line[:60]
        for line in found
        if not (cells := ROW.match(line)) or "`tests/" not in cells["tests"]
    ]
    assert wrong == []


def test_every_test_that_is_named_exists(repo):
    named = re.findall(r"`(tests/[^`]*)`", (repo / "docs" / "faults.md").read_text())
    missing = []
    for name in named:
        if "::" not in name:
            assert (repo / name).is_file() or is_left_out(name), name
            continue
        path, test = name.split("::")
        if is_left_out(path):
            continue
        file = repo / path
        if not file.is_file() or not re.search(
            rf"^\s*(async )?def {re.escape(test)}\(", file.read_text(), re.M
        ):
            missing.append(name)
    assert missing == []


def test_readme_links_it(repo):
    assert "(docs/faults.md)" in (repo / "README.md").read_text()
