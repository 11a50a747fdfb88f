"""What `sluice etl` and etl/job.py are asked: to make a new version of a feature table from raw logs."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sluice.etl.common.settings import setting
from sluice.etl.common.text_table import aligned
from sluice.etl.spec.spec import Spec
from sluice.etl.table.store import TableStore

if TYPE_CHECKING:
    from sluice.etl.jobs.job_run import Job
    from sluice.etl.jobs.progress import JobProgress


@dataclass(frozen=True, kw_only=True)
class JobInput:
    """What is read, and which table is written."""

    title = "what"
    spec: str = setting(help="feature spec, a TOML file", metavar="SPEC")
    input: tuple[str, ...] = setting(help="files, folders or globs, any URI that the engine reads", metavar="PATH",
                                     several=True)
    output: str = setting(help="the table's folder or URI", metavar="TABLE")
    mode: str = setting("create", "create a table, append to it, or overwrite it",
                        choices=("create", "append", "overwrite"))
    engine: str | None = setting(
        None, "what does the work: Spark, as always in spark-submit, or this machine's own threads, which make the "
        "same table without Java, but cannot join rows with other rows (default: local where the spec allows it and no "
        "cluster is configured)", choices=("local", "spark"))
    explain: bool = setting(False, "say what would be done, and do nothing: columns, operators, passes, joins, memory")


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
    """What is learned anew, and what is taken over from the table's newest version."""

    title = "what is learned"
    reuse_state: bool = setting(False, "apply what the table's newest version learned instead of learning anew; an "
                                "append always does, so that no id changes its value")
    update_state: bool = setting(False, "keep every id that the table's newest version gave, and add values not seen "
                                 "before; with append or overwrite")
    refit: bool = setting(False, "learn everything anew on the training split, whatever the table's newest version "
                          "learned; every id is given anew; with overwrite")
    worker_memory: int = setting(256, "what a Python worker may hold of what was learned; larger vocabularies are "
                                 "joined "
                                 "with the rows instead, and the driver collects fewer of them", metavar="MIB", least=1,
                                 most=2**20)


@dataclass(frozen=True, kw_only=True)
class JobRequest(JobInput, LearningOptions):
    """A job, as its command line asks for it, with what is done about rows that are not as they should be."""

    title = "rows that do not fit"
    rejects: str | None = setting(None, "where rows that do not parse go (default: _sluice/rejects/<job> in the table)",
                                  metavar="PATH")
    max_rejects: float = setting(0.01, "refuse the job if more than this share of rows is rejected", metavar="SHARE",
                                 least=0, most=1)
    accept_nulls: tuple[str, ...] = setting(
        (), "publish although these columns have lost many more of their values than in the version before: twice the "
        "share and 5 points more are missing or cannot be read", metavar="COLUMN", several=True)
    split_moved: str = setting("refuse", "what to do where rows would change their split, because a column that it "
                               "hangs "
                               "on is missing, renamed or of another type, or the split is cut in another way",
                               choices=("refuse", "accept"))

    def job(self) -> Job:
        from sluice.etl.jobs.job_run import Job

        return Job(spec=Spec.read(self.spec), inputs=self.input, store=TableStore(self.output), mode=self.mode,
                   rejects=self.rejects, max_rejects=self.max_rejects, reuse_state=self.reuse_state,
                   update_state=self.update_state, refit=self.refit, accept_nulls=self.accept_nulls,
                   split_moved=self.split_moved, worker_bytes=self.worker_memory * 2**20)

    def answer(self, progress: JobProgress, argv: list[str]) -> dict[str, Any]:
        """Does the job, which was started with `argv`, or says what it would do; returns the program's last line."""
        from sluice.etl.engines import choose, opened

        start, job = time.monotonic(), self.job()
        engine = choose(self.engine, job.spec, argv, progress.say)
        if self.explain:
            from sluice.etl.spark.explain import explain

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
