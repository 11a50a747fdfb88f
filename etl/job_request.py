"""The options of `sluice etl` and etl/job.py, which make a new version of a feature table from raw logs."""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sluice.common.settings import setting

if TYPE_CHECKING:
    from sluice.etl.jobs.job import Job
    from sluice.etl.jobs.progress import JobProgress


@dataclass(frozen=True, kw_only=True)
class JobInput:
    """The input, and the table to write."""

    title = "input and table"
    spec: str = setting(help="feature spec, a TOML file", metavar="SPEC")
    input: tuple[str, ...] = setting(
        help="files, folders or globs, any URI that the engine reads", metavar="PATH", several=True
    )
    output: str = setting(help="the table's folder or URI", metavar="TABLE")
    mode: str = setting(
        "create",
        "create a table, append to it, or overwrite it",
        choices=("create", "append", "overwrite"),
    )
    engine: str | None = setting(
        None,
        "local: this machine's threads, without Java, for specs that join no rows. spark: Spark, which spark-submit "
        "always uses. Both make the same table (default: local if the spec allows it)",
        choices=("local", "spark"),
    )


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
    """What the job learns, and what it takes from the table's newest version."""

    title = "what is learned"
    reuse_state: bool = setting(
        False,
        "apply what the table's newest version learned instead of learning anew; an append always does this, so that "
        "ids keep their values",
    )
    update_state: bool = setting(
        False,
        "keep every id of the table's newest version, and add new values; with append or overwrite",
    )
    refit: bool = setting(
        False,
        "learn everything anew on the training split, with new ids; with overwrite",
    )
    worker_memory: int = setting(
        256,
        "memory for learned state in a Python worker; larger vocabularies stay in files, which all workers of a "
        "machine share",
        metavar="MIB",
        least=1,
        most=2**20,
    )


@dataclass(frozen=True, kw_only=True)
class JobRequest(JobInput, LearningOptions):
    """All options of a job."""

    title = "rejected rows and changed columns"
    rejects: str | None = setting(
        None,
        "folder for rows that do not parse (default: _sluice/rejects/<job> in the table)",
        metavar="PATH",
    )
    max_rejects: float = setting(
        0.01,
        "refuse the job if more than this share of rows is rejected",
        metavar="SHARE",
        least=0,
        most=1,
    )
    accept_nulls: tuple[str, ...] = setting(
        (),
        "publish even if far more values of these columns are missing or unreadable than in the version before (more "
        "than twice the share, and at least 5 percentage points more)",
        metavar="COLUMN",
        several=True,
    )
    late: str = setting(
        "accept",
        "what an append does with rows that are older than rows of the table from which their histories or lags "
        "continue: accept counts them in a warning. To give them whole histories, pass --mode overwrite and all of the "
        "input",
        choices=("accept", "reject"),
    )
    split_moved: str = setting(
        "refuse",
        "what to do if rows would change their split, because a column that decides it is missing, renamed or of "
        "another type, or because the splits are cut in another way",
        choices=("refuse", "accept"),
    )

    def job(self) -> Job:
        from sluice.etl.jobs.job import Job
        from sluice.etl.spec.spec import Spec
        from sluice.etl.table.store import TableStore

        return Job(
            spec=Spec.read(self.spec),
            inputs=self.input,
            store=TableStore(self.output),
            mode=self.mode,
            rejects=self.rejects,
            max_rejects=self.max_rejects,
            reuse_state=self.reuse_state,
            update_state=self.update_state,
            refit=self.refit,
            late=self.late,
            accept_nulls=self.accept_nulls,
            split_moved=self.split_moved,
            worker_bytes=self.worker_memory * 2**20,
        )

    def answer(self, progress: JobProgress, argv: list[str]) -> dict[str, Any]:
        """Does the job that the command line `argv` asks for. Returns the program's last line."""
        from sluice.etl.engines import choose, opened
        from sluice.etl.jobs.job_run import run_job
        from sluice.etl.show import aligned

        start = time.monotonic()
        job = self.job()
        engine = choose(self.engine, job.spec, argv, progress.say)
        if engine == "spark" or job.spec.functions:
            gc.enable()  # A user's functions may leave cycles, which hold memory.
        else:
            _convert_without_pandas()
        with opened(engine, progress) as engine_for:
            result = run_job(job, engine_for(job))
        seconds = round(time.monotonic() - start, 1)
        progress.say(
            f"version {result.version} of {job.store.uri}: {result.rows_out:,} rows in {result.files} files, "
            f"{seconds} s"
        )
        for line in aligned(
            [
                ("read", f"{result.rows_in:,}"),
                ("rejected", f"{sum(result.rejected.values()):,}"),
                ("written", f"{result.rows_out:,}"),
                *((f"  {split}", f"{rows:,}") for split, rows in result.splits.items()),
            ]
        ):
            progress.say(line)
        return {**dataclasses.asdict(result), "seconds": seconds}


class _NoPandas:
    """An entry of `sys.meta_path` that refuses pandas. A None in `sys.modules` does not: Cython's import returns it."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def _convert_without_pandas() -> None:
    """Makes Arrow convert its first values while pandas cannot be imported.

    Arrow imports pandas there if it is installed, and only compares types with it. If that fails, Arrow does not try
    again, unless a program asks for a data frame."""
    import numpy as np
    import pyarrow as pa

    sys.meta_path.insert(0, _NoPandas)
    try:
        pa.array(np.zeros(1))
        pa.scalar("")
    finally:
        sys.meta_path.remove(_NoPandas)
