"""The options of every command, as its parser has them: names, defaults and metavars, without the texts of the help."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import sys
import typing
from collections.abc import Iterator
from typing import Any
from unittest import mock

from sluice.__main__ import VERBS
from sluice.common.extras import advice

OTHERS = {
    "python -m examples.demo": "examples.demo.__main__",
    "python -m examples.demo.schema_change": "examples.demo.schema_change",
}
"""Commands beside the verbs of `sluice`, and their modules. `etl/job.py` and `dlrm.train` are verbs, too."""
LEFT_OUT = "its optional folder was left out"


def record() -> dict[str, Any]:
    """Returns the options of each command. A command of an optional folder that is not there is `LEFT_OUT`."""
    found: dict[str, Any] = {}
    for verb, (module, first, _) in VERBS.items():
        try:
            found[f"sluice {verb}"] = _options_of(module, [first] if first else [])
        except ModuleNotFoundError as error:
            if not advice(error, verb):
                raise
            found[f"sluice {verb}"] = LEFT_OUT
    return found | {name: _options_of(module, []) for name, module in OTHERS.items()}


def _options_of(module: str, words: list[str]) -> dict[str, Any]:
    parsers: list[dict[str, Any]] = []

    def print_help(parser: argparse.ArgumentParser, *_: object) -> None:
        defaults = _defaults_above(sys._getframe(1))
        parsers.append(
            {
                _name(action): _described(action, defaults)
                for action in parser._actions
                if action.dest != "help"
            }
        )
        raise SystemExit(0)

    program = importlib.import_module(module).main
    with (
        mock.patch.object(argparse.ArgumentParser, "print_help", print_help),
        contextlib.suppress(SystemExit),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        program([*words, "--help"])
    assert len(parsers) == 1, f"{module} has printed no help of a parser"
    return parsers[0]


def _name(action: argparse.Action) -> str:
    return " ".join(action.option_strings) or action.dest


def _described(action: argparse.Action, defaults: dict[str, str]) -> str:
    """Describes an option in one line. A default that the parser lacks is that of the settings class."""
    given = "required" if action.required else f"default {defaults.get(action.dest, 'unknown')}"
    kind = type(action).__name__.removeprefix("_").removesuffix("Action")
    parts = {
        "metavar": action.metavar,
        "nargs": action.nargs,
        "bare": action.const,
        "choices": action.choices,
    }
    more = [f"{name} {value}" for name, value in parts.items() if value not in (None, True, False)]
    return ", ".join([kind, given, *more])


def _defaults_above(frame: Any) -> dict[str, str]:
    """Finds the settings classes that were handed to the parser's caller, and returns the defaults of their fields."""
    found: dict[str, str] = {}
    while frame is not None:
        for value in frame.f_locals.values():
            for kind in value if isinstance(value, tuple) else (value,):
                if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                    found = dict(_defaults_of(kind)) | found
        frame = frame.f_back
    return found


def _defaults_of(kind: type) -> Iterator[tuple[str, str]]:
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _defaults_of(hints[field.name])
        elif field.default is not dataclasses.MISSING:
            yield field.name, repr(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            yield field.name, repr(field.default_factory())
        else:
            yield field.name, "of the run"  # only options of training, which a checkpoint knows
