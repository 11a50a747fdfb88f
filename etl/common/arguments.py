"""Names in messages: suggests what the writer may have meant. Standard library only: every room uses it."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import NoReturn


def _meant(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, 1, 0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


_KINDS = {"int": "a whole number", "float": "a number", "_positive": "a whole number of 1 or more",
          "_share": "a number from 0 to 1", "_mebibytes": "a whole number of MiB"}
_INVALID = re.compile(r"invalid (\w+) value: ('.*')")


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, which says for an unknown option which one may have been meant."""

    def error(self, message: str) -> NoReturn:
        super().error(self.explained(message))

    def explained(self, message: str) -> str:
        """argparse's message, reworded if an option is unknown, or if its value is not of the kind that it takes."""
        message = _INVALID.sub(lambda found: f"{found[2]} is not {_KINDS.get(found[1], 'what it takes')}", message)
        before, _, words = message.partition("unrecognized arguments: ")
        unknown = [word.partition("=")[0] for word in words.split() if word.startswith("-")]
        if before or not unknown:
            return message
        known = list(_options(self))
        return "; ".join(f"no option {name!r}{_meant(name, known)}" for name in unknown)


def _options(parser: argparse.ArgumentParser) -> Iterable[str]:
    """The parser's options, and those of its commands."""
    for action in parser._actions:
        yield from (name for name in action.option_strings if name.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options(command)
