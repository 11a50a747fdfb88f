"""The commands `sluice synth | show | check | vacuum`."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from sluice.etl.common.errors import UsageError
from sluice.etl.common.program import FAILED, run, say
from sluice.etl.common.settings import parse, setting
from sluice.etl.common.suggest import nearest
from sluice.etl.table.store import TableStore
from sluice.etl.table.vacuum import vacuum
from sluice.etl.table_commands import CheckRequest, Say, ShowRequest, SynthRequest


@dataclass(frozen=True, kw_only=True)
class VacuumRequest:
    """Removes the files that no kept or pinned version needs.

    These are data, fitted states, rejects and records that neither the newest versions nor a pinned one needs, if they
    are older than a day, and packed copies of these data beside them. Older versions can then no longer be read. Only
    what jobs wrote goes; links are not followed, and what is passed over is named."""

    table: str = setting(help="the table's folder or URI", metavar="TABLE", positional=True)
    keep: int = setting(10, "newest versions to keep whole", metavar="N", least=1)
    dry_run: bool = setting(False, "say what would go, and remove nothing")

    def answer(self, say: Say) -> dict[str, Any]:
        from sluice.etl.packing import forget_copies  # loads numba, which other commands need not wait for

        done = vacuum(TableStore(self.table), keep=self.keep, now=time.time(), dry_run=self.dry_run,
                      forget=forget_copies)
        for path in done.files:
            say(f"{'would go' if self.dry_run else 'removed'}: {path}")
        for path in done.passed_over:
            say(f"passed over: {path}, which is a link, or which no job of this table wrote")
        say(f"{len(done.files)} files, {done.bytes / 2**20:,.1f} MiB; kept: version "
            f"{', '.join(map(str, done.kept_versions))}")
        return {"removed": len(done.files), "bytes": done.bytes, "kept_versions": list(done.kept_versions),
                "pinned": list(done.pinned), "passed_over": list(done.passed_over), "dry_run": self.dry_run}


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
    found: dict[str, Any] | None = request.answer(say)
    if found and found.get("problems"):
        print(json.dumps(found), flush=True)
        raise SystemExit(FAILED)
    return found


def program() -> NoReturn:
    """Runs the whole program, as its command does."""
    run(main)


if __name__ == "__main__":
    program()
