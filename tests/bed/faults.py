"""`Fault`: a small change of one file. The TOML files of this folder hold the faults, room by room.

A file's `[tests]` table names the tests that may find the faults of a source file. A fault may name its own.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ROOMS = ("etl", "ingest", "agent", "dlrm", "common")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One planted fault."""

    name: str
    file: str
    old: str
    """A text that occurs once in the file."""
    new: str
    effect: str
    """What a user would get."""
    tests: tuple[str, ...]
    """The test files, folders or tests that could find it."""
    equivalent: str = ""
    """Why no test can find it. Empty: a test can."""

    def problem(self) -> str:
        """Returns why the fault cannot be planted. Empty: it can."""
        path = ROOT / self.file
        times = path.read_text().count(self.old) if path.is_file() else 0
        missing = [name for name in self.tests if not (ROOT / name.partition("::")[0]).exists()]
        if times != 1:
            return f"{self.file} holds {self.old!r} {times} times, not once"
        return f"there is no {missing[0]}" if missing else ""


def read_faults(room: str) -> list[Fault]:
    """Returns the faults of a room, in the order of its file."""
    content = tomllib.loads((HERE / f"{room}.toml").read_text())
    return [
        Fault(**{**fault, "tests": tuple(fault.get("tests") or content["tests"][fault["file"]])})
        for fault in content["fault"]
    ]
