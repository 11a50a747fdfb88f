"""Turns raw logs into a new version of a feature table: a program for spark-submit, and for `sluice etl`."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# spark-submit puts this file's folder first on the path, where one of our files could hide another module.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parent), *(p for p in sys.path if os.path.abspath(p or ".") != str(_HERE))]

_SUBMITTED = "PYSPARK_GATEWAY_PORT"  # spark-submit says so where its Java side listens
_DESCRIPTION = """Makes a new version of a feature table from raw logs. It appears whole, or not at all: a job that
fails or is stopped leaves readers with the version they had."""
_EXAMPLES = r"""examples:
  spark-submit --properties-file spark-defaults.conf etl/job.py --spec features/criteo.toml \
      --input 'logs/day_*.tsv' --output table
  … --input logs/day_7.tsv --output table --mode append
  sluice etl --spec features/criteo.toml --input 'logs/day_*.tsv' --output table

The last line on standard output is JSON: rows_in, rows_out, rejected, version, fingerprint, files, seconds.
Exit code: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted."""


def _own_standard_error() -> None:
    """Gives this process its own standard error back, which spark-submit has joined to standard output, if the original
    is a terminal or a pipe.

    (If it is a file, it would be written at two places at once. psutil opens no descriptor of another process.)"""
    if _SUBMITTED not in os.environ:
        return
    try:
        descriptor = os.open(f"/proc/{os.getppid()}/fd/2", os.O_WRONLY | os.O_NOCTTY)
    except OSError:
        return
    if os.isatty(descriptor) or stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.dup2(descriptor, 2)
    os.close(descriptor)


def main(argv: list[str]) -> dict[str, Any]:
    from sluice.common.settings import parse
    from sluice.etl.job_request import JobRequest

    name = "etl/job.py" if __name__ == "__main__" else "sluice etl"
    request = parse(JobRequest, argv=argv, prog=name, description=_DESCRIPTION, epilog=_EXAMPLES)
    from sluice.etl.jobs.progress import JobProgress
    from sluice.tools.placing import placed

    return request.answer(JobProgress(sys.stderr), argv, placed, _packing)


def _packing(limit: str, say: Callable[[str], None]) -> Callable[[str, int], dict[str, int]]:
    from sluice.tools.packing import packing  # loads numba, which other jobs need not wait for

    return packing(limit, say)


def program() -> NoReturn:
    """Runs the whole program, as its command does. Where spark-submit has taken a python3 of the path that lacks what a
    job needs, it goes on in the checkout's own environment."""
    _own_standard_error()
    try:
        import deltalake  # noqa: F401
        import pyarrow  # noqa: F401
    except ImportError as missing:
        own = _HERE.parent / ".venv/bin/python"
        if _SUBMITTED in os.environ and own.exists() and own != Path(sys.executable):
            os.execv(own, [str(own), *sys.argv])
        print(
            f"error: {sys.executable} has no {missing.name}; tell spark-submit which Python has it: "
            "--conf spark.pyspark.python=PYTHON",
            file=sys.stderr,
        )
        sys.exit(2)
    from sluice.common.program import run
    from sluice.etl.jobs.engine import JobFailure
    from sluice.etl.table.commit import CommitConflict

    # What the spec says wrongly of an operator is a SpecError; the others come from a function while it works.
    run(main, failures=(JobFailure, CommitConflict))


if __name__ == "__main__":
    program()
