"""Measures the ETL job, one table per figure: `python -m benchmarks.etl FIGURE… --work DIR`.

  job      the job compared with a minimal job (see benchmarks.etl_turns), and its rows per second and core
  linear   whether the time of 1, 2 and 8 M rows is linear
  cores    local[1], and local[1] pinned to one core, against local[2], and the gain of two busy processes over one
  driver   peak memory of the driver at 1 and 8 M rows, with the executors of a standalone cluster

Each figure is measured in new Spark sessions with spark-defaults.conf. Their start is not counted, and a first turn
warms them up. DIR/results.jsonl keeps the measurements. The same command resumes an interrupted figure, and prints a
finished one again. The last line is JSON.

See also benchmarks.etl_peers (other tools), benchmarks.etl_ladder (one change at a time) and benchmarks.codecs (file
formats)."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.results import Results, table
from sluice.common.program import run, say
from sluice.etl.spark.processes.standalone_cluster import StandaloneCluster

ROOT = Path(__file__).resolve().parent.parent
MILLION = 1_000_000


def submit_words(master: str, conf: Mapping[str, str] | None = None) -> list[str]:
    """Returns the arguments of spark-submit, for PYSPARK_SUBMIT_ARGS."""
    words = ["--properties-file", str(ROOT / "spark-defaults.conf"), "--master", master]
    for key, value in {"spark.pyspark.python": sys.executable, **(conf or {})}.items():
        words += ["--conf", f"{key}={value}"]
    return [*words, "pyspark-shell"]


def session(
    work: Path,
    turns: list[str],
    master: str = "local[2]",
    conf: Mapping[str, str] | None = None,
    one_core: bool = False,
) -> dict[str, Any]:
    """Runs turns in a new session, and returns its last line."""
    prefix = ["taskset", "-c", str(min(os.sched_getaffinity(0)))] if one_core else []
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYSPARK_SUBMIT_ARGS": shlex.join(submit_words(master, conf)),
    }
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "benchmarks.etl_turns", "--work", str(work), *turns],
        cwd=ROOT,
        env=env,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
    )
    if done.returncode:
        raise RuntimeError(f"the session for {' '.join(turns)} ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def job(work: Path, results: Results, rows: int, repeats: int) -> list[dict[str, Any]]:
    asked = [
        f"job:{MILLION // 2}",
        f"rewrite:{MILLION // 2}",
        *[f"rewrite:{rows}", f"job:{rows}"] * repeats,
    ]
    found = results.once({"figure": "job", "turns": asked}, lambda: session(work, asked))["turns"][
        2:
    ]
    return [beside(rows, found)]


def beside(rows: int, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the medians of both kinds of turns, and the median ratio of two successive turns."""
    jobs, least = ([t for t in turns if t["kind"] == kind] for kind in ("job", "rewrite"))
    cores = [rows / (t["stages_cpu_s"]["fitting"] + t["stages_cpu_s"]["writing"]) for t in jobs]
    seconds = [t["seconds"] for t in jobs]
    return {
        "rows": rows,
        "job s": statistics.median(seconds),
        "rewrite s": statistics.median(t["seconds"] for t in least),
        "job / rewrite": statistics.median(
            a["seconds"] / b["seconds"] for a, b in zip(jobs, least, strict=True)
        ),
        "rows/s": rows / statistics.median(seconds),
        "fit and apply, rows/s a core": statistics.median(cores),
        "lowest": min(cores),
        "job CPU s": statistics.median(t["cpu_s"] for t in jobs),
        "rewrite CPU s": statistics.median(t["cpu_s"] for t in least),
    }


def linear(work: Path, results: Results, sizes: list[int]) -> list[dict[str, Any]]:
    asked = [f"job:{sizes[0]}", *[f"job:{rows}" for rows in sizes]]
    found = results.once({"figure": "linear", "turns": asked}, lambda: session(work, asked))[
        "turns"
    ][1:]
    return on_a_line([(t["rows"], t["seconds"]) for t in found])


def on_a_line(points: list[tuple[int, float]]) -> list[dict[str, Any]]:
    """Returns the time of each size, and the time on the line through the smallest and the largest size."""
    (n0, s0), (n1, s1) = points[0], points[-1]
    slope = (s1 - s0) / (n1 - n0)
    return [
        {
            "rows": n,
            "job s": s,
            "s a million": s / n * MILLION,
            "line": s0 + slope * (n - n0),
            "off the line": s / (s0 + slope * (n - n0)) - 1,
        }
        for n, s in points
    ]


def cores(work: Path, results: Results, rows: int, rounds: int = 2) -> list[dict[str, Any]]:
    """One task of local[1] already keeps more than a core busy: the JVM and its Python worker work at the same time.

    Sessions and busy processes take turns; each counts with its best, as a machine that others share only ever makes
    things slower. The first two turns of a session warm it up."""
    asked = [f"job:{MILLION // 2}", *[f"job:{rows}"] * 3]
    turns: dict[str, list[dict[str, Any]]] = {}
    spins: list[list[int]] = []
    for n in range(rounds):
        for name, master, one_core in (
            ("local[1] on one core", "local[1]", True),
            ("local[1]", "local[1]", False),
            ("local[2]", "local[2]", False),
        ):
            about = {"figure": "cores", "session": name, "turns": asked, "round": n}
            turns.setdefault(name, []).extend(
                results.once(about, lambda: session(work, asked, master, one_core=one_core))[  # noqa: B023
                    "turns"
                ][2:]
            )
        spins.append(
            results.once(
                {"figure": "cores", "spins": n}, lambda: [sum(_spin(k, 5.0)) for k in (1, 2)]
            )
        )
    gain = max(two for _, two in spins) / max(one for one, _ in spins)
    found = {name: min(all_turns, key=lambda t: t["seconds"]) for name, all_turns in turns.items()}
    best = found["local[2]"]["seconds"]
    return [
        {
            "session": name,
            "job s": turn["seconds"],
            "cores in use": turn["cpu_s"] / turn["seconds"],
            "gain of local[2]": turn["seconds"] / best,
            "gain of two busy processes": gain,
            "of it": turn["seconds"] / best / gain,
        }
        for name, turn in found.items()
    ]


def _spin(processes: int, seconds: float) -> list[int]:
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        start = time.time() + 1.0  # all are up by then
        return pool.starmap(_spins, [(start, seconds)] * processes, chunksize=1)


def _spins(start: float, seconds: float) -> int:
    while time.time() < start:
        pass
    done = 0
    while time.time() < start + seconds:
        sum(range(1000))
        done += 1
    return done


def driver(work: Path, results: Results, sizes: list[int]) -> list[dict[str, Any]]:
    return [
        {
            "rows": rows,
            **results.once({"figure": "driver", "rows": rows}, lambda: _driver(work, rows)),  # noqa: B023
        }
        for rows in sizes
    ]


def _driver(work: Path, rows: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="sluice-cluster-") as place,
        StandaloneCluster(Path(place)) as cluster,
    ):
        cluster.add_worker(cores=2, memory="3g")
        conf = {
            "spark.executor.memory": "2g",
            "spark.executorEnv.PYTHONPATH": str(ROOT),
            "spark.driver.memory": "2g",
        }
        turn = session(work, [f"job:{rows}"], cluster.url, conf)["turns"][0]
    return {
        "job s": turn["seconds"],
        "driver's JVM MiB": turn["peak_mib"]["jvm"],
        "driver's Python MiB": turn["peak_mib"]["driver"],
    }


def main(argv: list[str]) -> dict[str, Any]:
    figures = {
        "job": lambda w, r, a: job(w, r, a.rows, a.repeats),
        "cores": lambda w, r, a: cores(w, r, a.rows),
        "linear": lambda w, r, a: linear(w, r, a.sizes),
        "driver": lambda w, r, a: driver(w, r, [a.sizes[0], a.sizes[-1]]),
    }
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.etl",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "figures", nargs="*", metavar="FIGURE", help=f"of {', '.join(figures)} (default: all)"
    )
    parser.add_argument(
        "--work",
        type=Path,
        required=True,
        help="folder for inputs, outputs and results; some 10 GB",
    )
    parser.add_argument(
        "--rows", type=int, default=2 * MILLION, help="of job and cores (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="of job and rewrite (default: %(default)s)"
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[MILLION, 2 * MILLION, 8 * MILLION],
        help="of linear and driver (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    if wrong := [name for name in args.figures if name not in figures]:
        parser.error(f"no such figure: {wrong[0]} (there are: {', '.join(figures)})")
    args.work.mkdir(parents=True, exist_ok=True)
    results, found = Results(args.work / "results.jsonl"), {}
    for name in args.figures or figures:
        found[name] = figures[name](args.work, results, args)
        say(f"\n{name}\n{table(found[name])}\n")
    return {"load": round(os.getloadavg()[0], 1), **found}


if __name__ == "__main__":
    run(main)
