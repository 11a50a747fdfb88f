"""`Reach`: which tests execute a line of the product, and how long each test takes.

It is measured once for each test file and kept in a file, of which a later call reads what is still true.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.bed.copies import Copy, list_files
from tests.bed.faults import HERE, ROOMS, ROOT
from tests.bed.lines import place_lines
from tests.product import HOMES

PRODUCT = ("etl", "ingest", "agent", "dlrm", "sluice")
_FILE_S = 400
"""The longest time of all tests of a file."""


@dataclass(frozen=True, slots=True)
class ReachedTest:
    """A test that executes a line."""

    name: str
    seconds: float

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


class Reach:
    """Looks up the tests of a line. `files` are the product's files, and `folder` takes a copy of them."""

    def __init__(self, out: Path, files: Sequence[str], folder: Path) -> None:
        self._out, self._files, self._folder = out, files, folder
        self._copy: Copy | None = None
        self._places = place_lines(ROOT, files)
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        digest = digest_of(files)
        if lines and lines[0]["sources"] != digest:
            raise SystemExit(
                f"{out} was measured on other sources: give another file, or delete it"
            )
        if not lines:
            out.write_text(json.dumps({"sources": digest}) + "\n")
        self._known: dict[tuple[str, str], dict[str, Any]] = {}
        for line in lines[1:]:
            self._keep(line)

    def _keep(self, line: dict[str, Any]) -> None:
        places = {test: set(lines) for test, lines in line["lines"].items()}
        self._known[line["tests"], line["marks"]] = {**line, "lines": places}

    def measured(self, marks: str) -> list[str]:
        """Returns the test files that were measured."""
        return [name for name, kind in self._known if kind == marks]

    def measure(self, name: str, marks: str) -> None:
        """Measures a test file, unless it was measured as it is now."""
        known = self._known.get((name, marks))
        if known is not None and known["digest"] == digest_of([name]):
            return
        if self._copy is None:
            self._copy = Copy(self._folder / "lines", self._files)
        line = self._measure(self._copy, name, marks)
        failed = f", {len(line['failed'])} fail" if line["failed"] else ""
        print(f"{name}: {len(line['seconds'])} tests, {line['took']:g} s{failed}", flush=True)

    def close(self) -> None:
        if self._copy is not None:
            self._copy.close()

    def _measure(self, copy: Copy, name: str, marks: str) -> dict[str, Any]:
        began = time.monotonic()
        failures = copy.run([name], marks, run_s=_FILE_S).failures
        content = {"lines": {}, "seconds": {}}
        if copy.lines.exists():
            content = json.loads(copy.lines.read_text())
        line = {
            "tests": name,
            "marks": marks,
            "digest": digest_of([name]),
            "took": round(time.monotonic() - began, 1),
            "failed": failures,
            **content,
        }
        with self._out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._keep(line)
        return line

    def tests_of(self, file: str, line: int, tests: str, marks: str) -> list[ReachedTest]:
        """Returns the tests of a test file that execute a line and pass, the quickest first.

        A line that the tests of a file share, such as one of an import, counts for all of them."""
        place, known = self._places[file] + line, self._known[tests, marks]
        shared = place in known["lines"].get("", ())
        found = [
            ReachedTest(test, seconds)
            for test, seconds in known["seconds"].items()
            if test not in known["failed"] and (shared or place in known["lines"].get(test, ()))
        ]
        return sorted(found, key=lambda test: (test.seconds, test.name))


def nearest_tests(file: str) -> list[str]:
    """Returns the test files that may test a product file, the most likely first.

    These are the ones that a table of faults names for it, one of the same name, then those that import it, then those
    of its room that mention its name. Small files come first. Last come those that import it by other files."""
    sources = {
        name: with_homes((ROOT / name).read_text()) for name in list_files() if name.endswith(".py")
    }
    texts = {
        name: text
        for name, text in sources.items()
        if name.startswith("tests/") and Path(name).match("test_*.py")
    }
    module, room = module_of(file), file.split("/")[0]
    word = re.compile(rf"\b{re.escape(Path(file).stem)}\b")
    near = {
        name: module not in text
        for name, text in texts.items()
        if module in text or (name.startswith(f"tests/{room}/") and word.search(text))
    }
    named = [
        name
        for entry in _table().get(file, ())
        for name in texts
        if name.startswith(entry.partition("::")[0])
    ]
    named += [name for name in near if Path(name).stem == f"test_{Path(file).stem}"]
    others = sorted(near, key=lambda name: (near[name], len(texts[name])))
    far = (name for name in _importing(file, sources) if name in texts)
    return list(dict.fromkeys([*named, *others, *far]))


def _importing(file: str, sources: Mapping[str, str]) -> Iterator[str]:
    """Yields the files that import a file, then those that import these, and so on."""
    known, ring = {file}, [file]
    while ring:
        modules = [rf"from {re.escape(module_of(name))} import" for name in ring]
        pattern = re.compile("|".join(modules))
        ring = [
            name for name, text in sources.items() if name not in known and pattern.search(text)
        ]
        known.update(ring)
        yield from sorted(ring, key=lambda name: len(sources[name]))


def with_homes(text: str) -> str:
    """Returns a file's text, with the imports that `tests.product` makes for it."""
    found = re.search(r"from tests\.product import (\([^)]*\)|.*)", text)
    names = re.findall(r"\w+", found[1]) if found else ()
    homes = {HOMES[name] for name in names if name in HOMES}
    return "\n".join([text, *(f"from {home} import" for home in sorted(homes))])


def module_of(file: str) -> str:
    name = file.removesuffix(".py").replace("/", ".")
    return name if name.startswith(("sluice.", "tests.")) else f"sluice.{name}"


@cache
def _table() -> dict[str, list[str]]:
    return {
        file: tests
        for room in ROOMS
        for file, tests in tomllib.loads((HERE / f"{room}.toml").read_text())["tests"].items()
    }


def digest_of(names: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]
