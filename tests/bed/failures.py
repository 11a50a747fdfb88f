"""Runs pytest again and again, and writes each failed test to the file that BED_FAILURES names.

Each line of standard input holds pytest's arguments as JSON, or the name of a module to import. The answers are the
process's number, then its exit status. The processes are forks of one that has imported the large packages, which takes
longer than most of the tests. When a process has ended, all that it left is ended too.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.bed.lines import MARKS

_SET_CHILD_SUBREAPER, _SET_PDEATHSIG = 36, 1
"""Of Linux's `prctl`."""
_PATIENCE_S = 5
_LARGE = ("pyarrow.dataset", "pyarrow.compute", "pandas", "torchrec")


class ExecutedLines:
    """A plugin of pytest. It writes which lines each test of one file marked (`lines.py`), at the end of the file.

    Lines of the collection, and of fixtures that tests share, belong to all tests of the file: the key is ""."""

    def __init__(self, out: Path) -> None:
        self._out, self._marks = out, getattr(builtins, MARKS)
        self._lines: dict[str, set[int]] = {}
        self._seconds: dict[str, float] = {}
        self._current = ""
        self._marks[:] = bytes(len(self._marks))

    def _take(self, test: str) -> None:
        places = [match.start() for match in re.finditer(b"\x01", self._marks[:])]
        self._marks[:] = bytes(len(self._marks))
        self._lines.setdefault(test, set()).update(places)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        if fixturedef.scope == "function":
            return (yield)
        self._take(self._current)
        result = yield
        self._take("")
        return result

    def pytest_collection_finish(self) -> None:
        self._take("")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._current = nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._take(report.nodeid)
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0) + report.duration

    def pytest_sessionfinish(self) -> None:
        lines = {test: sorted(places) for test, places in self._lines.items()}
        self._out.write_text(json.dumps({"lines": lines, "seconds": self._seconds}))


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
            self._note("uncollected", report.nodeid, report.longreprtext)

    def _note(self, what: str, test: str, text: str = "") -> None:
        errors = [line for line in text.splitlines() if line.startswith("E ")]
        why = " ".join((errors or text.splitlines() or [""])[0].split())[:160]
        with self._file.open("a") as file:
            file.write(json.dumps([what, test, why]) + "\n")


def _keep_descendants() -> None:
    """Has the kernel give this process what its descendants leave, and end it with its parent. So none is lost."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) or prctl(_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def _end_children() -> None:
    """Ends what a run has left: each process by its number, until there is none.

    Python's trackers of shared memory remove it and end, once the processes that they serve have ended."""
    patience = time.monotonic() + _PATIENCE_S
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                is_tracker = "resource_tracker" in " ".join(child.cmdline())
                if not is_tracker or time.monotonic() > patience:
                    child.kill()
        psutil.wait_procs(children, timeout=0.2)


def _answer(words: list[str]) -> int:
    """Runs pytest, or imports one module (`["import", NAME]`), and returns the exit status."""
    if words[0] == "import":
        importlib.import_module(words[1])
        return 0
    plugins: list[object] = [Failures(Path(os.environ["BED_FAILURES"]))]
    if "BED_LINES" in os.environ:
        plugins.append(ExecutedLines(Path(os.environ["BED_LINES"])))
    return pytest.main(words, plugins)


def main() -> None:
    _keep_descendants()
    for name in _LARGE:
        with suppress(ImportError):
            importlib.import_module(name)
    try:
        _serve()
    finally:
        _end_children()


def _serve() -> None:
    for line in sys.stdin:
        process = os.fork()
        if not process:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nothing, stream)
            try:
                os._exit(_answer(json.loads(line)))
            finally:
                os._exit(1)  # an import that failed
        print(process, flush=True)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        _end_children()
        print(status, flush=True)


if __name__ == "__main__":
    main()
