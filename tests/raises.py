"""`raises`, `assert_names`, `MISTAKES`: a message is asserted by the facts that it names, not by its wording."""

import re
import tomllib
from contextlib import contextmanager
from pathlib import Path

import pytest

MISTAKES = tomllib.loads(Path(__file__).with_name("mistakes.toml").read_text("utf-8"))
"""Mistakes that are refused: each has what is written, and what the message names."""


@contextmanager
def raises(error, *facts):
    """Asserts that the block raises `error`, and that its message names each fact.

    A fact is a file, a column, a value, an option or a module. The words between the facts are free.
    A test of the wording itself uses `pytest.raises(..., match=...)`.
    """
    with pytest.raises(error) as caught:
        yield caught
    assert_names(str(caught.value), *facts)


def assert_names(text, *facts):
    """Asserts that the text names each fact as a whole word: 5 is not named by 15, nor `day` by `days`."""
    missing = [str(fact) for fact in facts if not _is_named(text, str(fact))]
    assert not missing, f"{text!r} does not name {', '.join(map(repr, missing))}"


def _is_named(text, fact):
    before = r"(?<!\w)" if fact[:1].isalnum() else ""
    after = r"(?!\w)" if fact[-1:].isalnum() else ""
    return re.search(before + re.escape(fact) + after, text) is not None
