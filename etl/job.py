"""The program that makes a new version of a feature table from raw logs, for spark-submit and `sluice etl`."""

from __future__ import annotations

import os
import stat
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

# spark-submit puts this file's folder first on the path, where one of our files could hide another module.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parent), *(p for p in sys.path if os.path.abspath(p or ".") != str(_HERE))]

_SUBMITTED = "PYSPARK_GATEWAY_PORT"  # spark-submit sets it to the port of its Java process
_DESCRIPTION = """Makes a new version of a feature table from raw logs. Readers see the whole version or nothing
of it: if a job fails or is stopped, they keep the version before."""
_EXAMPLES = r"""examples:
  spark-submit --properties-file spark-defaults.conf etl/job.py --spec features/criteo.toml \
      --input 'logs/day_*.tsv' --output table
  … --input logs/day_7.tsv --output table --mode append
  sluice etl --spec features/criteo.toml --input 'logs/day_*.tsv' --output table

The last line on standard output is JSON: rows_in, rows_out, rejected, version, fingerprint, files, seconds.
Exit code: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted."""


def _own_standard_error() -> None:
    """Restores standard error if it was a terminal or a pipe. spark-submit has joined it to standard output.

    A file would be written at two places at once, so it is left as it is."""
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
    from sluice.common.collector import without_collections
    from sluice.common.settings import parse
    from sluice.etl.job_request import JobRequest

    name = "etl/job.py" if __name__ == "__main__" else "sluice etl"
    request = parse(JobRequest, argv, name, description=_DESCRIPTION, epilog=_EXAMPLES)
    from sluice.etl.jobs.progress import JobProgress

    with without_collections():
        return request.answer(JobProgress(sys.stderr), argv)


def program() -> NoReturn:
    """Runs the program as a command. If spark-submit has chosen a python3 without the needed packages, restarts in the
    environment of the checkout."""
    _own_standard_error()
    if missing := [name for name in ("deltalake", "pyarrow") if find_spec(name) is None]:
        own = _HERE.parent / ".venv/bin/python"
        if _SUBMITTED in os.environ and own.exists() and own != Path(sys.executable):
            os.execv(own, [str(own), *sys.argv])
        from sluice.common.lines import say

        say(
            f"error: {sys.executable} has no {missing[0]}; tell spark-submit which Python has it: "
            "--conf spark.pyspark.python=PYTHON"
        )
        sys.exit(2)
    from sluice.common.program import run

    run(main)


if __name__ == "__main__":
    program()
