"""Runs pytest again and again, and writes each failed test to the file that BED_FAILURES names.

Each line of standard input holds pytest's arguments as JSON. Its answers are the process's number, then its exit
status. The processes are forks of one that has imported the large packages, which takes longer than most of the tests.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

_LARGE = ("pyarrow.dataset", "pyarrow.compute", "pandas", "torchrec")


class Failures:
    """A plugin of pytest. What it writes stays, also if the process is killed."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self) -> None:
        """Has the same code try the same examples, of which the first that fails is enough."""
        from hypothesis import Phase, settings  # pytest has to be there first

        settings.register_profile("bed", derandomize=True, phases=(Phase.explicit, Phase.generate))
        settings.load_profile("bed")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._note("running", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._note("failed", report.nodeid, report.longreprtext)
        elif report.when == "teardown":
            self._note("done", report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._note("failed", report.nodeid, report.longreprtext)

    def _note(self, what: str, test: str, text: str = "") -> None:
        errors = [line for line in text.splitlines() if line.startswith("E ")]
        why = " ".join((errors or text.splitlines() or [""])[0].split())[:160]
        with self._file.open("a") as file:
            file.write(json.dumps([what, test, why]) + "\n")


def main() -> None:
    for name in _LARGE:
        with suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        process = os.fork()
        if not process:
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nothing, stream)
            status = pytest.main(json.loads(line), [Failures(Path(os.environ["BED_FAILURES"]))])
            os._exit(status)
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
