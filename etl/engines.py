"""`choose` selects the engine of a job, Spark or this machine's threads. `opened` starts it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.common.errors import UsageError
from sluice.etl.jobs.engine import Engine, os_errors_as_job_failure
from sluice.etl.jobs.job import Job
from sluice.etl.jobs.progress import JobProgress
from sluice.etl.spec.spec import Spec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def choose(
    asked: str | None,
    spec: Spec,
    arguments: list[str],
    say: Callable[[str], None],
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Returns the engine for a job that was started with these `arguments`: the `asked` one, or Spark in spark-submit.
    Otherwise it is local, unless the spec needs Spark. Reports an engine that was not asked for.
    Raises a UsageError with the right command if the asked one cannot do the job."""
    submitted = "PYSPARK_GATEWAY_PORT" in environment
    if asked == "local" and submitted:
        raise UsageError(
            "--engine local: spark-submit has started Spark already; run: sluice etl "
            f"{shlex.join(arguments)}"
        )
    why = only_spark(spec)
    if asked == "local" and why is not None:
        place = os.path.relpath(Path(__file__).resolve().parent.parent)
        others = re.sub("(^|\0)--engine(=|\0)local", "", "\0".join(arguments)).strip("\0")
        raise UsageError(
            f"--engine local: {why}; run: spark-submit --properties-file "
            f"{os.path.join(place, 'spark-defaults.conf')} {os.path.join(place, 'etl/job.py')} "
            f"{shlex.join(others.split(chr(0)))}"
        )
    if asked is not None or submitted:
        return asked or "spark"
    if why is None:
        say(
            "engine: local, on this machine's processors, because this spec needs no other rows (--engine spark "
            "makes the same table)"
        )
        return "local"
    say(f"engine: spark, because {why}")
    return "spark"


def only_spark(spec: Spec) -> str | None:
    """Returns why only Spark can do a job of this spec, or None if the local engine can do it."""
    sections = [
        *(["[dedup]"] if spec.rows.dedup else []),
        *(["[[join]]"] if spec.rows.joins else []),
        *dict.fromkeys("[[lag]]" if h.lag else "[[history]]" for h in spec.rows.histories),
    ]
    if sections:
        return f"{' and '.join(sections)} of {spec.name}: rows meet other rows there, which only Spark brings together"
    return None


@contextlib.contextmanager
def opened(name: str, progress: JobProgress) -> Iterator[Callable[[Job], Engine]]:
    """Starts an engine, and yields a function that makes it for a job. Raises JobFailure for an engine's failure,
    with one line, and a UsageError for a user's mistake."""
    if name == "local":
        from sluice.etl.local.engine import LocalEngine

        with os_errors_as_job_failure():
            yield partial(LocalEngine, progress=progress)
        return
    from sluice.etl.spark.engine import SparkEngine
    from sluice.etl.spark.errors import spark_errors_as_job_failure
    from sluice.etl.spark.session import open_session, start_worker

    with contextlib.ExitStack() as started:

        def start() -> SparkSession:
            with progress.stage("starting Spark"):
                spark = open_session()
            started.callback(spark.stop)
            started.enter_context(ThreadPoolExecutor(1)).submit(start_worker, spark)
            return spark

        with spark_errors_as_job_failure():
            yield partial(SparkEngine, start, progress=progress)
