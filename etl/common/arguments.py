"""The command line's parser: argparse's, with one-line errors that suggest what may have been meant. Standard library
only: every room uses it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from sluice.etl.common.errors import UsageError
from sluice.etl.common.suggest import meant


class OptionError(UsageError):
    """A command line that cannot be understood: the message names the option, its value and what would do."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, but an option is spelled in full, and an error is raised as an OptionError of one line, which
    says what may have been meant."""

    def __init__(self, **how: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **how)

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """The options that are given. A misspelt one is named before one that is missing because of it."""
        known = [name for action in self._actions for name in action.option_strings]
        until = list(words).index("--") if "--" in words else len(words)
        unknown = [name for name in (word.partition("=")[0] for word in words[:until])
                   if name.startswith("--") and name not in known]
        if unknown:
            self.error("; ".join(f"no option {name!r}{meant(name, known)}" for name in unknown))
        return vars(self.parse_args(words))

    def error(self, message: str) -> NoReturn:
        _, found, words = message.partition("unrecognized arguments: ")
        files = found and all(map(os.path.exists, words.split()))
        hint = "one is taken: put a pattern of files in quotes, so that the shell leaves it whole; " if files else ""
        raise OptionError(f"{message.removeprefix('argument ')} ({hint}see --help)")


def none_of(value: Any, choices: Iterable[Any]) -> str:
    """Says that a value is none of the choices, and which of them may have been meant."""
    names = [str(one) for one in choices]
    return f"{value!r} is none of {', '.join(names)}{meant(str(value), names)}"
