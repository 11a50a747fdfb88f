"""Checks whether this machine and a table are fit for loading: `sluice doctor [TABLE]`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from sluice.common.lines import say
from sluice.common.settings import parse, setting
from sluice.etl.spec.code_options import CodeOptions

_EXAMPLES = """\
examples:
  sluice doctor
  sluice doctor data/clicks --clean
"""
_DESCRIPTION = """Looks at versions, cores, limits, worker processes and what dead runs left, and at a
table's columns. Exit code: 0 all is well, 1 something is not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What is checked in addition to the machine."""

    table: str = setting(
        "", "a feature table, or a folder of Parquet files", metavar="TABLE", positional=True
    )
    clean: bool = setting(False, "remove what dead runs left, and nothing else")
    code: CodeOptions = dataclasses.field(default_factory=CodeOptions)


def main(argv: list[str]) -> Mapping[str, Any] | None:
    """Prints a table for people and one JSON line; ends with 1 if something is wrong."""
    options = parse(
        DoctorOptions, argv, "sluice doctor", epilog=_EXAMPLES, description=_DESCRIPTION
    )
    from sluice.tools import doctor_checks as checks

    findings = [
        *checks.check_versions(),
        *checks.check_kernel(),
        *checks.check_training(),
        *checks.check_machine(),
        *checks.check_workers(),
        *checks.check_orphans(options.clean),
        *(checks.check_table(options.table, options.code) if options.table else ()),
    ]
    result = {
        "problems": [
            f"{finding.what}: {finding.value} ({finding.advice})".removesuffix(" ()")
            for finding in findings
            if finding.well is False
        ],
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }
    width = max(len(finding.what) for finding in findings)
    # What is wrong comes first.
    for finding in sorted(findings, key=lambda finding: finding.well is not False):
        mark = {True: "✓", False: "✗", None: "–"}[finding.well]
        say(f"{mark} {finding.what:<{width}}  {finding.value}")
        if finding.advice:
            say(f"  {'':<{width}}  → {finding.advice}")
    if result["problems"]:
        print(json.dumps(result), flush=True)
        raise SystemExit(1)
    return result
