"""Running whole jobs in tests, and reading back what they made."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sluice import FeatureTable
from sluice.etl.apply.counts import selected
from tests.product import (
    Features,
    InputParser,
    Job,
    JobProgress,
    Result,
    SparkEngine,
    Spec,
    TableStore,
    run_job,
)


def session() -> Any:
    """The Spark session of this process, which is started at the first call."""
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

    from sluice.etl.spark.session import DEFAULTS, ROOT

    conf = SparkConf().setMaster("local[2]").setAppName("tests").setAll(list(DEFAULTS.items()))
    conf.setAll(
        [
            ("spark.driver.host", "127.0.0.1"),
            ("spark.driver.bindAddress", "127.0.0.1"),
            ("spark.executorEnv.PYTHONPATH", str(ROOT)),
            ("spark.sql.shuffle.partitions", "2"),
            ("spark.python.daemon.module", "sluice.etl.spark.daemon"),
            ("spark.ui.showConsoleProgress", "false"),
            ("spark.pyspark.python", sys.executable),
            # What is short-lived is compiled quickly rather than well.
            (
                "spark.driver.extraJavaOptions",
                " ".join(
                    [
                        f"-Dlog4j2.configurationFile={ROOT}/etl/log4j2.properties",
                        "-XX:TieredStopAtLevel=1",
                        "-XX:+UseSerialGC",
                    ]
                ),
            ),
        ]
    )
    os.environ["PYSPARK_PYTHON"] = sys.executable
    return SparkSession.builder.config(conf=conf).getOrCreate()


@contextmanager
def spark_settings(spark: Any, **changed: str) -> Iterator[None]:
    """Changes settings of a session in a block. The names are those after `spark.sql.`, with `_` for each dot."""
    names = {name: f"spark.sql.{name.replace('_', '.')}" for name in changed}
    before = {key: spark.conf.get(key) for key in names.values()}
    for name, value in changed.items():
        spark.conf.set(names[name], value)
    try:
        yield
    finally:
        for key, value in before.items():
            spark.conf.set(key, value)


class Said:
    """Keeps what a job says."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def on(spark, job: Job, said: Said | None = None) -> Result:
    """Runs a job on a Spark session, or, without one, on this machine's threads."""
    progress = JobProgress(said or Said())
    if spark is not None:
        return run_job(job, SparkEngine(lambda: spark, job, progress))
    from sluice.etl.local.engine import LocalEngine

    return run_job(job, LocalEngine(job, progress, threads=2))


def job_of(output: Path | str, *inputs: object, text: str, **options: object) -> Job:
    return Job(
        spec=Spec.own(text), inputs=tuple(map(str, inputs)), store=TableStore(output), **options
    )


def run(
    spark, output: Path, *inputs: object, text: str, said: Said | None = None, **options: object
) -> Result:
    return on(spark, job_of(output, *inputs, text=text, **options), said)


def build_table(spark, output: Path, *inputs: object, text: str, **options: object) -> FeatureTable:
    """Runs a job, and opens the table that it made."""
    run(spark, output, *inputs, text=text, **options)
    return FeatureTable.open(output)


def opened(table: FeatureTable | Path) -> FeatureTable:
    """The table, or the newest version in that folder."""
    return table if isinstance(table, FeatureTable) else FeatureTable.open(table)


def rows_of(table: FeatureTable | Path, split: str | None = None) -> list[dict]:
    table = opened(table)
    files = table.files if split is None else table.files_of(split)
    return [row for f in files for row in pq.read_table(f.path, partitioning=None).to_pylist()]


def words_of(table: FeatureTable | Path, key: str) -> list[str]:
    """The vocabulary that an operator has learned, such as `item/0`."""
    return opened(table).state()[key]["value"].to_pylist()


def in_one_process(text: str, table: FeatureTable, columns: dict[str, pa.Array]) -> list[dict]:
    """What a table's rows must be: all rows at once, through the state that the table has, without Spark."""
    spec = Spec.own(text)
    parsed = InputParser(spec).parse(pa.record_batch(list(columns.values()), list(columns)))
    kept, keys = selected(spec, parsed)
    features = Features(spec, table.state())
    return pa.table(features.apply(kept, features.extras(kept, keys))).to_pylist()


def alike(got: list[dict], want: list[dict]) -> None:
    """The same rows in any order."""
    assert len(got) == len(want)
    assert sorted(map(repr, got)) == sorted(map(repr, want))
