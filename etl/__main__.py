"""The commands `sluice synth | show | check | vacuum`."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from sluice.etl.common.errors import UsageError
from sluice.etl.common.program import FAILED, run, say
from sluice.etl.common.settings import parse
from sluice.etl.common.suggest import nearest
from sluice.etl.table_commands import CheckRequest, ShowRequest, SynthRequest, VacuumRequest

COMMANDS = {"synth": SynthRequest, "show": ShowRequest, "check": CheckRequest, "vacuum": VacuumRequest}
_EXAMPLES = """examples:
  sluice synth --rows 1000000 --seed 1 --out logs/clicks.tsv
  sluice show table
  sluice check table --version 3"""
_USAGE = """usage: sluice COMMAND …

Synthetic raw logs, and a look at feature tables. (`sluice etl` and etl/job.py make tables.)

commands:
""" + "\n".join(f"  {name:7} {(kind.__doc__ or '').splitlines()[0]}" for name, kind in COMMANDS.items()) + f"""

sluice COMMAND --help tells more.

{_EXAMPLES}"""


def main(argv: list[str]) -> dict[str, Any] | None:
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return None
    if argv[0] not in COMMANDS:
        raise UsageError(f"no command {argv[0]!r}{nearest(argv[0], COMMANDS)}")
    kind: Any = COMMANDS[argv[0]]
    request = parse(kind, argv=argv[1:], prog=f"sluice {argv[0]}", description=kind.__doc__)
    found: dict[str, Any] | None = request.answer(say, _forget) if kind is VacuumRequest else request.answer(say)
    if found and found.get("problems"):
        print(json.dumps(found), flush=True)
        raise SystemExit(FAILED)
    return found


def _forget(path: str, table: str) -> int:
    from sluice.etl.packing import forget_copies  # loads numba, which other commands need not wait for

    return forget_copies(path, table)


def program() -> NoReturn:
    """Runs the whole program, as its command does."""
    run(main)


if __name__ == "__main__":
    program()
