"""The sources do what `reference.json` says, which the last commit before the rewrite has written.

Each difference is named by its path. `tests/frozen/__init__.py` says how the reference is made anew when a change is
meant: name the change in CHANGELOG.md, run `python -m tests.frozen write tests/frozen/reference.json`, and look at what
git shows.
"""

from pathlib import Path

import pytest

from tests.frozen.compare import differences
from tests.run_program import run_program

REFERENCE = Path(__file__).parent / "reference.json"


@pytest.mark.slow
@pytest.mark.timeout(900)  # half a minute of a core, which other tests may share
def test_nothing_differs_from_the_reference():
    done = run_program("-m", "tests.frozen", "compare", REFERENCE, timeout=890)
    assert done.stdout == "no difference\n", done.stdout or done.stderr[-3000:]


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "a/b: was 1, and is 2"),
        ({"a": {"b": 1}}, {"a": {}}, "a/b: is gone, and was 1"),
        ({"a": {}}, {"a": {"b": 1}}, "a/b: is new, 1"),
        ({"keys": ["x", "y"]}, {"keys": ["x", "z"]}, "keys: y is gone|keys: z is new"),
        ({"hashes": ["x", "y"]}, {"hashes": ["y", "x"]}, "hashes: is in another order, ['y', 'x']"),
        (
            {"losses": [0.5, 0.25]},
            {"losses": [0.5, 0.26]},
            "losses: was [0.5, 0.25], and is [0.5, 0.26]",
        ),
        ({"losses": [0.5, 0.25]}, {"losses": [0.5, 0.250001]}, ""),
        ({"losses": [0.5, 0.25]}, {"losses": [0.5]}, "losses: was [0.5, 0.25], and is [0.5]"),
    ],
)
def test_a_difference_is_named_by_its_path(before, after, line):
    made_with = {"made with": {"numpy": "2"}}
    assert "|".join(differences(before | made_with, after | made_with)) == line


@pytest.mark.parametrize(("numpy", "count"), [("2", 1), ("3", 0)])
def test_bytes_are_compared_where_the_same_libraries_have_made_them(numpy, count):
    before = {"files": {"bytes": "a", "values": "b"}, "made with": {"numpy": "2"}}
    after = {"files": {"bytes": "x", "values": "b"}, "made with": {"numpy": numpy}}
    assert len(differences(before, after)) == count
