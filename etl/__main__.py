"""The commands `sluice synth | show | check | vacuum`."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from sluice.common.lines import say
from sluice.common.program import FAILED, command_of, run
from sluice.common.settings import parse, setting
from sluice.etl.table_commands import CheckRequest, Say, ShowRequest, SynthRequest


@dataclass(frozen=True, kw_only=True)
class VacuumRequest:
    """Removes the files that no kept or pinned version needs.

    It removes data, fitted states, rejects and records that are older than a day. The versions that are not kept can
    then no longer be read. The command removes only files that jobs wrote. It follows no link, and lists the files of
    other programs that it keeps."""

    table: str = setting(help="the table's folder or URI", metavar="TABLE", positional=True)
    keep: int = setting(10, "newest versions to keep whole", metavar="N", least=1)
    dry_run: bool = setting(False, "list what would be removed, and remove nothing")

    def answer(self, say: Say) -> dict[str, Any]:
        from sluice.etl.table.store import TableStore
        from sluice.etl.table.vacuum import vacuum

        done = vacuum(
            TableStore(self.table),
            keep=self.keep,
            now=time.time(),
            dry_run=self.dry_run,
        )
        for path in done.files:
            say(f"{'would be removed' if self.dry_run else 'removed'}: {path}")
        for path in done.passed_over:
            say(f"kept: {path}, which is a link, or which no job of this table wrote")
        say(
            f"{len(done.files)} files, {done.bytes / 2**20:,.1f} MiB; kept: version "
            f"{', '.join(map(str, done.kept_versions))}"
        )
        return {
            "removed": len(done.files),
            "bytes": done.bytes,
            "kept_versions": list(done.kept_versions),
            "pinned": list(done.pinned),
            "passed_over": list(done.passed_over),
            "dry_run": self.dry_run,
        }


COMMANDS = {
    "synth": SynthRequest,
    "show": ShowRequest,
    "check": CheckRequest,
    "vacuum": VacuumRequest,
}
_EXAMPLES = """examples:
  sluice synth --rows 1000000 --seed 1 --out logs/clicks.tsv
  sluice show table
  sluice check table --version 3"""
_USAGE = (
    """usage: sluice COMMAND …

Makes synthetic raw logs, and inspects feature tables. (`sluice etl` and etl/job.py make tables.)

commands:
"""
    + "\n".join(
        f"  {name:7} {(kind.__doc__ or '').splitlines()[0]}" for name, kind in COMMANDS.items()
    )
    + f"""

Run sluice COMMAND --help for the options.

{_EXAMPLES}"""
)


def main(argv: list[str]) -> dict[str, Any] | None:
    if (name := command_of(argv, COMMANDS, _USAGE)) is None:
        return None
    kind: Any = COMMANDS[name]
    request = parse(kind, argv[1:], f"sluice {name}", description=kind.__doc__)
    answer: dict[str, Any] | None = request.answer(say)
    if answer and answer.get("problems"):
        print(json.dumps(answer, default=str), flush=True)
        raise SystemExit(FAILED)
    return answer


def program() -> NoReturn:
    """Runs the program as a command."""
    run(main)


if __name__ == "__main__":
    program()
