"""`make demo`: the whole way on this machine, with real parts: raw logs, Spark, a Delta table, tuned 2-rank training.

    python -m dlrm.demo --out demo-out [--rows 600000] [--cluster]

With --cluster (`make demo-cluster`) Spark is a cluster of a master and two workers, and each rank has a torchrun agent
of its own, as on two hosts.

Each step is the command a user would type; it is printed before it runs. The last lines say what came of it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.agent.report.format import count, percent
from sluice.agent.report.run_folder import Run
from sluice.etl.common.errors import UsageError
from sluice.etl.common.program import run, say
from sluice.etl.common.settings import parse, setting
from sluice.ingest.machine import Machine

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
MARK = ".sluice-demo"  # only a folder with this mark is ever emptied
STORE = "latency://20ms"
SPEC = "features/criteo_raw.toml"
_COUNTS = ",".join(f"I{n}" for n in range(1, 14))
TRANSFORM = f"sluice.dlrm.squash:levels:{_COUNTS}>{_COUNTS}"
ONE_WORKER = "read=1,shuffle=1,levels=1,prefetch_bytes=4MiB"
"""One worker a stage, and a buffer of one second: in the usual one, half an epoch would wait and hide what happens."""
_ENDS = (signal.SIGINT, signal.SIGTERM)
# As `. .venv/bin/activate` does: spark-submit looks for its python3 on the path.
# One thread a rank: torchrun would set the same, with a banner about it.
ACTIVATED = {"OMP_NUM_THREADS": "1", **os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}


def _disturbances(cores: float) -> str:
    """The faults that the demo injects into the first epoch, as --inject takes them."""
    return f"slow-transform=3@38%,kill-worker@66%,cores={cores / 2:g}@74%,cores={cores:g}@86%"


class StepFailed(RuntimeError):
    """A step of the demo ended badly; its own message is above."""


def step(title: str, *command: str | os.PathLike[str], hosts: int = 1) -> tuple[dict[str, Any], float]:
    """Runs a command as a user would, its progress passed through; returns its JSON line and its seconds. It is started
    as often as there are `hosts`, one of which says that line."""
    words = [os.fspath(w) for w in command]
    say(f"\n── {title}\n$ {' '.join(_short(w) for w in words)}{'' if hosts == 1 else f'  # {hosts} times'}")
    began = time.monotonic()
    # Sessions of their own: an interrupt goes to all of the step's processes, and none outlives the demo.
    running: list[subprocess.Popen[str]] = []
    last, (read, write) = "", os.pipe()
    try:
        with _uninterrupted():
            for _ in range(hosts):
                running.append(subprocess.Popen(words, stdout=write, text=True, cwd=ROOT, env=ACTIVATED,
                                                start_new_session=True))
            os.close(write)
        with open(read) as lines:
            for line in lines:
                if last:
                    say(last)  # only the last line is the result; what comes before it is for people
                last = line.rstrip()
        codes = [process.wait() for process in running]
    except BaseException:
        _end(running)
        raise
    if any(codes):
        raise StepFailed(f"{title}: ended with {max(codes, key=abs)} {last}")
    return json.loads(last), time.monotonic() - began


def _short(word: str) -> str:
    path = Path(word)
    for base in (ROOT, Path.cwd()):
        if path.is_absolute() and path.is_relative_to(base):
            return path.relative_to(base).as_posix()
    return word


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Holds an interrupt back until the context ends: a process that is just starting must be known first."""
    came: list[Any] = []
    answers = {one: signal.signal(one, lambda *got: came.append(got)) for one in _ENDS}
    try:
        yield
    finally:
        for one, answer in answers.items():
            signal.signal(one, answer)
        if came and callable(answer := answers[came[0][0]]):
            answer(*came[0])


def _end(running: list[subprocess.Popen[str]]) -> None:
    for signum in (signal.SIGINT, signal.SIGKILL):
        until = time.monotonic() + 1.0
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))


def _fresh(out: Path) -> None:
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        raise UsageError(f"{out} is not empty and was not made by the demo; name another folder with --out")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARK).touch()


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """How large the demo is, and where it goes."""

    out: Path = setting(Path("demo-out"), "folder for data, table and runs; emptied first if the demo made it",
                        metavar="DIR")
    rows: int = setting(600_000, "raw log lines to make", least=1)
    ranks: int = setting(2, "training ranks", least=1)
    seed: int = setting(1, "seed of data and training")
    cluster: bool = setting(False, "start a Spark cluster of a master and two workers here, and a torchrun agent for "
                            "each rank")


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The feature table, and how it was made."""

    table: Path
    rows: int
    seconds: float
    """The seconds that the engine named in `text` took."""
    text: str


def main(argv: list[str]) -> dict[str, Any]:
    args = parse(DemoOptions, argv=argv, prog="python -m dlrm.demo", description=__doc__)
    out = args.out.resolve()
    if args.cluster and not has_java():
        raise UsageError("--cluster: Spark needs Java 17 or newer (Debian, Ubuntu: sudo apt-get install "
                         "openjdk-17-jre-headless)")
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # what was started ends with the demo
    _fresh(out)
    began = time.monotonic()
    data, _ = step("1/4 raw logs in Criteo's shape", "sluice", "synth", "--rows", str(args.rows),
                   "--seed", str(args.seed), "--out", out / "raw")
    made = _tables(out, args.cluster)

    say("\nThe table is the parsed log: all operators are left to the loader. It lies behind a store that takes 20 ms\n"
        "a read, and counts are looked up at a service that takes 12 ms for 64 rows. First one worker a stage, left\n"
        "alone; then the same start, tuned while it trains. Later the lookups become 3 times dearer, worker processes\n"
        "are killed (-9), and both ranks together get half of the cores.")
    hosts = args.ranks if args.cluster else 1
    train: list[str | Path] = ["-m", "dlrm.train", "--data", f"{STORE}{made.table}", "--transform", TRANSFORM, "--seed",
                               str(args.seed), "--width", "32", "--log-every", "10"]
    alone, _ = step("3/4 training, one worker a stage", *_torchrun(hosts, args.ranks), *train, "--run-dir",
                    out / "run-one-worker", "--tuning", "fixed", "--knobs", ONE_WORKER, hosts=hosts)
    tuned, _ = step("4/4 training, tuned while it runs, then disturbed", *_torchrun(hosts, args.ranks), *train,
                    "--run-dir", out / "run", "--tuning", "auto", "--knobs", f"{ONE_WORKER},levels.backend=process",
                    "--inject", _disturbances(Machine().cores()), hosts=hosts)
    return _told(data, made, alone, tuned, minutes=(time.monotonic() - began) / 60)


def _torchrun(hosts: int, ranks: int) -> list[str]:
    """The words that start so many ranks here, or those that each of so many hosts starts its ranks with: they meet at
    one of them."""
    if hosts == 1:
        return ["torchrun", f"--nproc-per-node={ranks}"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meet = f"127.0.0.1:{probe.getsockname()[1]}"
    return ["torchrun", f"--nnodes={hosts}", f"--nproc-per-node={ranks // hosts}", "--rdzv-backend=c10d",
            "--rdzv-id=demo", f"--rdzv-endpoint={meet}", "--local-addr=127.0.0.1"]


@contextmanager
def _cluster(out: Path) -> Iterator[list[str]]:
    """Two workers of one core each; yields what spark-submit must be told to have a job done there."""
    from sluice.etl.spark.processes.standalone_cluster import StandaloneCluster

    subprocess.run(["make", "-s", "dist"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (out / "cluster").mkdir()
    with StandaloneCluster(out / "cluster") as cluster:
        for _ in range(2):
            cluster.add_worker(cores=1, memory="1g")
        say(f"\na Spark cluster: {cluster.url}, two workers of one core each; their logs are in {out / 'cluster'}")
        yield ["--master", cluster.url, "--py-files", str(ROOT / "build/sluice.zip"), "--conf",
               f"spark.pyspark.python={sys.executable}", "--conf", "spark.executor.memory=512m"]


def _tables(out: Path, in_cluster: bool) -> Tables:
    """Makes the table: with Spark where Java is, and then with the local engine as well, which must make the same."""
    local = ("sluice", "etl", "--engine", "local", "--spec", ROOT / SPEC, "--input", out / "raw", "--output")
    if not has_java():
        job, seconds = step("2/4 the local engine writes the feature table, as there is no Java 17 for Spark", *local,
                            out / "table")
        text = f"{job['rows_out']:,} rows through the local engine in {seconds:.0f} s (no Java 17, so no Spark)"
    else:
        with ExitStack() as open_:
            where = open_.enter_context(_cluster(out)) if in_cluster else []
            job, seconds = step("2/4 Spark writes the feature table", "spark-submit", "--properties-file",
                                ROOT / "spark-defaults.conf", *where, ROOT / "etl/job.py", "--spec", ROOT / SPEC,
                                "--input", out / "raw", "--output", out / "table")
        again, local_s = step("    the same without Java, for comparison", *local, out / "table-local")
        if again["fingerprint"] != job["fingerprint"]:
            raise StepFailed(f"the engines' tables differ: {job['fingerprint']} and {again['fingerprint']}")
        text = (f"{job['rows_out']:,} rows through Spark in {seconds:.0f} s (the local engine: the same fingerprint in "
                f"{local_s:.0f} s)")
    return Tables(table=out / "table", rows=job["rows_out"], seconds=seconds, text=text)


def has_java() -> bool:
    """Whether Spark would find a Java of version 17 or newer."""
    java = shutil.which("java", path=os.pathsep.join([f"{os.environ.get('JAVA_HOME', '')}/bin", ACTIVATED["PATH"]]))
    if java is None:
        return False
    told = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    version = re.search(r'version "(\d+)', told)
    return version is not None and int(version[1]) >= 17


def _told(data: dict[str, Any], made: Tables, alone: dict[str, Any], tuned: dict[str, Any], *, minutes: float
          ) -> dict[str, Any]:
    """Says what came of it all. Each figure is the one that the step itself gave, in its last line."""
    before, after, run = alone["outcome"], tuned["outcome"], Run.read(tuned["run"])
    order, other = (one.of("epoch")[0]["order_hash"] for one in (run, Run.read(alone["run"])))
    if order != other:
        raise StepFailed(f"the order of rows differs between {alone['run']} and {tuned['run']}")
    losses = [line["loss"] for line in run.of("train")]
    share = (tuned["auc"] - 0.5) / (data["bayes_auc"] - 0.5)
    happened = "\n".join(f"  {one['label']}. {one['sentence']}" for one in after["occasions"])
    missed = "".join(f"\n  {fault} did not come: the training was over."
                     for fault in tuned["input"]["faults"]["missed"])
    waiting = before["stall_settled"] if before["stall_settled"] is not None else before["stall_whole"]
    rate = before["rows_per_s_settled"] or before["rows_per_s_whole"]
    say(f"""
── done in {minutes:.1f} minutes: {made.text}

  One worker a stage: waiting for input {percent(waiting)} of the time, {count(rate)} rows/s.
  Tuned: {after['headline']}
  The same rows in the same order: order hash {order[:12]} of the first epoch in both. Loss {losses[0]:.4f} → """
        f"""{losses[-1]:.4f}.
{happened}{missed}
  Test AUC {tuned['auc']:.4f}: {share:.0%} of the way from chance to the best reachable {data['bayes_auc']:.4f}.

  Open {tuned['report']}
  Your own data: sluice bench '…/*.parquet' --tuning shadow""")
    return {"auc": tuned["auc"], "bayes_auc": data["bayes_auc"], "auc_share": round(share, 4), "order_hash": order,
            "stall_one_worker": waiting, "stall_tuned": after["stall_settled"], "headline": after["headline"],
            "results": {one["label"]: one["result"] for one in after["occasions"]}, "decisions": tuned["decisions"],
            "rows": made.rows, "etl_s": round(made.seconds, 1), "minutes": round(minutes, 2),
            "report": tuned["report"], "report_one_worker": alone["report"]}


if __name__ == "__main__":
    run(main)
