"""`make demo`: the whole way on this machine, with real parts: raw logs, Spark, a Delta table, 2-rank training.

    python -m dlrm.demo --out demo-out [--rows 1000000]

Each step is the command a user would type; it is printed before it runs. The last lines say what came of it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.etl.common.errors import UsageError
from sluice.etl.common.program import run, say
from sluice.etl.common.settings import parse, setting
from sluice.ingest.machine import Machine

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
MARK = ".sluice-demo"  # only a folder with this mark is ever emptied
# The rate of eight A100s in a published DLRM run (facebookresearch/dlrm, torchrec_dlrm/README): 1.19 M samples/s.
ACCELERATOR_ROWS_PER_S = 1_190_128
BENCH_BATCH = 8192
# As `. .venv/bin/activate` does: spark-submit looks for its python3 on the path.
# One thread a rank: torchrun would set the same, with a banner about it.
ACTIVATED = {"OMP_NUM_THREADS": "1", **os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}


def _disturbances(seconds: float, cores: float) -> str:
    """The faults that the demo injects into a run of so many seconds, as --inject takes them."""
    faults = (("slow-transform=4", 0.25), ("kill-worker", 0.45), (f"cores={cores / 4:g}", 0.6),
              (f"cores={cores:g}", 0.8))
    return ",".join(f"{name}@{share * seconds:.1f}s" for name, share in faults)


class StepFailed(RuntimeError):
    """A step of the demo ended badly; its own message is above."""


def step(title: str, *command: str | os.PathLike[str]) -> tuple[dict[str, Any], float]:
    """Runs a command as a user would, its progress passed through; returns its JSON line and its seconds."""
    words = [os.fspath(w) for w in command]
    say(f"\n── {title}\n$ {' '.join(_short(w) for w in words)}")
    began = time.monotonic()
    # A session of its own: an interrupt goes to all of the step's processes, and none outlives the demo.
    process, last = None, ""
    try:
        with _uninterrupted():
            process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=ACTIVATED,
                                       start_new_session=True)
        with process.stdout as lines:  # type: ignore[union-attr]
            for line in lines:
                if last:
                    say(last)  # only the last line is the result; what comes before it is for people
                last = line.rstrip()
        process.wait()
    except BaseException:
        if process is not None:
            _end(process)
        raise
    if process.returncode:
        raise StepFailed(f"{title}: ended with {process.returncode} {last}")
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
    answer = signal.signal(signal.SIGINT, lambda *got: came.append(got))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, answer)
        if came and callable(answer):
            answer(*came[0])


def _end(process: subprocess.Popen[str]) -> None:
    for signum, patience in ((signal.SIGINT, 1.0), (signal.SIGKILL, 1.0)):
        try:
            os.killpg(process.pid, signum)
            process.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


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
    rows: int = setting(1_000_000, "raw log lines to make", least=1)
    ranks: int = setting(2, "training ranks", least=1)
    bench_seconds: float = setting(15.0, "seconds of the loader run with one worker, a quarter of the tuned one's",
                                   above=0)
    seed: int = setting(1, "seed of data and training")


def main(argv: list[str]) -> dict[str, Any]:
    args = parse(DemoOptions, argv=argv, prog="python -m dlrm.demo", description=__doc__)
    out = args.out.resolve()
    _fresh(out)
    began = time.monotonic()
    raw, table, run_dir = out / "raw", out / "table", out / "run"
    cores = Machine().cores()

    data, _ = step("1/5 raw logs in Criteo's shape", "sluice", "synth", "--rows", str(args.rows),
                   "--seed", str(args.seed), "--out", raw)
    job, etl_s = step("2/5 Spark writes the feature table", "spark-submit", "--properties-file",
                      ROOT / "spark-defaults.conf", ROOT / "etl/job.py", "--spec", ROOT / "features/criteo.toml",
                      "--input", raw, "--output", table)

    say("\nA stand-in for a fast trainer (1.19 M rows/s, as eight A100s took) reads the table as from an object store\n"
        "(50 ms a row group) through a transform in Python, from one worker in each stage: first as it is, then tuned\n"
        "while the transform becomes 4 times dearer, a worker is killed (-9), and a quarter of the cores is left.")
    bench: list[str | Path] = ["sluice", "bench", table, "--batch-size", str(BENCH_BATCH), "--store-latency-ms", "50",
             "--step-ms", f"{1000 * BENCH_BATCH / ACCELERATOR_ROWS_PER_S:.2f}", "--udf", "dlrm.squash:squash"]
    fixed, _ = step("3/5 ingestion, one worker", *bench, "--tuning", "fixed", "--knobs", "read=1,shuffle=1",
                    "--seconds", str(args.bench_seconds))
    tuned, _ = step("4/5 ingestion, tuned live and disturbed", *bench, "--tuning", "auto", "--knobs",
                    "read=1,shuffle=1,squash.backend=process", "--seconds", str(4 * args.bench_seconds), "--inject",
                    _disturbances(4 * args.bench_seconds, cores), "--run", out / "run-ingest")
    trained, train_s = step(f"5/5 training on {args.ranks} ranks", "torchrun", f"--nproc-per-node={args.ranks}",
                            "-m", "dlrm.train", "--data", table, "--run-dir", run_dir, "--seed", str(args.seed))
    evaluated, _ = step("evaluation of the checkpoint on the test split", "sluice", "evaluate",
                        "--run-dir", run_dir, "--data", table, "--split", "test")

    share = (evaluated["auc"] - 0.5) / (data["bayes_auc"] - 0.5)
    minutes = (time.monotonic() - began) / 60
    same = "order hash equal to the one-thread run" if fixed["order_hash"] == tuned["order_hash"] \
        else "BUT THE ORDER DIFFERS"
    settled = max(0.0, 1 - (tuned["occasions"][0]["before"] or 0.0) / ACCELERATOR_ROWS_PER_S)
    happened = "\n".join(f"  {one['label']}. {one['sentence']}" for one in tuned["occasions"])
    say(f"""
── done in {minutes:.1f} minutes: {job['rows_out']:,} rows through Spark in {etl_s:.0f} s, trained in {train_s:.0f} s

  Input-bound share of a 1.19 M rows/s trainer: {fixed['stall_fraction']:.0%} with one worker, """
        f"""{settled:.0%} once tuned ({same}).
{happened}
  Decisions of the agent: {tuned['decisions']} there, {trained['decisions']} during training, none of them a restart.
  Test AUC {evaluated['auc']:.4f}: {share:.0%} of the way from chance to the best reachable {data['bayes_auc']:.4f}.

  Open {trained['report']}
  and, for the picture of the ingestion, {tuned['report']}
  Your own data: sluice bench '…/*.parquet' --tuning shadow""")
    return {"auc": evaluated["auc"], "bayes_auc": data["bayes_auc"], "auc_share": round(share, 4),
            "stall_one_worker": fixed["stall_fraction"], "stall_tuned": tuned["stall_fraction"],
            "decisions": tuned["decisions"] + trained["decisions"], "rows": job["rows_out"],
            "minutes": round(minutes, 2), "report": trained["report"], "report_ingest": tuned["report"]}


if __name__ == "__main__":
    run(main)
