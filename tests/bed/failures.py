"""A plugin of pytest that writes each failed test to the file that BED_FAILURES names, also if the process is killed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_FILE = Path(os.environ["BED_FAILURES"])


def pytest_runtest_logstart(nodeid: str) -> None:
    _note("running", nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:
        _note("failed", report.nodeid, report.longreprtext)
    elif report.when == "teardown":
        _note("done", report.nodeid)


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _note("failed", report.nodeid, report.longreprtext)


def _note(what: str, test: str, text: str = "") -> None:
    errors = [line for line in text.splitlines() if line.startswith("E ")]
    why = " ".join((errors or text.splitlines() or [""])[0].split())[:160]
    with _FILE.open("a") as file:
        file.write(json.dumps([what, test, why]) + "\n")
