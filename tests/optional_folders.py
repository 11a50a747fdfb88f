"""What may be deleted from the repository with all else still working, and which tests go with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalFolder:
    """A folder, the files beside it that are its own, and its tests, all relative to the repository's root."""

    paths: tuple[str, ...]
    tests: tuple[str, ...]
    askers: tuple[str, ...] = ()
    """The files that use it where it is, and say so in one sentence where it is not."""

    @property
    def is_there(self) -> bool:
        return (ROOT / self.paths[0]).is_dir()

    def holds(self, path: str) -> bool:
        """Whether a file goes with the folder."""
        return any(path == own or path.startswith(f"{own}/") for own in (*self.paths, *self.tests))

    @property
    def modules(self) -> tuple[str, ...]:
        """The names that the modules of these paths have, or begin with."""
        return tuple("sluice." + own.removesuffix(".py").replace("/", ".") for own in self.paths)


OPTIONAL = {
    "local ETL": OptionalFolder(
        paths=("etl/local",),
        tests=(
            "tests/etl/local",
            "tests/etl/test_first_rows.py",
            "tests/e2e/test_feature_store.py",
            "tests/etl/test_foreign_tables.py",
            "tests/etl/test_fuzz.py",
            "tests/etl/test_lake_input.py",
            "tests/etl/test_large.py",
            "tests/etl/test_number_limits.py",
            "tests/etl/test_one_value.py",
            "tests/frozen",
            "tests/fuzz",
        ),
        askers=(
            "etl/engines.py",
            "tests/etl/jobs.py",
        ),
    ),
    "rivals": OptionalFolder(
        paths=("benchmarks/rivals",),
        tests=("tests/benchmarks/rivals",),
        askers=(
            "agent/policies/__init__.py",
            "agent/lab/policies.py",
            "agent/lab/yardsticks.py",
            "benchmarks/tuning.py",
        ),
    ),
    "serving": OptionalFolder(
        paths=(
            "dlrm/serving",
            "dlrm/serve.py",
            "benchmarks/serving.py",
            "benchmarks/plain_server.py",
        ),
        tests=(
            "tests/dlrm/serving",
            "tests/etl/test_guess_to_server.py",
            "tests/etl/test_one_value.py",
            "tests/fuzz/four_ways.py",
            "tests/fuzz/one_value.py",
            "tests/fuzz/test_four_ways.py",
            "tests/fuzz/test_one_value.py",
        ),
        askers=("sluice/__main__.py",),
    ),
    "remote workers": OptionalFolder(
        paths=("ingest/remote",),
        tests=("tests/dlrm/test_launch_page.py", "tests/ingest/remote"),
        askers=("sluice/__main__.py", "ingest/loader.py"),
    ),
}


def is_left_out(path: str) -> bool:
    """Whether a file belongs to an optional folder that is not there."""
    return any(folder.holds(path) and not folder.is_there for folder in OPTIONAL.values())
