"""The command line of a fresh interpreter."""

import subprocess
import sys

import pytest

from sluice.common import interpreter


def test_it_finds_the_modules_of_this_one_and_calls_the_function(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def say(*words): print(words)")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    done = subprocess.run(
        interpreter.command("only_here:say", 7, "a b"), capture_output=True, text=True, check=True
    )
    assert done.stdout == "('7', 'a b')\n"


@pytest.mark.parametrize(
    ("cmdline", "arguments"),
    [
        (interpreter.command("one:main", 7, "x"), ["7", "x"]),
        (interpreter.command("two:main", 7), None),
        ([sys.executable, "-c", "print()", "[]", "one:main", "7"], None),
        ([sys.executable], None),
        ([""], None),
    ],
)
def test_its_arguments_are_read_from_a_command_line(cmdline, arguments):
    assert interpreter.arguments_of(cmdline, "one:main") == arguments
