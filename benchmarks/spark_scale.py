"""Runs a large job on a standalone Spark cluster of this machine, with and without failures, and measures its cost.

    python -m benchmarks.spark_scale --work DIR [--rows 50000000] [--values 20000000] [--files 10000]

Two workers have an executor of 512 MiB each. A column has a vocabulary that is too large for the driver and for a
worker, and 30 % of the rows have the same value of it. The rows are in many small files.

The first run has no failures. In the second run, SIGKILL ends an executor during fitting, and a worker with its
executor during writing. That worker does not come back. The table must have the same fingerprint, learned state, rows
and files. The default needs some 20 GiB in DIR, by calculation: input, parsed rows, shuffles and two tables.

The last line is JSON: the seconds of each stage and of the commit, processor seconds, and the peak memory in MiB of the
driver's processes and of all executors' processes, JVM and Python together."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.csv

from benchmarks.results import ROOT
from examples.demo.standalone_cluster import StandaloneCluster
from sluice.common.lines import say
from sluice.common.program import run
from sluice.etl.table.table import FeatureTable

MIB, HOT = 2**20, 0.3
SPEC = """
[input]
columns = ["label:int", "user:text", "page:text", "price:float"]
[table]
split = {train = 0.9, test = 0.1}
[[column]]
name = "label"
role = "label"
[[column]]
name = "user"
role = "sparse"
ops = [{op = "categorify", max_size = 20000000, oov = 8}]
[[column]]
name = "page"
role = "sparse"
ops = [{op = "categorify"}]
[[column]]
name = "price"
role = "dense"
ops = [{op = "fill_mean"}, {op = "standardise"}]
"""
_OF_EXECUTORS = {"org.apache.spark.executor.CoarseGrainedExecutorBackend", "pyspark.daemon"}
_BIN = Path(sys.executable).parent
# Runs a command, and ends it with all its children when the standard input is closed. That also happens when our
# process ends, for any reason.
_UNTIL_CLOSED = (
    'exec 3<&0; (read -r _ <&3; kill -TERM 0) >/dev/null 2>&1 & exec "$@" 3<&- </dev/null'
)


def write_input(folder: Path, rows: int, values: int, files: int) -> None:
    """Writes rows in so many files. If there are enough rows, all values occur. One value is in the share `HOT` of
    rows."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(4)
    options = pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    bounds = [rows * number // files for number in range(files + 1)]
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        place = np.arange(first, last)
        user = np.where(draw.random(len(place)) < HOT, 0, place % values)
        part = pa.table(
            {
                "label": draw.integers(0, 2, len(place), np.int8),
                "user": user,
                "page": draw.integers(0, 1000, len(place)),
                "price": np.round(draw.random(len(place)), 3),
            }
        )
        pa.csv.write_csv(part, folder / f"{number:05}.tsv", options)


@dataclass(slots=True)
class Submitted:
    """A running job: the times of its stages, and the processor time and peak memory of its processes."""

    process: subprocess.Popen[str]
    began: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)
    peak_mib: dict[str, int] = field(default_factory=lambda: {"driver": 0, "executors": 0})
    spent: dict[int, float] = field(default_factory=dict)
    """The processor seconds of each process of a job or its cluster, by its id."""

    @property
    def processor_s(self) -> float:
        return round(sum(self.spent.values()), 1)

    def followed(self, meanwhile: Callable[[str], None] = lambda _line: None) -> dict[str, Any]:
        """Returns the job's last line. `meanwhile` is called with each line."""
        sampler = threading.Thread(target=self._sample, daemon=True)
        sampler.start()
        said, name, last = [], "", self.began
        with self.process as process, self._ended_with_us():
            assert process.stderr is not None
            assert process.stdout is not None
            for line in process.stderr:
                said.append(line)
                meanwhile(line)
                if line.endswith(" …\n"):
                    name, last = line.split()[0], time.monotonic()
                elif ": done in " in line:
                    self.seconds[name] = round(time.monotonic() - last, 1)
                    last = time.monotonic()
                elif line.startswith("version "):
                    self.seconds["commit"] = round(time.monotonic() - last, 1)
            out = process.stdout.read()
        if process.returncode:
            raise RuntimeError(f"the job ended with {process.returncode}: {''.join(said)[-2000:]}")
        sampler.join()
        result: dict[str, Any] = json.loads(out.splitlines()[-1])
        return result

    @contextlib.contextmanager
    def _ended_with_us(self) -> Iterator[None]:
        """Ends the job, which has its own process session, if this program is interrupted."""
        try:
            yield
        except BaseException:
            os.killpg(self.process.pid, signal.SIGTERM)
            raise

    def _sample(self) -> None:
        while self.process.poll() is None:
            driver = {process.pid for process in _family(self.process.pid)}
            now = dict.fromkeys(self.peak_mib, 0)
            for process in _family(os.getpid())[1:]:
                try:
                    times = process.cpu_times()
                    self.spent[process.pid] = times.user + times.system
                    if process.pid in driver and process.name().startswith(("java", "python")):
                        now["driver"] += process.memory_full_info().pss // MIB
                    elif _OF_EXECUTORS & set(process.cmdline()):
                        now["executors"] += process.memory_full_info().pss // MIB
                except psutil.Error:  # it has just ended
                    continue
            self.peak_mib = {side: max(peak, now[side]) for side, peak in self.peak_mib.items()}
            time.sleep(0.5)


def _family(root: int) -> list[psutil.Process]:
    try:
        first = psutil.Process(root)
        return [first, *first.children(recursive=True)]
    except psutil.Error:
        return []


def _is_executor(process: psutil.Process) -> bool:
    try:
        return process.name() == "java" and not _OF_EXECUTORS.isdisjoint(process.cmdline())
    except psutil.Error:  # it has ended meanwhile
        return False


def submit(place: Path, output: Path, *words: str, then: Sequence[str] = ()) -> Submitted:
    """Starts a job. `then` are the job's arguments, after those of spark-submit."""
    command = [
        "sh",
        "-c",
        _UNTIL_CLOSED,
        "job",
        _BIN / "spark-submit",
        "--properties-file",
        ROOT / "spark-defaults.conf",
        *words,
        ROOT / "etl/job.py",
        "--spec",
        place / "spec.toml",
        "--input",
        place / "in",
        "--output",
        output,
        *then,
    ]
    env = {**os.environ, "PATH": f"{_BIN}:{os.environ['PATH']}", "SPARK_LOCAL_IP": "127.0.0.1"}
    return Submitted(
        subprocess.Popen(
            [str(word) for word in command],
            cwd=place,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
    )


def on_cluster(
    place: Path, name: str, options: argparse.Namespace, disturb: dict[str, float] | None = None
) -> dict[str, Any]:
    """Runs a job on a new cluster. `disturb` has the failures, with their time after the start of a stage."""
    begun: list[str] = []
    came: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="cluster-", dir=place) as folder,
        StandaloneCluster(Path(folder)) as cluster,
    ):
        for _ in range(2):
            cluster.add_worker(memory="512m")
        settings = {
            "spark.pyspark.python": sys.executable,
            "spark.executor.memory": "512m",
            "spark.driver.memory": options.driver_memory,
        }
        job = submit(
            place,
            place / name,
            "--master",
            cluster.url,
            "--py-files",
            str(ROOT / "build/sluice.zip"),
            *[word for key, value in settings.items() for word in ("--conf", f"{key}={value}")],
            then=["--worker-memory", str(options.worker_memory)],
        )

        def disturbing(line: str) -> None:
            for stage, whom in (("fitting", "executor"), ("writing", "worker")):
                if disturb is not None and line.startswith(stage) and stage not in begun:
                    begun.append(stage)
                    threading.Timer(disturb[stage], kill, (whom, stage, came)).start()

        result = job.followed(disturbing)
        table = FeatureTable.open(place / name)
        return {
            "seconds": round(time.monotonic() - job.began, 1),
            "processor_s": job.processor_s,
            "stages": job.seconds,
            "peak_mib": job.peak_mib,
            "fingerprint": result["fingerprint"],
            "state": table.record.state,
            "ways": result["ways"],
            "rows": table.rows,
            "files": [file.rows for file in table.files],
            "disturbed": came,
        }


def kill(whom: str, stage: str, came: list[str]) -> None:
    """Ends one executor of this process's cluster, or one worker with its executor, as a machine that is gone would;
    `came` is added to if there was one."""
    executors = [process for process in _family(os.getpid()) if _is_executor(process)]
    if executors:
        for process in [executors[0].parent(), executors[0]][whom == "executor" :]:
            process.send_signal(signal.SIGKILL)
        came.append(f"{whom} killed while {stage}")
        say(f"{came[-1]}: {executors[0].pid}")


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for input, tables and clusters; it is kept"
    )
    parser.add_argument("--rows", type=int, default=50_000_000, help="(default: %(default)s)")
    parser.add_argument(
        "--values",
        type=int,
        default=20_000_000,
        help="of the large vocabulary (default: %(default)s)",
    )
    parser.add_argument(
        "--files", type=int, default=10_000, help="of the input (default: %(default)s)"
    )
    parser.add_argument(
        "--driver-memory", default="512m", help="the JVM's heap (default: %(default)s)"
    )
    parser.add_argument(
        "--worker-memory",
        type=int,
        default=256,
        metavar="MIB",
        help="as etl/job.py has it (default: "
        "%(default)s); the less, the smaller a vocabulary that stays in files",
    )
    args = parser.parse_args(argv)
    place = args.work.resolve() / f"{args.rows}-{args.values}-{args.files}"
    if not (place / "spec.toml").exists():  # written last
        shutil.rmtree(place, ignore_errors=True)
        write_input(place / "in", args.rows, args.values, args.files)
        (place / "spec.toml").write_text(SPEC)
    for name in ("calm", "disturbed"):
        shutil.rmtree(place / name, ignore_errors=True)
    subprocess.run(["make", "-s", "dist"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    calm = on_cluster(place, "calm", args)
    say(f"undisturbed: {calm}")
    halves = {stage: calm["stages"][stage] / 2 for stage in ("fitting", "writing")}
    disturbed = on_cluster(place, "disturbed", args, halves)
    say(f"disturbed: {disturbed}")
    runs = {"calm": calm, "disturbed": disturbed}
    keys = ("fingerprint", "state", "rows", "files")
    same = all(run[key] == calm[key] for run in runs.values() for key in keys)
    return {
        "rows": args.rows,
        "values": args.values,
        "files": args.files,
        "same": same,
        **{name: {**run, "files": len(run["files"])} for name, run in runs.items()},
    }


if __name__ == "__main__":
    run(main)
