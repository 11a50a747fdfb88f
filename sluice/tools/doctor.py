"""Checks whether this machine and a table are fit for loading: `sluice doctor [TABLE]`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import platform
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.common.number_checks import is_number
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
_TRIES = 5
_HASHED = 4 * 2**20
_COPIED = 32 * 2**20  # larger than most caches


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

    from sluice.ingest.machine import Machine, cache_folder
    from sluice.tools import doctor_checks

    found = Machine()
    findings = [
        *doctor_checks.versions(),
        *doctor_checks.machine(found),
        *doctor_checks.shared_memory(),
        *doctor_checks.workers(),
        *doctor_checks.leftovers(options.cache, options.table or None, options.clean),
        *(doctor_checks.table(options.table, options.code) if options.table else ()),
    ]
    result: dict[str, Any] = {
        "machine": {
            "system": platform.platform(),
            "processor": found.model(),
            "cores": found.cores(),
            **dataclasses.asdict(speed_of(found.model(), cache_folder())),
        },
        "limits": {"memory": found.memory_limit(), "memory_used": found.memory_used()},
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
    findings = list(findings)
    width = max(len(f.what) for f in findings)
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.well]} {finding.what:<{width}}  {finding.value}")
        if finding.advice:
            lines.append(f"  {'':<{width}}  → {finding.advice}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    core_bytes_per_s: float
    """The bytes that one core hashes (BLAKE2b) in a second: its speed at plain arithmetic."""
    memory_bytes_per_s: float
    """The bytes that one core reads and writes in a second while it copies what does not fit into any cache."""

    def __post_init__(self) -> None:
        for name in ("core_bytes_per_s", "memory_bytes_per_s"):
            value = getattr(self, name)
            if not is_number(value) or not value:
                raise ValueError(f"{name}: {value!r} is not a positive number")


def measure_speed(clock: Callable[[], float] = time.thread_time) -> Speed:
    """Measures in less than a second. Both speeds are measured in processor time, and the best of a few tries counts.
    So a loaded machine gives nearly the same numbers."""
    import numpy as np

    data, source = bytes(_HASHED), np.ones(_COPIED, np.uint8)
    target = np.empty_like(source)
    target[:] = source  # from now on the pages are mapped

    def best(work: Callable[[], object]) -> float:
        times = []
        for _ in range(_TRIES):
            began = clock()
            work()
            times.append(clock() - began)
        return max(min(times), 1e-9)

    def copy() -> None:
        target[:] = source

    return Speed(
        core_bytes_per_s=_HASHED / best(lambda: hashlib.blake2b(data)),
        memory_bytes_per_s=2 * _COPIED / best(copy),
    )


def speed_of(machine: str, folder: Path, measured: Callable[[], Speed] = measure_speed) -> Speed:
    """Returns the speed of this machine that `folder` remembers. If there is none, or it is damaged, it is measured and
    remembered. If the folder cannot be written, the speed is still returned."""
    path = folder / f"speed-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"
    try:
        return Speed(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        found = measured()
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(temporary, "x") as draft:
            json.dump(asdict(found), draft)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return found
