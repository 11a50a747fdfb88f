"""The commands `sluice bench`, `sluice doctor`, `sluice forget`, `sluice guess` and `sluice pack`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NoReturn

from sluice.common.program import command_of, run

COMMANDS = ("bench", "doctor", "forget", "guess", "pack")
USAGE = """\
usage: sluice COMMAND …

commands:
  bench TABLE      load a feature table as a trainer would, say how fast, and what would help
  doctor [TABLE]   is this machine, and this table, fit for loading?
  forget TABLE     remove one user, or another value, from a feature table and its runs
  guess FILES      write a spec for plain Parquet, to edit
  pack SOURCE OUT  rewrite plain Parquet in the layout that a loader reads fastest

sluice COMMAND --help tells more."""


def main(argv: list[str]) -> Mapping[str, Any] | None:
    name = command_of(argv, COMMANDS, USAGE)
    # Only the command's own program is imported, so that a typo is reported at once.
    return import_module(f"sluice.tools.{name}").main(argv[1:]) if name else None


def program() -> NoReturn:
    """Runs the program `sluice`, for the commands above."""
    run(main)


if __name__ == "__main__":
    program()
