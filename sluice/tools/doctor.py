"""Checks whether this machine and a table are fit for loading: `sluice doctor [TABLE]`."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sluice.common.settings import parse, setting
from sluice.etl.spec.code_options import CodeOptions

if TYPE_CHECKING:
    from sluice.tools.doctor_checks import Finding


_EXAMPLES = """\
examples:
  sluice doctor
  sluice doctor data/clicks --json
  sluice doctor --cache /mnt/nvme --clean
"""
_DESCRIPTION = (
    "Looks at versions, cores, limits, shared memory and what dead runs left, and at a table's checksums "
    "and store. Exit code: 0 all is well, 1 something is not."
)
_MARKS = {True: "✓", False: "✗", None: "–"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What is checked in addition to the machine."""

    table: str = setting(
        "", "a feature table, or a folder of Parquet files", metavar="TABLE", positional=True
    )
    cache: str | None = setting(
        None, "a cache of remote files, to be looked at for leftovers", metavar="DIR"
    )
    clean: bool = setting(False, "remove what dead runs left, and nothing else")
    json: bool = setting(False, "no table; all findings in the JSON line")
    code: CodeOptions = dataclasses.field(default_factory=CodeOptions)


def main(argv: list[str]) -> Mapping[str, Any] | None:
    """Prints a table for people and one JSON line; ends with 1 if something is wrong."""

    options = parse(
        DoctorOptions, argv, "sluice doctor", epilog=_EXAMPLES, description=_DESCRIPTION
    )

    from sluice.ingest.machine import Machine
    from sluice.tools import doctor_checks

    machine = Machine()
    findings = [
        *doctor_checks.versions(),
        *doctor_checks.training(),
        *doctor_checks.machine(machine),
        *doctor_checks.shared_memory(),
        *doctor_checks.workers(),
        *doctor_checks.leftovers(options.cache, options.table or None, options.clean),
        *(doctor_checks.table(options.table, options.code) if options.table else ()),
    ]
    result: dict[str, Any] = {
        "machine": {
            "system": platform.platform(),
            "processor": machine.model(),
            "cores": machine.cores(),
        },
        "limits": {"memory": machine.memory_limit(), "memory_used": machine.memory_used()},
        "problems": doctor_checks.problems(findings),
    }
    if options.json:
        result["findings"] = [dataclasses.asdict(finding) for finding in findings]
    else:
        print(as_table(findings), file=sys.stderr)
    if result["problems"]:
        print(json.dumps(result), flush=True)
        raise SystemExit(1)
    return result


def as_table(findings: Iterable[Finding]) -> str:
    """Returns a table. What is wrong comes first."""
    findings = sorted(findings, key=lambda finding: finding.well is not False)
    width = max(len(f.what) for f in findings)
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.well]} {finding.what:<{width}}  {finding.value}")
        if finding.advice:
            lines.append(f"  {'':<{width}}  → {finding.advice}")
    return "\n".join(lines)
