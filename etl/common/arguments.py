"""The command line's parser: argparse's, with one-line errors that suggest what may have been meant. Standard library
only: every room uses it."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from sluice.etl.common.errors import UsageError
from sluice.etl.common.suggest import meant

_KINDS = {"int": "a whole number", "float": "a number"}
_INVALID = re.compile(r"invalid (\w+) value: ('.*')")


class OptionError(UsageError):
    """A command line that cannot be understood: the message names the option, its value and what would do."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, but an option is spelled in full, and an error is raised as an OptionError of one line, which
    says what may have been meant."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **kwargs,
                                   "allow_abbrev": False})

    def parse_known_args(self, args: Sequence[str] | None = None,  # type: ignore[override]
                         namespace: Any = None) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        if not any(isinstance(action, argparse._SubParsersAction) for action in self._actions):
            self._refuse_unknown(words)  # a misspelt option comes before one that is missing because of it
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{self._explained(message)} (see --help)")

    def _explained(self, message: str) -> str:
        """argparse's message, reworded if an option is unknown, or if its value is not of the kind that it takes."""
        message = _INVALID.sub(lambda found: f"{found[2]} is not {_KINDS.get(found[1], 'what it takes')}", message)
        before, _, words = message.removeprefix("argument ").partition("unrecognized arguments: ")
        if not before:
            self._refuse_unknown(words.split())
        return message.removeprefix("argument ")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuses a value that is none of the choices."""
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, none_of(value, action.choices))

    def _refuse_unknown(self, words: list[str]) -> None:
        known = list(_options(self))
        until = words.index("--") if "--" in words else len(words)
        unknown = [name for name in (word.partition("=")[0] for word in words[:until])
                   if name.startswith("--") and name not in known]
        if unknown:
            raise OptionError("; ".join(f"no option {name!r}{meant(name, known)}" for name in unknown)
                              + " (see --help)")


def none_of(value: Any, choices: Iterable[Any]) -> str:
    """Says that a value is none of the choices, and which of them may have been meant."""
    names = [str(one) for one in choices]
    return f"{value!r} is none of {', '.join(names)}{meant(str(value), names)}"


def _options(parser: argparse.ArgumentParser) -> Iterable[str]:
    """The parser's options, and those of its commands."""
    for action in parser._actions:
        yield from (name for name in action.option_strings if name.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options(command)
