"""Plants one fault after the other in a copy of the sources, and lists the tests that fail.

    python -m tests.bed run --room etl --out FILE.jsonl [--jobs N] [--only NAME] [--first]
    python -m tests.bed table FILE…
    python -m tests.bed draw --seed 7 --faults 200 --rooms etl,dlrm --minutes 30 --out FILE.jsonl [--again]
    python -m tests.bed share FILE… [--survivors]

A run leaves out the faults that FILE holds already, so it can be continued. A test that also fails without the fault
does not count. With `--first`, the tests of a fault end at the first that fails, which tells holes in less time. The
copy has an environment of its own, whose Python finds the copy's sources in every process.

`draw` draws the faults by a program instead (`draw.py`, `operators.py`) and chooses the tests by the lines that they
execute. A second call goes on. `--again` runs the faults that survived once more, after tests were written.
`share` counts. Write equivalent faults, each with its argument, into `FILE.equivalents.toml` beside the results.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.bed.copies import Copy, Failures
from tests.bed.draw import Judge
from tests.bed.faults import ROOMS, Fault, read_faults
from tests.bed.share import print_share


class Bed:
    """Runs faults and writes a line of JSON for each. Several threads share it."""

    def __init__(self, out: Path, *, first: bool) -> None:
        self._first = first
        self._out, self._lock, self._local = out, threading.Lock(), threading.local()
        self._copies: list[Copy] = []
        self._folder = Path(tempfile.mkdtemp(prefix="bed-"))
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
            known = Failures()  # what fails without the fault
            while not caused:
                more = ("-x",) if self._first else ()
                with copy.planted(fault.file, fault.old, fault.new):
                    found = copy.run(
                        fault.tests, marks, *more, *(f"--deselect={test}" for test in known)
                    ).failures
                clean = (
                    copy.run([*found], marks).failures if found and "pytest" not in found else {}
                )
                known |= clean
                caused = {test: why for test, why in found.items() if test not in clean}
                if not clean:
                    break
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


def draw_faults(given: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    judge = Judge(given)
    try:
        judge.run()
    finally:
        judge.close()
    print_share([given.out])


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
    draws, shares = commands.add_parser("draw"), commands.add_parser("share")
    for name, kind, default in (
        ("seed", int, None),
        ("out", Path, None),
        ("rooms", str, ",".join(ROOMS[:4])),
        ("faults", int, 200),  # so many count
        ("minutes", float, 30),
        ("near", int, 6),  # test files that execute the line are tried
        ("each", float, 60),  # seconds that the tests of a fault take, as measured without one
        ("hang", float, 120),  # seconds after which tests hang
    ):
        draws.add_argument(f"--{name}", type=kind, default=default, required=default is None)
    draws.add_argument("--again", action="store_true", help="run the faults that survived again")
    shares.add_argument("files", nargs="+", type=Path)
    shares.add_argument("--survivors", action="store_true", help="print the faults that survived")
    given = parser.parse_args()
    if given.command == "run":
        run(given.room, given.out, given.jobs, given.only, first=given.first)
    elif given.command == "draw":
        draw_faults(given)
    elif given.command == "share":
        print_share(given.files, survivors=given.survivors)
    else:
        print_table(given.files)


if __name__ == "__main__":
    main()
