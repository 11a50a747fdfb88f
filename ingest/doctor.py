"""`python -m ingest doctor [TABLE]`: is this machine, and this table, fit for loading?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from etl import code_options
from etl.names import Parser
from ingest import checkup
from ingest.checkup import Finding
from ingest.machine import Machine, cache_folder
from ingest.speed import speed_of

_EXAMPLES = """\
examples:
  python -m ingest doctor
  python -m ingest doctor data/clicks --json
  python -m ingest doctor --cache /mnt/nvme --clean
"""
_MARKS = {True: "✓", False: "✗", None: "–"}


def main(argv: list[str]) -> Mapping[str, Any] | None:
    """Prints a table for people and one JSON line; ends with 1 if something is not well."""
    parser = Parser(
        prog="python -m ingest doctor", epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Looks at versions, cores, limits, shared memory and what dead runs left, and at a table's "
                    "checksums and store. Exit code: 0 all is well, 1 something is not.")
    parser.add_argument("table", nargs="?", metavar="TABLE", help="a feature table, or a folder of Parquet files")
    parser.add_argument("--cache", metavar="DIR", help="a cache of remote files, to be looked at for leftovers")
    parser.add_argument("--clean", action="store_true", help="remove what dead runs left, and nothing else")
    parser.add_argument("--json", action="store_true", help="no table; all findings in the JSON line")
    code_options.add_options(parser)
    options = parser.parse_args(argv)
    found = Machine()
    findings = [*checkup.versions(), *checkup.machine(found), *checkup.shared_memory(), *checkup.workers(),
                *checkup.leftovers(options.cache, options.table, options.clean),
                *(checkup.table(options.table) if options.table else ())]
    result: dict[str, Any] = {
        "machine": {"system": platform.platform(), "processor": found.model(), "cores": found.cores(),
                    **dataclasses.asdict(speed_of(found.model(), cache_folder()))},
        "limits": {"memory": found.memory_limit(), "memory_used": found.memory_used()},
        "problems": checkup.problems(findings)}
    if options.json:
        result["findings"] = [dataclasses.asdict(finding) for finding in findings]
    else:
        print(as_table(findings), file=sys.stderr)
    if result["problems"]:
        print(json.dumps(result), flush=True)
        raise SystemExit(1)
    return result


def as_table(findings: Iterable[Finding]) -> str:
    findings = list(findings)
    width = max(len(f.what) for f in findings)
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.well]} {finding.what:<{width}}  {finding.value}")
        if finding.advice:
            lines.append(f"  {'':<{width}}  → {finding.advice}")
    return "\n".join(lines)
