"""Petastorm's own tests, as its wheel brings them, on today's Arrow through `tests.petastorm_folders.compat`.

    make test-petastorm                                  # all of them, a quarter of an hour
    python -m tests.petastorm_own test_parquet_reader    # some files

Those of `make_batch_reader` and `make_spark_converter` run a second time, against those of `sluice.petastorm`.
A `sitecustomize` calls it, so that every process of the tests has it: pytest's, the
workers of Petastorm's process pool, and Spark's. Failures are told with their reason; one that has no known reason is
ours until it is explained, and the exit status is 1. A test that fails and then passes alone is told as such.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sluice.common.errors import UsageError
from sluice.common.program import run, say

LEFT_OUT = {
    "test_reading_legacy_datasets": "reads pickled datasets of old versions, which are not in the wheel",
    "test_hdfs_namenode": "tests a client over Arrow's old HDFS driver, which is gone; no reader is in it",
}
THROUGH_OURS = ("test_parquet_reader", "test_spark_dataset_converter")
# What a failure's text holds, and whose it is.
REASONS = (
    (r"has no meaning here", "sluice.petastorm refuses the option by its name"),
    (
        r"pandas objects and dtype-less sequences",
        "pandas 3: a Series and a list are not combined any more",
    ),
    (r"No module named '(s3fs|gcsfs)'", "needs s3fs and gcsfs, which are not installed"),
    (r"No module named 'torchvision'", "needs torchvision, which is not installed"),
    (
        r"test_torch_tensorable_types\[uint",
        "torch has uint16 and uint32 by now; the test is sure that it has not",
    ),
    (
        r"exceptions must be derived from Warning, not <class 'NoneType'>",
        "pytest 8: pytest.warns(None) is gone",
    ),
    (
        r"test_workers_die_when_main_process_dies",
        "gives a process two seconds to see that its parent has died",
    ),
)
# Names that only the tests themselves use, and that Python and pandas have removed.
_SITECUSTOMIZE = """\
import inspect, sys
from tests.petastorm_folders import compat

compat()
inspect.getargspec = inspect.getfullargspec
if any("pytest" in word for word in sys.orig_argv):
    import pandas.testing
    import pandas.util
    sys.modules["pandas.util.testing"] = pandas.util.testing = pandas.testing
"""
# Petastorm's doors lead to ours.
_OURS = """\
    import petastorm.reader
    import sluice.petastorm as ours
    petastorm.make_batch_reader = petastorm.reader.make_batch_reader = ours.make_batch_reader
    import petastorm.spark
    petastorm.spark.make_spark_converter = ours.make_spark_converter
"""
# Petastorm's conftest speaks to a plugin for log files, which is not wanted here.
_HOOKS = """\
class Hooks:
    def pytest_logger_config(self, logger_config):
        ""


def pytest_addhooks(pluginmanager):
    pluginmanager.add_hookspecs(Hooks)
"""
ROOT = Path(__file__).resolve().parents[1]
PER_TEST_S = 240


@dataclass(frozen=True, slots=True)
class Result:
    """One test: passed, skipped or failed, and why."""

    file: str
    name: str
    outcome: str
    text: str = ""

    @property
    def reason(self) -> str | None:
        """None: nobody knows yet."""
        told = f"{self.name}\n{self.text}"
        return next(
            (why for pattern, why in REASONS if re.search(pattern, told, re.IGNORECASE)), None
        )


def results_of(report: Path, file: str) -> list[Result]:
    """What pytest's XML says."""
    found = []
    for case in ET.parse(report).getroot().iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error")), None)
        skipped = case.find("skipped")
        text = "" if bad is None else f"{bad.get('message', '')}\n{bad.text or ''}"
        outcome = "failed" if bad is not None else "skipped" if skipped is not None else "passed"
        within = case.get("classname", "").rpartition(".")[2]
        name = case.get("name", "") if within in ("", file) else f"{within}::{case.get('name')}"
        found.append(Result(file, name, outcome, text))
    return found


class Suite:
    """Runs files of Petastorm's tests in processes of their own; datasets made by Spark are kept from file to file."""

    def __init__(self, folder: Path, *, through_ours: bool = False):
        self._folder, self.prefix = folder, "sluice.petastorm/" if through_ours else ""
        spec = find_spec("petastorm")
        if spec is None or not spec.submodule_search_locations:
            raise UsageError("Petastorm is not installed")
        self.package = Path(spec.submodule_search_locations[0])
        (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE + (_OURS if through_ours else ""))
        (folder / "petastorm_hooks.py").write_text(_HOOKS)
        (folder / "pytest.ini").write_text("[pytest]\n")

    @property
    def files(self) -> list[Path]:
        return sorted(self.package.rglob("tests/test_*.py"))

    def run(self, file: Path, only: Sequence[str] = ()) -> list[Result]:
        """All tests of a file, or those named."""
        report, name = self._folder / "report.xml", self.prefix + file.stem
        report.unlink(missing_ok=True)
        which = [f"{file}::{name}" for name in only] or [str(file)]
        cached = (
            ["-Y"] if file.parent == self.package / "tests" else []
        )  # an option of the conftest there
        ended = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-c",
                self._folder / "pytest.ini",
                "--rootdir",
                self.package.parent,
                "-o",
                f"cache_dir={self._folder / 'cache'}",
                "--basetemp",
                self._folder / f"tmp-{file.stem}-{len(only)}",
                "-p",
                "petastorm_hooks",
                "--timeout",
                str(PER_TEST_S),
                "--junitxml",
                report,
                *which,
                *cached,
            ],
            capture_output=True,
            text=True,
            check=False,
            cwd=self._folder,
            env={
                **os.environ,
                "PYTHONPATH": f"{self._folder}:{ROOT}",
                "PYSPARK_PYTHON": sys.executable,
                "SPARK_LOCAL_IP": "127.0.0.1",
                "TF_CPP_MIN_LOG_LEVEL": "3",
            },
        )
        if not report.exists():
            return [
                Result(name, "(the whole file)", "failed", (ended.stdout + ended.stderr)[-4000:])
            ]
        return results_of(report, name)

    def run_twice(self, file: Path) -> tuple[list[Result], list[str]]:
        """Results, and the names of tests that failed among the others and passed alone."""
        found = self.run(file)
        again = [
            r for r in found if r.outcome == "failed" and r.reason is None and "(" not in r.name
        ]
        passed = (
            {r.name for r in self.run(file, [r.name for r in again]) if r.outcome == "passed"}
            if again
            else set()
        )
        return [Result(r.file, r.name, "passed") if r.name in passed else r for r in found], sorted(
            passed
        )


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m tests.petastorm_own",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="names of test files (default: all that can run)"
    )
    wanted = parser.parse_args(argv).files
    every: list[Result] = []
    alone: list[str] = []
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        suite = Suite(Path(folder))
        known = [f.stem for f in suite.files]
        if unknown := sorted(set(wanted) - set(known)):
            raise UsageError(
                f"no test file of Petastorm is called {unknown[0]!r}: {', '.join(known)}"
            )
        there = [file for file in suite.files if not wanted or file.stem in wanted]
        ours = Suite(Path(other), through_ours=True)
        for one, file in [
            *((suite, file) for file in there),
            *((ours, file) for file in there if file.stem in THROUGH_OURS),
        ]:
            if file.stem in LEFT_OUT:
                left_out[file.stem] = LEFT_OUT[file.stem]
                say(f"{file.stem:34} left out: {LEFT_OUT[file.stem]}")
                continue
            results, repeated = one.run_twice(file)
            every, alone = every + results, alone + repeated
            count = Counter(r.outcome for r in results)
            say(
                f"{one.prefix + file.stem:48} {count['passed']:4} of {len(results) - count['skipped']:4} passed"
                + (f", {count['skipped']} skipped" if count["skipped"] else "")
                + (f", {len(repeated)} of them only alone" if repeated else "")
            )
    failed = [r for r in every if r.outcome == "failed"]
    unexplained = [r for r in failed if r.reason is None]
    for result in failed:
        say(
            f"  failed  {result.file}::{result.name}: {result.reason or 'UNEXPLAINED: ' + _last_line(result.text)}"
        )
    for name in alone:
        say(
            f"  passed alone only  {name}: Petastorm's pool looks at its workers before its ventilator, and may end "
            "early"
        )
    ran = [r for r in every if r.outcome != "skipped"]
    passed = len(ran) - len(failed)
    say(
        f"\n{passed} of {len(ran)} passed; {len(failed)} failed, {len(unexplained)} of them unexplained; "
        f"{len(every) - len(ran)} skipped by themselves; {len(left_out)} files left out"
    )
    if unexplained:
        raise RuntimeError(
            f"{len(unexplained)} tests failed for no known reason, {unexplained[0].name} first"
        )
    return {
        "passed": passed,
        "ran": len(ran),
        "failed": {f"{r.file}::{r.name}": r.reason for r in failed},
        "passed_alone_only": alone,
        "left_out": left_out,
    }


def _last_line(text: str) -> str:
    told = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return (told or text.strip().splitlines() or [""])[-1][:160]


if __name__ == "__main__":
    run(main)
