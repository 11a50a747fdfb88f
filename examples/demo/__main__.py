"""`make demo`: runs all parts on this machine: raw logs, Spark, a Delta table, and a tuned training on two ranks.

    python -m examples.demo --out demo-out [--rows 900000] [--cluster]

With --cluster (`make demo-cluster`) Spark is a cluster of a master and two workers. Each rank has its own torchrun
agent, as on two hosts.

Each step is a command that a user would type. It is printed before it runs. The last lines sum up the results.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.standalone_cluster import JAVA_OPTIONS, StandaloneCluster
from examples.demo.steps import ACTIVATED, ROOT, StepFailed, begin, step, torchrun
from sluice.agent.report.format import count, percent
from sluice.agent.report.run_folder import Run
from sluice.common.errors import UsageError
from sluice.common.lines import say
from sluice.common.program import run
from sluice.common.settings import parse, setting

_LOCAL_ETL = ("sluice", "etl", "--engine", "local")
STORE = "latency://300ms"
"""A far store: each read takes 0.3 s."""
SPEC = "features/criteo_raw.toml"
GROUP_ROWS = 512
"""Rows of a row group. It is small, because the table is small and each read takes one row group."""
_COUNTS = ",".join(f"I{n}" for n in range(1, 14))
_LOOKUP = f"examples.demo.squash:levels:{_COUNTS}>{_COUNTS}"
TRANSFORM = f"{_LOOKUP}@60s"
"""A batch may take 60 s. A function with a limit always runs in processes, so one of them can be killed."""
ONE_WORKER = "fetch=1,decode=1,levels=1,read_ahead_bytes=1MiB,prefetch_bytes=1MiB"
"""One worker a stage, and buffers of one second. The default buffers would hold half an epoch and hide the effects."""
_TRAIN = (
    f"-m dlrm.train --transform {TRANSFORM} --width 64 --over-layers 512,256 --window-rows 1024 "
    "--log-every 30"
).split()
A_SIXTH = ["--evals", "6", "--stop-auc", "0.6"]
"""Ends the run with one worker after a sixth of the epoch, which is enough to measure how long the trainer waits."""
COMPUTED_SPEC = "features/criteo.toml"
"""Its table stores what the operators make, so that a cache can keep what a function makes of that."""
_CACHED_ROWS = 2048
"""Rows of its row groups. The first batch waits for one call of the function."""
_CACHED_SECONDS = 12
FAULTS = "kill-worker=1@25%,slow-store=0.4s@45%,slow-transform=3@70%"
"""The faults of the tuned run, as --inject takes them. Before the first one, the effects of the first changes are
measured."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The size of the demo, and its folder."""

    out: Path = setting(
        Path("demo-out"),
        "folder for data, table and runs; the demo empties a folder that it made before",
        metavar="DIR",
    )
    rows: int = setting(900_000, "raw log lines to make", least=1)
    ranks: int = setting(2, "training ranks", least=1)
    seed: int = setting(1, "seed of data and training")
    cluster: bool = setting(
        False,
        "start a Spark cluster of a master and two workers here, and a torchrun agent for "
        "each rank",
    )


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The feature table, and how it was made."""

    table: Path
    rows: int
    seconds: float
    """The time of the engine named in `text`."""
    text: str


def main(argv: list[str]) -> dict[str, Any]:
    args = parse(DemoOptions, argv, "python -m examples.demo", description=__doc__)
    out = args.out.resolve()
    if args.cluster and not has_java():
        raise UsageError(
            "--cluster: Spark needs Java 17 or newer (Debian, Ubuntu: sudo apt-get install "
            "openjdk-17-jre-headless)"
        )
    begin(out)
    began = time.monotonic()
    data, _ = step(
        "1/5 raw logs in Criteo's shape",
        *f"sluice synth --rows {args.rows} --seed {args.seed} --out".split(),
        out / "raw",
    )
    made = _tables(out, args.cluster)

    say(
        "\nThe table holds the parsed log. The loader applies all operators. The store is far away, so\n"
        "each read takes 0.3 s. A service looks up the counts and takes 16 ms for 64 rows. The first run keeps one\n"
        "worker a stage. The second run starts the same way and is tuned while it trains. Then three faults are\n"
        "injected: one worker process of each rank is killed (-9), each read takes 0.4 s longer, and lookups take\n"
        "3 times as long."
    )
    hosts = args.ranks if args.cluster else 1
    train = [
        *_TRAIN,
        *f"--seed {args.seed} --batch-size {args.rows // 14_400 * 16 or 16}".split(),
        "--data",
        f"{STORE}{made.table}",
        "--run-dir",
    ]
    alone, _ = step(
        "3/5 training, one worker a stage",
        *torchrun(hosts, args.ranks),
        *train,
        out / "run-one-worker",
        *f"--tuning fixed --knobs {ONE_WORKER}".split(),
        *A_SIXTH,
        hosts=hosts,
    )
    tuned, _ = step(
        "4/5 training, tuned while it runs, then disturbed",
        *torchrun(hosts, args.ranks),
        *train,
        out / "run",
        *f"--tuning auto --knobs {ONE_WORKER} --inject {FAULTS}".split(),
        hosts=hosts,
    )
    cached = _cached_twice(out)
    return _report(data, made, alone, tuned, cached, minutes=(time.monotonic() - began) / 60)


def _cached_twice(out: Path) -> list[dict[str, Any]]:
    """Loads a table twice, without a trainer and with a cache of what the service answers."""
    say("\nA function that is marked @pure need not be asked twice: a cache keeps its answers.")
    spec, table = out / "computed.toml", out / "table-computed"
    _write_spec(COMPUTED_SPEC, spec, _CACHED_ROWS)
    step(
        "5/5 a table for it",
        *_LOCAL_ETL,
        *("--spec", spec, "--input", out / "raw", "--output", table),
    )
    return [
        step(
            title,
            *("sluice", "bench", table, "--batch-size", "4096", "--transform", f"{_LOOKUP}@pure"),
            *f"--knobs decode=2,levels=16 --seconds {_CACHED_SECONDS} --cache".split(),
            out / "cache",
        )[0]
        for title in ("    a first run, which asks", "    the same again")
    ]


@contextmanager
def spark_cluster(out: Path) -> Iterator[list[str]]:
    """Starts two workers of one core each. Yields the options for spark-submit."""
    subprocess.run(["make", "-s", "dist"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (out / "cluster").mkdir()
    with StandaloneCluster(out / "cluster") as cluster:
        for _ in range(2):
            cluster.add_worker(memory="1g")
        say(
            f"\na Spark cluster: {cluster.url}, two workers of one core each; their logs are in {out / 'cluster'}"
        )
        yield [
            "--master",
            cluster.url,
            "--py-files",
            str(ROOT / "build/sluice.zip"),
            "--conf",
            f"spark.pyspark.python={sys.executable}",
            "--conf",
            "spark.executor.memory=512m",
            "--conf",
            f"spark.executor.extraJavaOptions={JAVA_OPTIONS}",
        ]


def _tables(out: Path, in_cluster: bool) -> Tables:
    """Makes the table with Spark if Java is installed, and with the local engine. Both tables must be equal."""
    spec = out / "spec.toml"
    _write_spec(SPEC, spec, GROUP_ROWS)
    etl: list[str | Path] = ["--spec", spec, "--input", out / "raw", "--output"]
    if not has_java():
        job, seconds = step(
            "2/5 the local engine writes the feature table, as there is no Java 17 for Spark",
            *_LOCAL_ETL,
            *etl,
            out / "table",
        )
        text = f"{job['rows_out']:,} rows through the local engine in {seconds:.0f} s (no Java 17, so no Spark)"
    else:
        with ExitStack() as open_:
            where = open_.enter_context(spark_cluster(out)) if in_cluster else []
            job, seconds = step(
                "2/5 Spark writes the feature table",
                "spark-submit",
                "--properties-file",
                ROOT / "spark-defaults.conf",
                *where,
                ROOT / "etl/job.py",
                *etl,
                out / "table",
            )
        again, local_s = step(
            "    the same without Java, for comparison", *_LOCAL_ETL, *etl, out / "table-local"
        )
        if again["fingerprint"] != job["fingerprint"]:
            raise StepFailed(
                f"the engines' tables differ: {job['fingerprint']} and {again['fingerprint']}"
            )
        text = (
            f"{job['rows_out']:,} rows through Spark in {seconds:.0f} s (the local engine: the same fingerprint in "
            f"{local_s:.0f} s)"
        )
    return Tables(table=out / "table", rows=job["rows_out"], seconds=seconds, text=text)


def _write_spec(source: str, path: Path, group_rows: int) -> None:
    text = (ROOT / source).read_text()
    path.write_text(re.sub("row_group_rows = .*", f"row_group_rows = {group_rows}", text))


def has_java() -> bool:
    """Whether Spark would find a Java of version 17 or newer."""
    java = shutil.which(
        "java", path=os.pathsep.join([f"{os.environ.get('JAVA_HOME', '')}/bin", ACTIVATED["PATH"]])
    )
    if java is None:
        return False
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    version = re.search(r'version "(\d+)', answer)
    return version is not None and int(version[1]) >= 17


def _report(
    data: dict[str, Any],
    made: Tables,
    alone: dict[str, Any],
    tuned: dict[str, Any],
    cached: list[dict[str, Any]],
    *,
    minutes: float,
) -> dict[str, Any]:
    """Prints and returns the results. Each figure comes from the last line of a step."""
    before = alone["outcome"]
    after = tuned["outcome"]
    run = Run.read(tuned["run"])
    order = run.of("epoch")[0]["order_hash"]
    losses = {line["step"]: line["loss"] for line in run.of("train")}
    first = {line["step"]: line["loss"] for line in Run.read(alone["run"]).of("train")}
    if not first or any(losses.get(step) != loss for step, loss in first.items()):
        raise StepFailed(f"the losses differ between {alone['run']} and {tuned['run']}")
    share = (tuned["auc"] - 0.5) / (data["bayes_auc"] - 0.5)
    happened = "\n".join(
        f"  {incident['label']}. {incident['sentence']}" for incident in after["incidents"]
    )
    missed = "".join(
        f"\n  {fault} was not injected: the training was over, or there was nothing to harm."
        for fault in tuned["input"]["faults"]["missed"]
    )
    waiting = (
        before["stall_settled"] if before["stall_settled"] is not None else before["stall_whole"]
    )
    rate = before["rows_per_s_settled"] or before["rows_per_s_whole"]
    say(
        f"""
── done in {minutes:.1f} minutes: {made.text}

  One worker a stage: waiting for input {percent(waiting)} of the time, {count(rate)} rows/s.
  Tuned: {after["headline"]}
  The same rows in the same order: both runs have the same loss in the first {max(first)} steps.
  Tuned: loss {losses[min(losses)]:.4f} → {losses[max(losses)]:.4f}, order hash {order[:12]}.
{happened}{missed}
  The lookups again: {_tell_cached(*cached)}.
  Test AUC {tuned["auc"]:.4f}: {share:.0%} of the way from chance to the best reachable {data["bayes_auc"]:.4f}.

  Open {tuned["report"]}
  Your own data: sluice bench '…/*.parquet' --tuning shadow"""
    )
    return {
        **{name: tuned[name] for name in ("auc", "decisions", "report")},
        "bayes_auc": data["bayes_auc"],
        "auc_share": round(share, 4),
        "order_hash": order,
        "stall_one_worker": waiting,
        "stall_tuned": after["stall_settled"],
        "headline": after["headline"],
        "results": {incident["label"]: incident["result"] for incident in after["incidents"]},
        "rows": made.rows,
        "etl_s": round(made.seconds, 1),
        "minutes": round(minutes, 2),
        "report_one_worker": alone["report"],
        "rows_per_s_cached": [run["rows_per_s"] for run in cached],
    }


def _tell_cached(first: dict[str, Any], again: dict[str, Any]) -> str:
    """Says what a cache brought, and what it did not keep."""
    rates = (
        f"{count(first['rows_per_s'])} rows/s at first, {count(again['rows_per_s'])} from the cache"
    )
    return (
        f"{rates}, which had {count(again['cache']['rows_read'])} rows; the service was asked for "
        f"{count(again['cache']['rows_made'])}"
    )


if __name__ == "__main__":
    run(main)
