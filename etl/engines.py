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

from sluice.common.errors import UsageError
from sluice.etl.jobs.engine import Engine
from sluice.etl.jobs.job import Job
from sluice.etl.jobs.progress import JobProgress
from sluice.etl.spec.spec import Spec


class EngineError(UsageError):
    """An engine that cannot do the job. The message says why, and gives the right command."""


def choose(
    asked: str | None,
    spec: Spec,
    arguments: list[str],
    say: Callable[[str], None],
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Returns the engine for a job that was started with these `arguments`: the `asked` one, or Spark in spark-submit.
    Otherwise it is local, unless the spec needs Spark or a cluster is configured. Reports an engine that was not asked
    for."""
    submitted = "PYSPARK_GATEWAY_PORT" in environment
    if asked == "local" and submitted:
        raise EngineError(
            "--engine local: spark-submit has started Spark already; run: sluice etl "
            f"{shlex.join(arguments)}"
        )
    why = only_spark(spec)
    if asked == "local" and why is not None:
        place = os.path.relpath(Path(__file__).resolve().parent.parent)
        others = re.sub("(^|\0)--engine(=|\0)local", "", "\0".join(arguments)).strip("\0")
        raise EngineError(
            f"--engine local: {why}; run: spark-submit --properties-file "
            f"{os.path.join(place, 'spark-defaults.conf')} {os.path.join(place, 'etl/job.py')} "
            f"{shlex.join(others.split(chr(0)))}"
        )
    if asked is None and not submitted:
        why = why or _cluster(environment)
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
    found = [
        *(["[dedup]"] if spec.rows.dedup else []),
        *(["[[join]]"] if spec.rows.joins else []),
        *dict.fromkeys("[[lag]]" if h.lag else "[[history]]" for h in spec.rows.histories),
    ]
    if found:
        return f"{' and '.join(found)} of {spec.name}: rows meet other rows there, which only Spark brings together"
    if spec.input.multiline:
        return f"input.multiline of {spec.name}: records over several lines are read by Spark alone"
    return None


def _cluster(environment: Mapping[str, str]) -> str | None:
    """Returns the setting by which jobs run on a cluster, or None."""
    for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_REMOTE"):
        if environment.get(name):
            return f"{name} names a cluster"
    if master := re.search(r"--master[= ]+(\S+)", environment.get("PYSPARK_SUBMIT_ARGS", "")):
        return None if master[1].startswith("local") else f"PYSPARK_SUBMIT_ARGS names {master[1]}"
    home = environment.get("SPARK_HOME")
    folder = environment.get("SPARK_CONF_DIR") or (f"{home}/conf" if home else None)
    settings = Path(folder or ".") / "spark-defaults.conf"
    if folder and settings.is_file():
        text = settings.read_text("utf-8", "replace")
        if (master := re.search(r"^\s*spark\.master[\s=]+(\S+)", text, re.M)) and not master[
            1
        ].startswith("local"):
            return f"{settings} names {master[1]}"
    return None


@contextlib.contextmanager
def opened(name: str, progress: JobProgress) -> Iterator[Callable[[Job], Engine]]:
    """Starts an engine, and yields a function that makes it for a job. Raises JobFailure for an engine's failure,
    with one line, and a UsageError for a user's mistake."""
    if name == "local":
        from sluice.etl.jobs.engine import clearly as clearly_here
        from sluice.etl.local.engine import LocalEngine

        with clearly_here():
            yield partial(LocalEngine, progress=progress)
        return
    from sluice.etl.spark.engine import SparkEngine
    from sluice.etl.spark.errors import clearly
    from sluice.etl.spark.session import open_session, start_worker

    with progress.stage("starting Spark"):
        spark = open_session("sluice-etl")
    try:
        with clearly(), ThreadPoolExecutor(1) as pool:
            pool.submit(start_worker, spark)
            yield partial(SparkEngine, spark, progress=progress)
    finally:
        spark.stop()
