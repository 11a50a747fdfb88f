"""The commands `sluice bench`, `headroom`, `doctor` and `guess`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from sluice.etl.common.errors import UsageError
from sluice.etl.common.program import run
from sluice.ingest.knobs import nearest
from sluice.ingest.tools import bench, doctor, guess, headroom_cli

COMMANDS = {"bench": bench.main, "doctor": doctor.main, "guess": guess.main, "headroom": headroom_cli.main}
USAGE = """\
usage: sluice COMMAND …

commands:
  bench TABLE      load a feature table as a trainer would, and say how fast
  headroom TABLE   would faster loading help, and where?
  doctor [TABLE]   is this machine, and this table, fit for loading?
  guess FILES      write a spec for plain Parquet, to edit

sluice COMMAND --help tells more."""


def main(argv: list[str]) -> Mapping[str, Any] | None:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return None
    if argv[0] not in COMMANDS:
        raise UsageError(f"no command {argv[0]!r}{nearest(argv[0], COMMANDS)}")
    return COMMANDS[argv[0]](argv[1:])


def program() -> NoReturn:
    """Runs the whole program, as its command does."""
    run(main)


if __name__ == "__main__":
    program()
