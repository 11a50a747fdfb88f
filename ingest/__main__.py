"""The commands `sluice bench`, `sluice doctor` and `sluice guess`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from sluice.common.program import command_of, run

COMMANDS = ("bench", "doctor", "guess")
USAGE = """\
usage: sluice COMMAND …

commands:
  bench TABLE      load a feature table as a trainer would, say how fast, and what would help
  doctor [TABLE]   is this machine, and this table, fit for loading?
  guess FILES      write a spec for plain Parquet, to edit

sluice COMMAND --help tells more."""


def main(argv: list[str]) -> Mapping[str, Any] | None:
    name = command_of(argv, COMMANDS, USAGE)
    return _command(name)(argv[1:]) if name else None


def _command(name: str) -> Callable[[list[str]], Mapping[str, Any] | None]:
    """Returns the program of a command. Imports only this one, so that a typo is reported at once."""
    if name == "guess":
        from sluice.tools import guess

        return guess.main
    if name == "doctor":
        from sluice.tools import doctor

        return doctor.main
    from sluice.tools import bench

    return bench.main


def program() -> NoReturn:
    """Runs the program `sluice`, for the commands above."""
    run(main)


if __name__ == "__main__":
    program()
