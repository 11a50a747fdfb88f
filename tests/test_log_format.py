"""`--log-format json`: each line on standard error is an object."""

import io
import json
import threading

import pytest

from sluice.common.lines import JsonLines
from sluice.common.program import take_log_format
from tests.product import UsageError
from tests.raises import raises
from tests.run_program import run_program

FIELDS = {"time", "level", "program", "message"}
HOSTILE = "\x1b[2J\r\u202e\u2028\udc80\x9b \"'"


def stream() -> tuple[JsonLines, io.StringIO]:
    return JsonLines(out := io.StringIO(), "test"), out


def messages(out: io.StringIO) -> list[str]:
    return [json.loads(line)["message"] for line in out.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("words", "program", "level"),
    [
        ("guess no-such", "guess", "error"),
        ("show no-such --log-format=json", "show", "error"),
        ("bench no\x1b[31m", "bench", "error"),
        ("evaluate --no", "evaluate", "error"),
        ("serve no-such", "serve", "error"),
        ("train --data no-such --run-dir no --check", "train", "error"),
        ("etl --spec no --input no --output no", "job", "error"),
        ("evalute", "evalute", "error"),
        ("--log-format text show", "sluice", "error"),
        ("synth --rows 10 --out {}/log", "synth", "info"),
    ],
)
def test_each_line_of_standard_error_is_an_object(tmp_path, words, program, level):
    words = words.format(tmp_path).split()
    done = run_program("-m", "sluice", *words, "--log-format", "json")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert lines
    assert all(line.keys() == FIELDS for line in lines)
    assert {line["program"] for line in lines} == {program}
    assert lines[-1]["level"] == level
    assert done.returncode == (0 if level == "info" else 2)


def test_texts_without_a_newline_are_kept_for_each_thread():
    lines, out = stream()
    thread = threading.Thread(target=lambda: print("its", "own", "line", file=lines))
    print("half", end="", file=lines)
    thread.start()
    thread.join()
    assert messages(out) == ["its own line"]
    print(" and half\n\nof two\n", file=lines)
    print("no newline", end="", file=lines)
    assert messages(out)[1:] == ["half and half\n\nof two"]
    lines.finish()
    assert messages(out)[2:] == ["no newline"]
    assert not lines.isatty()


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("error: no", "error"),
        ("sluice: failed: no", "error"),
        ("Traceback (most recent call last):\n  …\nfailed: no", "error"),
        ("warning: hot", "warning"),
        ("/a.py:3: UserWarning: hot", "warning"),
        ("warning: hot\nerror: no", "error"),
        ("an error: none", "info"),
    ],
)
def test_a_level_follows_the_beginning_of_a_line(text, level):
    lines, out = stream()
    print(text, file=lines)
    assert json.loads(out.getvalue())["level"] == level


def test_a_hostile_name_stays_within_its_line():
    lines, out = stream()
    print(f"{HOSTILE}: a name", file=lines)
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().isascii()
    assert out.getvalue().rstrip("\n").isprintable()
    assert messages(out)[0].endswith(": a name")


def test_the_option_is_taken_from_a_command_line_until_two_dashes():
    assert take_log_format(["a", "--log-format", "json", "b"]) == ("json", ["a", "b"])
    assert take_log_format(["--", "--log-format", "x"]) == ("text", ["--", "--log-format", "x"])
    for words in (["--log-format"], ["--log-format=xml"]):
        with raises(UsageError, "--log-format"):
            take_log_format(words)
