"""`Copy`: a copy of the sources with an environment, in which tests run with a fault planted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bed.faults import ROOT
from tests.bed.lines import prepare

TEST_S, RUN_S = 120, 1200
"""The longest time of one test, and of all tests of a fault."""
Failures = dict[str, str]
"""Test → the first line of its error."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of tests came to."""

    failed: Failures
    uncollected: Failures
    """The test files that could not be imported."""
    any_passed: bool

    @property
    def failures(self) -> Failures:
        return {**self.uncollected, **self.failed}


class Copy:
    """A copy of the project's files, with an environment whose Python finds them in every process.

    With `marked`, names of product files, each process marks the lines of them that it executes (`lines.py`)."""

    def __init__(self, folder: Path, marked: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._root, environment = folder / "sources", folder / "environment"
        for name in list_files():
            (self._root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self._root / name, follow_symlinks=False)
        make_environment(environment, self._root)
        self._python = environment / "bin/python"
        self._build_kernel()
        self._report, self.lines = folder / "failures.jsonl", folder / "lines"
        self._temporary = folder / "t"  # short: sockets have short names
        more = {
            "BED_FAILURES": str(self._report),
            "VIRTUAL_ENV": str(environment),
            "PYTHONPATH": str(self._root),
            "TMPDIR": str(self._temporary),
        }
        if marked:
            prepare(environment, self._root, marked)
            (path_file,) = environment.glob("lib/*/site-packages/bed.pth")
            start = f"import tests.bed.lines; tests.bed.lines.install({str(environment)!r})\n"
            path_file.write_text(path_file.read_text() + start)
            more["BED_LINES"] = str(self.lines)
        self._temporary.mkdir()
        self._server = subprocess.Popen(
            [self._python, "-m", "tests.bed.failures"],
            cwd=self._root,
            env={**os.environ, **more},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(
        self,
        tests: Sequence[str],
        marks: str,
        *more: str,
        test_s: float = TEST_S,
        run_s: float = RUN_S,
    ) -> Outcome:
        """Returns the tests that fail. A test that hangs, or ends the process, is one of them."""
        self._report.write_text("")
        self.lines.unlink(missing_ok=True)
        options = ("-p", "no:cacheprovider", "-q", f"--timeout={test_s:g}", "-m", marks)
        status = self._ask(
            [*options, "--continue-on-collection-errors", *more, *tests], seconds=run_s
        )
        failed, uncollected = Failures(), Failures()
        running, any_passed = "", False
        for what, test, why in map(json.loads, self._report.read_text().splitlines()):
            if what == "failed":
                failed.setdefault(test, why)
            elif what == "uncollected":
                uncollected.setdefault(test, why)
            running = test if what == "running" else ""
            any_passed |= what == "done" and test not in failed
        if running:
            failed.setdefault(running, "the process ended in this test")
        if status and not failed and not uncollected:
            failed["pytest"] = f"exit status {status}"
        return Outcome(failed, uncollected, any_passed)

    def imports(self, module: str, seconds: float) -> bool:
        """Whether a module can be imported."""
        return self._ask(["import", module], seconds=seconds) == 0

    def _ask(self, words: Sequence[str], *, seconds: float) -> int:
        """Has the server run something for so long at most, and returns the exit status. Nothing of it is left."""
        assert self._server.stdin
        assert self._server.stdout
        print(json.dumps(words), file=self._server.stdin, flush=True)
        process = int(self._server.stdout.readline())
        killer = threading.Timer(seconds, os.kill, (process, signal.SIGKILL))
        killer.start()
        try:
            status = int(self._server.stdout.readline())
        finally:
            killer.cancel()
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(exist_ok=True)
        return status

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()

    @contextmanager
    def planted(self, file: str, old: str, new: str) -> Iterator[None]:
        """Has `new` in place of the text `old` in one file."""
        path = self._root / file
        text = path.read_text()
        self._write(path, text.replace(old, new))
        try:
            yield
        finally:
            self._write(path, text)

    def _build_kernel(self) -> None:
        """Builds the compiled inner loops anew if their sources are others."""
        if (self._root / "kernel_build.py").exists():
            subprocess.run([self._python, self._root / "kernel_build.py"], check=True)

    def _write(self, path: Path, text: str) -> None:
        # Python would take a compiled file of the same second and size for the changed one. What numba has compiled
        # lies there too, and names the moment of its source.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
        path.write_text(text)
        if path.suffix != ".py":
            self._build_kernel()


def list_files() -> list[str]:
    """Returns the files of the project: the tracked ones, and new ones that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    names = filter(None, listed.stdout.decode().split("\0"))
    return [name for name in names if os.path.lexists(ROOT / name)]


def make_environment(folder: Path, root: Path) -> None:
    """Makes an environment that finds the sources in `root`, and the packages of this one."""
    venv.create(folder, symlinks=True)
    bin_folder = folder / "bin"
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    own = next(folder.glob("lib/*/site-packages"))
    (own / "bed.pth").write_text(f"{root}\n{packages}\n")
    for program in filter(Path.is_file, Path(sys.executable).parent.iterdir()):
        text = program.read_bytes()
        if text.startswith(b"#!") and not (bin_folder / program.name).exists():
            head, _, rest = text.partition(b"\n")
            head = f"#!{bin_folder / 'python'}".encode() if b"python" in head else head
            (bin_folder / program.name).write_bytes(head + b"\n" + rest)
            (bin_folder / program.name).chmod(0o755)
