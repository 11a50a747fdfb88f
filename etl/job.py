"""Turns raw logs into a new version of a feature table: a program for spark-submit, and for `sluice etl`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import stat
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

# spark-submit puts this file's folder first on the path, where one of our files could hide another module.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parent), *(p for p in sys.path if os.path.abspath(p or ".") != str(_HERE))]

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

    (If it is a file, it would be written at two places at once.)"""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return
    try:
        descriptor = os.open(f"/proc/{os.getppid()}/fd/2", os.O_WRONLY | os.O_NOCTTY)
    except OSError:
        return
    if os.isatty(descriptor) or stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.dup2(descriptor, 2)
    os.close(descriptor)


def parser() -> argparse.ArgumentParser:
    from sluice.etl.common.arguments import ArgumentParser

    described = ArgumentParser(
        prog="etl/job.py", formatter_class=argparse.RawDescriptionHelpFormatter, epilog=_EXAMPLES,
        description="Makes a new version of a feature table from raw logs. It appears whole, or not at all: a job "
                    "that fails\nor is stopped leaves readers with the version they had.")
    described.add_argument("--spec", required=True, help="feature spec, a TOML file")
    described.add_argument("--input", required=True, nargs="+", metavar="PATH",
                           help="files, folders or globs, any URI that the engine reads")
    described.add_argument("--output", required=True, metavar="TABLE", help="the table's folder or URI")
    described.add_argument("--mode", choices=("create", "append", "overwrite"), default="create",
                           help="create a table, append to it, or overwrite it (default: %(default)s)")
    described.add_argument("--rejects", metavar="PATH",
                           help="where rows that do not parse go (default: _sluice/rejects/<job> in the table)")
    described.add_argument("--max-rejects", type=_share, default=0.01, metavar="SHARE",
                           help="refuse the job if more than this share of rows is rejected (default: %(default)s)")
    described.add_argument("--accept-nulls", nargs="+", default=[], metavar="COLUMN",
                           help="publish although these columns have lost many more of their values than in the "
                                "version before: twice the share and 5 points more are missing or cannot be read")
    described.add_argument("--reuse-state", action="store_true",
                           help="apply what the table's newest version learned instead of learning anew; an append "
                                "always does, so that no id changes its value")
    described.add_argument("--update-state", action="store_true",
                           help="keep every id that the table's newest version gave, and add values not seen before; "
                                "with append or overwrite")
    described.add_argument("--split-moved", choices=("refuse", "accept"), default="refuse",
                           help="what to do where rows would change their split, because a column that it hangs on is "
                                "missing, renamed or of another type, or the split is cut in another way (default: "
                                "%(default)s)")
    described.add_argument("--refit", action="store_true",
                           help="learn everything anew on the training split, whatever the table's newest version "
                                "learned; every id is given anew; with overwrite")
    described.add_argument("--worker-memory", type=_mebibytes, default=256, metavar="MIB",
                           help="what a Python worker may hold of what was learned (default: %(default)s); larger "
                                "vocabularies are joined with the rows instead, and the driver collects fewer of them")
    described.add_argument("--engine", choices=("local", "spark"),
                           help="what does the work: Spark, as always in spark-submit, or this machine's own threads, "
                                "which make the same table without Java, but cannot join rows with other rows "
                                "(default: local where the spec allows it and no cluster is configured)")
    described.add_argument("--explain", action="store_true",
                           help="say what would be done, and do nothing: columns, operators, passes, joins, memory")
    return described


def _share(text: str) -> float:
    if not 0 <= (share := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to 1")
    return share


def _mebibytes(text: str) -> int:
    if not 1 <= (size := int(text)) <= 2**20:
        raise argparse.ArgumentTypeError(f"{text} is no number of MiB from 1 to {2**20}")
    return size


def main(argv: list[str]) -> dict[str, Any]:
    from sluice.etl.engines import choose, opened
    from sluice.etl.jobs.job_run import Job
    from sluice.etl.jobs.progress import JobProgress
    from sluice.etl.show import aligned
    from sluice.etl.spark.explain import explain
    from sluice.etl.spec.spec import Spec
    from sluice.etl.table.store import TableStore

    args, start, progress = parser().parse_args(argv), time.monotonic(), JobProgress(sys.stderr)
    job = Job(spec=Spec.read(args.spec), inputs=tuple(args.input), store=TableStore(args.output), mode=args.mode,
              rejects=args.rejects, max_rejects=args.max_rejects, reuse_state=args.reuse_state,
              update_state=args.update_state, refit=args.refit, accept_nulls=tuple(args.accept_nulls),
              split_moved=args.split_moved,
              worker_bytes=args.worker_memory * 2**20)
    engine = choose(args.engine, job.spec, argv, progress.say)
    if args.explain:
        lines, about = explain(job, engine)
        for line in lines:
            progress.say(line)
        return about
    with opened(engine, job, progress) as work:
        result = job.run(work)
    seconds = round(time.monotonic() - start, 1)
    progress.say(f"version {result.version} of {job.store.uri}: {result.rows_out:,} rows in {result.files} files, "
                 f"{seconds} s")
    for line in aligned([("read", f"{result.rows_in:,}"), ("rejected", f"{sum(result.rejected.values()):,}"),
                         ("written", f"{result.rows_out:,}"),
                         *((f"  {split}", f"{rows:,}") for split, rows in result.splits.items())]):
        progress.say(line)
    return {**dataclasses.asdict(result), "seconds": seconds}


def program() -> NoReturn:
    """Runs the whole program, as its command does."""
    _own_standard_error()
    try:
        import deltalake  # noqa: F401
        import pyarrow  # noqa: F401
    except ImportError as missing:
        print(f"error: {sys.executable} has no {missing.name}; tell spark-submit which Python has it: "
              "--conf spark.pyspark.python=.venv/bin/python", file=sys.stderr)
        sys.exit(2)
    from sluice.etl.common.program import run
    from sluice.etl.jobs.engine import JobFailure
    from sluice.etl.table.commit import CommitConflict

    # What the spec says wrongly of an operator is a SpecError; the others come from a function while it works.
    run(main, failures=(JobFailure, CommitConflict))


if __name__ == "__main__":
    program()
