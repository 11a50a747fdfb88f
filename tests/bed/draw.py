"""Draws faults by a seed, and plants one after the other until a number or a time is reached (`Judge`).

The order of the draws depends on the sources, the rooms and the seed alone. So a second call goes on where the first
one ended. An operator is drawn first and its place then: each operator has about the same number of faults.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bed.copies import Copy, list_files
from tests.bed.faults import HERE, ROOMS, ROOT
from tests.bed.operators import Mutation, list_mutations
from tests.bed.reach import Reach, ReachedTest, digest_of, module_of, nearest_tests
from tests.bed.share import read_results

_IMPORT_S, _TIMES = 120.0, 4.0
"""How long an import may take, and how many times as long as without a fault its tests may take."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a fault: found, survived, or fails at import. A test with its error finds it."""

    status: str
    test: str = ""
    why: str = ""


def list_sources(room: str, *, whole: bool = False) -> list[str]:
    """Returns the files of a room that get faults, or all of them."""
    without = tuple(tomllib.loads((HERE / "drawn.toml").read_text())[room]["without"])
    without = () if whole else without
    folder = "sluice/" if room == "common" else f"{room}/"
    return [
        name
        for name in list_files()
        if name.startswith(folder) and name.endswith(".py") and not name.startswith(without)
        and not (ROOT / name).is_symlink()
    ]  # fmt: skip


def draw(mutations: dict[str, Sequence[Mutation]], seed: int) -> Iterator[tuple[str, Mutation]]:
    """Yields each fault once with its room: rooms by their number of faults, operators evenly, places evenly."""
    rng = random.Random(seed)
    left: dict[str, dict[str, list[Mutation]]] = {}
    for room, some in mutations.items():
        left[room] = defaultdict(list)
        for mutation in some:
            left[room][mutation.operator].append(mutation)
    sizes = {room: len(some) for room, some in mutations.items()}
    while any(left.values()):
        rooms = [room for room in left if left[room]]
        (room,) = rng.choices(rooms, [sizes[room] for room in rooms])
        operator = rng.choice(sorted(left[room]))
        some = left[room][operator]
        yield room, some.pop(rng.randrange(len(some)))
        if not some:
            del left[room][operator]


def choose_tests(tests: Sequence[ReachedTest], seconds: float) -> list[ReachedTest]:
    """Returns the first tests that take so long together at most, and at least one of them."""
    chosen, total = [], 0.0
    for test in tests:
        total += test.seconds
        if chosen and total > seconds:
            break
        chosen.append(test)
    return chosen


class Judge:
    """Plants drawn faults in a copy and appends a line of JSON for each to a file.

    `given` holds the options of the program: seed, out, rooms, faults, minutes, near, each, hang, again."""

    def __init__(self, given: Any) -> None:
        self._given = given
        names = given.rooms.split(",")
        if unknown := set(names) - set(ROOMS):
            raise SystemExit(f"there is no room {unknown.pop()!r}: give some of {','.join(ROOMS)}")
        self._sources = {room: list_sources(room) for room in names}
        files = [name for some in self._sources.values() for name in some]
        head = {"seed": given.seed, "rooms": given.rooms, "sources": digest_of(files)}
        lines = read_results(given.out) or [head]
        if lines[0] != head:
            raise SystemExit(
                f"{given.out} was drawn with another seed, other rooms or other sources: give another file to --out"
            )
        self._done = {line["fault"]: line for line in lines[1:]}
        if not given.out.exists():
            self._write(head)
        self._folder = Path(tempfile.mkdtemp(prefix="bed-"))
        product = [name for room in ROOMS for name in list_sources(room, whole=True)]
        self._reach = Reach(given.out.with_suffix(".lines.jsonl"), product, self._folder)
        self._copy: Copy | None = None
        self._deadline = time.monotonic() + 60 * given.minutes

    def run(self) -> None:
        """Judges faults until enough of them count, or the time is over.

        With `again`, the faults that survived are judged once more, and no others."""
        mutations = {
            room: [m for name in names for m in list_mutations(name, (ROOT / name).read_text())]
            for room, names in self._sources.items()
        }
        counted = 0
        for room, mutation in draw(mutations, self._given.seed):
            if counted == self._given.faults:
                break
            known = self._done.get(mutation.name)
            if (known and known["status"] == "survived") if self._given.again else not known:
                known = self._judge(room, mutation)
                if known is None:
                    break  # the time is over
                print(
                    f"{counted}: {known['status']}: {mutation.name} ({known['seconds']:g} s)",
                    flush=True,
                )
            counted += known is not None and known["status"] != "fails at import"

    def _judge(self, room: str, mutation: Mutation) -> dict[str, Any] | None:
        """Plants a fault, runs tests that execute its line, and returns what came of it. None: the time is over."""
        began = time.monotonic()
        seconds, run, left, files = self._given.each, 0, 0, 0
        verdict = Verdict("survived")
        for name, marks, is_last_resort in self._list_tests(mutation.file):
            if files and is_last_resort:
                break
            if time.monotonic() > self._deadline:
                return None
            self._reach.measure(name, marks)
            reached = self._reach.tests_of(mutation.file, mutation.line, name, marks)
            chosen = choose_tests(reached, seconds)
            seconds -= sum(test.seconds for test in chosen)
            run, left = run + len(chosen), left + len(reached) - len(chosen)
            if chosen:
                verdict = self._plant(mutation, chosen, marks)
            files += bool(chosen)
            if verdict.status != "survived" or seconds <= 0 or files == self._given.near:
                break
        line = {"fault": mutation.name, "room": room, "tests": run, "left": left}
        line |= {
            **asdict(mutation),
            **asdict(verdict),
            "seconds": round(time.monotonic() - began, 1),
        }
        self._write(line)
        return line

    def _list_tests(self, file: str) -> Iterator[tuple[str, str, bool]]:
        """Yields test files with marks of tests: the nearest ones, measured ones, then what is only tried if none of
        these executes the line."""
        marks = "" if file.startswith("etl/spark/") else "not spark"
        names = nearest_tests(file)
        first = dict.fromkeys([*names[: 2 * self._given.near], *self._reach.measured(marks)])
        yield from ((name, marks, False) for name in first)
        yield from ((name, marks, True) for name in names if name not in first)
        if marks and file.startswith("etl/"):
            yield from ((name, "", True) for name in names)

    def _plant(self, mutation: Mutation, tests: Sequence[ReachedTest], marks: str) -> Verdict:
        """Runs tests with a fault. A test that fails finds it, if it passes without the fault."""
        if self._copy is None:
            self._copy = Copy(self._folder / "faults")
        copy, left = self._copy, [test.name for test in tests]
        source = (ROOT / mutation.file).read_text()
        limit_s = self._given.hang + _TIMES * sum(test.seconds for test in tests)
        while left:
            with copy.planted(mutation.file, source, mutation.apply(source)):
                outcome = copy.run(left, marks, "-x", test_s=limit_s / 2, run_s=limit_s)
                fails = outcome.uncollected or (
                    outcome.failed
                    and not outcome.any_passed
                    and not copy.imports(module_of(mutation.file), _IMPORT_S)
                )
            if fails:
                return Verdict("fails at import", why=next(iter(outcome.failures.values())))
            if not outcome.failed:
                break
            test, why = next(iter(outcome.failed.items()))
            some = [test] if test in left else left
            if not copy.run(some, marks, test_s=limit_s / 2, run_s=limit_s).failures:
                return Verdict("found", test, why)
            left = [name for name in left if name not in some]
        return Verdict("survived")

    def _write(self, line: dict[str, Any]) -> None:
        with self._given.out.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._reach.close()
        if self._copy is not None:
            self._copy.close()
        shutil.rmtree(self._folder, ignore_errors=True)
