"""The commands `sluice synth | show | check | audit | vacuum`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from sluice.common.program import FAILED, USAGE, command_of, run, say
from sluice.common.settings import parse, setting
from sluice.etl.spec.code_options import CodeOptions
from sluice.etl.table_commands import CheckRequest, Say, ShowRequest, SynthRequest


@dataclass(frozen=True, kw_only=True)
class VacuumRequest:
    """Removes the files that no kept or pinned version needs.

    It removes data, fitted states, rejects and records that are older than a day, and the packed copies of these data.
    The versions that are not kept can then no longer be read. The command removes only files that jobs wrote. It
    follows no link, and lists the files of other programs that it keeps."""

    table: str = setting(help="the table's folder or URI", metavar="TABLE", positional=True)
    keep: int = setting(10, "newest versions to keep whole", metavar="N", least=1)
    dry_run: bool = setting(False, "list what would be removed, and remove nothing")

    def answer(self, say: Say) -> dict[str, Any]:
        from sluice.etl.table.store import TableStore
        from sluice.etl.table.vacuum import vacuum
        from sluice.tools.packing import forget_copies  # slow: it loads numba

        done = vacuum(
            TableStore(self.table),
            keep=self.keep,
            now=time.time(),
            dry_run=self.dry_run,
            forget=forget_copies,
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


@dataclass(frozen=True, kw_only=True)
class AuditRequest:
    """Checks whether a feature depends on its row's label, a test row's label, or later rows. Exits with 2 if one does.

    The command recomputes the features of a table from its raw input, or of the table that a spec makes. It flips
    labels and leaves out later rows. For each column that changes although it must not, it prints the operator, a row,
    and the values before and after. Nothing is published. For a table, pass all files that it was made from."""

    title = "what"
    subject: str = setting(
        help="a table's folder or URI, or a spec, a TOML file",
        metavar="TABLE|SPEC",
        positional=True,
    )
    input: tuple[str, ...] = setting(
        help="raw files, folders or globs", metavar="PATH", several=True
    )
    version: int | None = setting(None, "an older version of a table (default: the newest)")
    flips: int = setting(
        50, "number of rows whose labels are flipped, one by one", metavar="N", least=1
    )
    seed: int = setting(0, "seed for the choice of these rows")
    code: CodeOptions = field(default_factory=CodeOptions)

    def answer(self, say: Say) -> dict[str, Any]:
        from sluice.etl.audit import audit_spec, audit_table
        from sluice.etl.engines import choose, opened
        from sluice.etl.jobs.progress import JobProgress
        from sluice.etl.spec.spec import Spec
        from sluice.etl.table.table import FeatureTable

        table = (
            None
            if Path(self.subject).is_file()
            else FeatureTable.open(self.subject, self.version, allow_code=self.code.permission)
        )
        spec = table.spec() if table else Spec.read(self.subject)
        with opened(
            choose(None, spec, [], lambda _: None), self.input, JobProgress(sys.stderr)
        ) as engine_for:
            found = (
                audit_table(table, self.input, engine_for, flips=self.flips, seed=self.seed)
                if table
                else audit_spec(spec, self.input, engine_for, flips=self.flips, seed=self.seed)
            )
        for leak in found.leaks:
            say(leak.text)
        for what, times in found.tried.items():
            say(f"looked for {what}: {times} {'time' if times == 1 else 'times'}")
        say(
            f"{found.rows:,} of {found.table_rows:,} rows were recomputed from this input: "
            f"{len(found.leaks) or 'no'} {'leak' if len(found.leaks) == 1 else 'leaks'}"
        )
        return found.to_json()


COMMANDS = {
    "synth": SynthRequest,
    "show": ShowRequest,
    "check": CheckRequest,
    "audit": AuditRequest,
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
    found: dict[str, Any] | None = request.answer(say)
    if found and (found.get("problems") or found.get("leaks")):
        print(json.dumps(found, default=str), flush=True)
        raise SystemExit(FAILED if "problems" in found else USAGE)
    return found


def program() -> NoReturn:
    """Runs the program as a command."""
    run(main)


if __name__ == "__main__":
    program()
