"""Plants one fault after the other in a copy of the sources, and lists the tests that fail.

    python -m tests.bed run --room etl --out FILE.jsonl [--jobs N] [--only NAME] [--first]
    python -m tests.bed table FILE…

A run leaves out the faults that FILE holds already, so it can be continued. A test that also fails without the fault
does not count. With `--first`, the tests of a fault end at the first that fails, which tells holes in less time. The
copy has an environment of its own, whose Python finds the copy's sources in every process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.bed.faults import ROOMS, ROOT, Fault, read_faults

_TEST_S, _RUN_S = 120, 1200
"""The longest time of one test, and of all tests of a fault."""
Failures = dict[str, str]
"""Test → the first line of its error."""


class Copy:
    """A copy of the tracked files, with an environment."""

    def __init__(self, folder: Path) -> None:
        self._root, bin_folder = folder / "sources", folder / "environment/bin"
        tracked = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE
        )
        for name in filter(None, tracked.stdout.decode().split("\0")):
            if os.path.lexists(ROOT / name):
                (self._root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self._root / name, follow_symlinks=False)
        venv.create(bin_folder.parent, symlinks=True)
        python = bin_folder / "python"
        packages = next(path for path in sys.path if path.endswith("site-packages"))
        own = next(bin_folder.parent.glob("lib/*/site-packages"))
        (own / "bed.pth").write_text(f"{self._root}\n{packages}\n")
        for program in filter(Path.is_file, Path(sys.executable).parent.iterdir()):
            text = program.read_bytes()
            if text.startswith(b"#!") and not (bin_folder / program.name).exists():
                head, _, rest = text.partition(b"\n")
                head = f"#!{python}".encode() if b"python" in head else head
                (bin_folder / program.name).write_bytes(head + b"\n" + rest)
                (bin_folder / program.name).chmod(0o755)
        self._python = python
        self._build_kernel()
        self._report = folder / "failures.jsonl"
        more = {"BED_FAILURES": str(self._report), "VIRTUAL_ENV": str(bin_folder.parent)}
        self._server = subprocess.Popen(
            [python, "-m", "tests.bed.failures"],
            cwd=self._root,
            env={**os.environ, **more},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, tests: Sequence[str], marks: str, *more: str) -> Failures:
        """Returns the tests that fail. A test that hangs, or ends the process, is one of them."""
        self._report.write_text("")
        options = ("-p", "no:cacheprovider", "-q", f"--timeout={_TEST_S}", "-m", marks)
        words = json.dumps([*options, "--continue-on-collection-errors", *more, *tests])
        assert self._server.stdin
        assert self._server.stdout
        print(words, file=self._server.stdin, flush=True)
        process = int(self._server.stdout.readline())
        killer = threading.Timer(_RUN_S, os.killpg, (process, signal.SIGKILL))
        killer.start()
        status = int(self._server.stdout.readline())
        killer.cancel()
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # what a test has left
        failures: Failures = {}
        running = ""
        for what, test, why in map(json.loads, self._report.read_text().splitlines()):
            if what == "failed":
                failures.setdefault(test, why)
            running = test if what == "running" else ""
        if running:
            failures.setdefault(running, "the process ended in this test")
        if status and not failures:
            failures["pytest"] = f"exit status {status}"
        return failures

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()

    def _build_kernel(self) -> None:
        """Builds the compiled inner loops anew if their sources are others."""
        subprocess.run([self._python, self._root / "kernel_build.py"], check=True)

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        path = self._root / fault.file
        text = path.read_text()
        # Python would take a compiled file of the same second and size for the changed one.
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
        path.write_text(text.replace(fault.old, fault.new))
        self._build_kernel()
        yield
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
        path.write_text(text)
        self._build_kernel()


class Bed:
    """Runs faults and writes a line of JSON for each. Several threads share it."""

    def __init__(self, out: Path, *, first: bool) -> None:
        self._first = first
        self._out, self._lock, self._local = out, threading.Lock(), threading.local()
        self._copies: list[Copy] = []
        self._folder = Path(tempfile.mkdtemp(prefix="sluice-bed-"))
        self.lines = read_lines([out]) if out.exists() else []

    def _write(self, line: dict[str, Any]) -> None:
        with self._lock, self._out.open("a") as file:
            self.lines.append(line)
            file.write(json.dumps(line) + "\n")

    def judge(self, fault: Fault, room: str) -> None:
        """Plants a fault and notes what fails."""
        if not hasattr(self._local, "copy"):
            self._local.copy = Copy(Path(tempfile.mkdtemp(dir=self._folder)))
            self._copies.append(self._local.copy)
        copy, began, caused = self._local.copy, time.monotonic(), Failures()
        problem = fault.problem()
        if not problem:
            marks = "" if fault.file.startswith("etl/spark/") else "not spark"  # which are dear
            clean = self._failing_without_fault(copy, fault.tests, marks)
            with copy.planted(fault):
                ended = ("-x", *(f"--deselect={test}" for test in clean)) if self._first else ()
                failures = copy.run(fault.tests, marks, *ended)
            caused = {test: why for test, why in failures.items() if test not in clean}
        status = "does not apply" if problem else "found" if caused else "not found"
        if fault.equivalent and status == "not found":
            status = "equivalent"
        seconds = round(time.monotonic() - began, 1)
        line = {"fault": fault.name, "room": room, "effect": fault.effect, "status": status}
        self._write(
            {
                **line,
                "tests": caused,
                "seconds": seconds,
                "text": problem or fault.equivalent,
            }
        )
        print(
            f"{room}: {fault.name}: {status} ({len(caused)} tests, {seconds:g} s)",
            flush=True,
        )

    def _failing_without_fault(self, copy: Copy, tests: Sequence[str], marks: str) -> Failures:
        known = {
            line["clean"]: line["tests"]
            for line in self.lines
            if "clean" in line and line["marks"] == marks
        }
        for test in tests:
            if test not in known:
                began = time.monotonic()
                known[test] = copy.run([test], marks)
                if "pytest" in known[test]:
                    raise RuntimeError(f"{test}: pytest ends with {known[test]['pytest']}")
                seconds = round(time.monotonic() - began, 1)
                line = {"clean": test, "marks": marks, "tests": known[test]}
                self._write({**line, "seconds": seconds})
                print(f"{test}: {len(known[test])} fail without a fault, {seconds:g} s", flush=True)
        return {name: why for test in tests for name, why in known[test].items()}

    def close(self) -> None:
        for copy in self._copies:
            copy.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def read_lines(paths: Sequence[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def run(rooms: Sequence[str], out: Path, jobs: int, only: str, *, first: bool) -> None:
    bed = Bed(out, first=first)
    done = {line["fault"] for line in bed.lines if "fault" in line}
    faults = [(fault, room) for room in rooms for fault in read_faults(room)]
    chosen = [
        pair for pair in faults if only == pair[0].name or (not only and pair[0].name not in done)
    ]
    try:
        with ThreadPoolExecutor(jobs) as threads:
            list(threads.map(lambda pair: bed.judge(*pair), chosen))
    finally:
        bed.close()


def print_table(paths: Sequence[Path]) -> None:
    """Prints each fault with the tests that find it, the counts, and the tests that alone find a fault."""
    lines = {
        line["fault"]: line for line in read_lines(paths) if "fault" in line
    }  # the last of a name
    print("| room | fault | what a user would get | found by |\n|---|---|---|---|")
    for name, line in lines.items():
        tests = [f"`{test.removeprefix('tests/')}`" for test in line["tests"]]
        more = f" and {len(tests) - 2} more" if len(tests) > 2 else ""
        by = ", ".join(tests[:2]) + more or f"**{line['status']}** {line['text']}"
        print(f"| {line['room']} | {name} | {line['effect']} | {by} |")
    counts = Counter((line["room"], line["status"]) for line in lines.values())
    print(
        "\n| room | faults | found | not found | equivalent | does not apply |\n|---|---|---|---|---|---|"
    )
    for room in (*ROOMS, "all"):
        some = Counter({s: n for (r, s), n in counts.items() if r == room})
        for (_, status), number in counts.items() if room == "all" else ():
            some[status] += number
        columns = [
            some[status] for status in ("found", "not found", "equivalent", "does not apply")
        ]
        print("|", " | ".join(map(str, (room, some.total(), *columns))), "|")
    alone = {name: [*line["tests"]] for name, line in lines.items() if len(line["tests"]) == 1}
    print(f"\n{len(alone)} faults are found by one test alone:\n")
    for name, (test,) in sorted(alone.items(), key=lambda pair: pair[1]):
        print(f"- `{test}`: {name}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bed")
    commands = parser.add_subparsers(required=True, dest="command")
    runs, tables = commands.add_parser("run"), commands.add_parser("table")
    runs.add_argument("--room", nargs="+", choices=ROOMS, default=ROOMS)
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--jobs", type=int, default=1)
    runs.add_argument("--only", default="", help="the name of one fault, which is run again")
    runs.add_argument("--first", action="store_true", help="end at the first test that fails")
    tables.add_argument("files", nargs="+", type=Path)
    given = parser.parse_args()
    if given.command == "run":
        run(given.room, given.out, given.jobs, given.only, first=given.first)
    else:
        print_table(given.files)


if __name__ == "__main__":
    main()
