"""A clock on the wall may jump; what is measured and waited for goes by the monotonic one alone."""

import ast

import pytest

_WALL = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "localtime"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
    ("date", "today"),
}


def wall_clocks(text):
    """Lines that look at the clock on the wall."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and (getattr(node.value, "id", getattr(node.value, "attr", "")), node.attr) in _WALL
    ]


@pytest.mark.parametrize(
    "room", ["ingest", "agent/controller.py", "agent/runtime/host_ranks.py", "agent/policies"]
)
def test_nothing_that_runs_beside_training_looks_at_the_clock_on_the_wall(repo, room):
    paths = [repo / room] if room.endswith(".py") else sorted((repo / room).rglob("*.py"))
    assert paths
    assert {path.name: clocks for path in paths if (clocks := wall_clocks(path.read_text()))} == {}
