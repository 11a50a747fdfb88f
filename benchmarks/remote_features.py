"""What remote workers cost and save, in processor time: transforms elsewhere, and workers on another host.

python -m benchmarks.remote_features [--rounds 3]
unshare -rn python -m benchmarks.remote_features --only hosts     two hosts are two network namespaces
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from benchmarks import remote_functions
from benchmarks.loaders import made_table
from benchmarks.service import process_s
from sluice.common.program import run as program
from sluice.common.program import say
from sluice.etl.table.table import FeatureTable
from sluice.ingest.knobs import Knobs
from sluice.ingest.loader import BatchLoader
from sluice.ingest.read.sources import Reading
from sluice.ingest.stages.transform import Transform

BATCH, STEP_S = 1024, 0.004
_TRAINER = """
import json, sys, time
from sluice.etl.table.table import FeatureTable
from sluice.ingest.knobs import Knobs
from sluice.ingest.loader import BatchLoader
from sluice.ingest.read.sources import Reading
table, workers, epochs, batch, step_s = json.loads(sys.argv[1])
loader = BatchLoader(FeatureTable.open(table), batch_size=batch, fill=0.0, read_ahead_epochs=epochs + 1,
                     workers=workers, reading=Reading(reader="arrow"),
                     knobs=Knobs(workers={"read": 2}, backend={"read": "remote"} if workers else {},
                                 read_ahead_bytes=2**24, prefetch_bytes=2**22))
waited = rows = 0
def epoch():
    global waited, rows
    batches, at = iter(loader), time.perf_counter()
    for one in batches:
        waited += time.perf_counter() - at
        rows += one.rows
        time.sleep(step_s)
        at = time.perf_counter()
epoch()
print("ready", flush=True)
sys.stdin.readline()
waited = rows = 0
began, at = time.process_time(), time.perf_counter()
for _ in range(epochs):
    epoch()
print(json.dumps({"cpu_s": time.process_time() - began, "rows": rows, "s": time.perf_counter() - at,
                  "waited": waited, "hash": loader.order_hash}), flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def plain_workers(
    table: FeatureTable,
    folder: Path,
    host: str = "127.0.0.1",
    *,
    at: Sequence[str] = (),
) -> Any:
    """Two workers with one thread each; yields their processes and the `workers` of a loader. The words `at` go before
    their command."""
    token = folder / "token"
    token.write_text(os.urandom(16).hex())
    words = f"-m sluice worker --table {table.uri} --token-file {token} --threads 1 "
    words += f"--listen {host}:0"
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(2):
            worker = subprocess.Popen(
                [*at, sys.executable, *words.split()],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            stack.enter_context(worker)
            stack.callback(worker.terminate)
            found.append(worker)
        named = ",".join(json.loads(one.stdout.readline())["listening"] for one in found)
        yield found, f"{named}?token={token}"


def run_jobs(
    table: FeatureTable, count: int, workers: list[Any], named: str | None
) -> dict[str, float]:
    """Trains `count` jobs at once for three epochs after a first one. Nanoseconds of processor time a row."""
    given = json.dumps([str(table.uri), named, 3, BATCH, STEP_S])
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", _TRAINER, given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    for job in jobs:
        assert job.stdout.readline() == "ready\n"
    before = sum(process_s(worker.pid) for worker in workers)
    for job in jobs:
        job.stdin.write("go\n")
        job.stdin.flush()
    found = [json.loads(job.stdout.readline()) for job in jobs]
    made_s = sum(process_s(worker.pid) for worker in workers) - before
    for job in jobs:
        job.communicate("end\n")
    assert {one["hash"] for one in found} == {order_hash_of(str(table.uri))}, "another order"
    rows = sum(one["rows"] for one in found)
    trainers_s = sum(one["cpu_s"] for one in found)
    one = {
        "trainers": trainers_s / rows * 1e9,
        "workers": made_s / rows * 1e9,
        "all": (trainers_s + made_s) / rows * 1e9,
        "rows_per_s": min(one["rows"] / one["s"] for one in found),
        "stall_per_mille": max(one["waited"] / one["s"] for one in found) * 1000,
    }
    say(f"{count} jobs, {len(workers)} workers: {one}")
    return one


@cache
def order_hash_of(table: str) -> str | None:
    """The order hash of the last of four epochs, of a loader without workers."""
    opened = FeatureTable.open(table)
    with BatchLoader(opened, batch_size=BATCH, fill=0.0, read_ahead_epochs=4) as loader:
        for _ in range(4):
            for _ in loader:
                pass
        return loader.order_hash


@contextlib.contextmanager
def other_host() -> Any:
    """Yields the words that run a command on another host, 10.9.0.2: a network namespace behind a veth pair. This
    process must be root in a network namespace of its own (`unshare -rn`)."""
    with subprocess.Popen(
        ["unshare", "-n", "sh", "-c", "echo up; exec sleep 3600"], stdout=subprocess.PIPE
    ) as host:
        assert host.stdout is not None
        host.stdout.readline()
        at = ["nsenter", "-t", str(host.pid), "-n"]
        try:
            for words in (
                "ip link add near type veth peer name far",
                f"ip link set far netns {host.pid}",
                "ip addr add 10.9.0.1/24 dev near",
                "ip link set near up",
                "ip link set lo up",
                f"{' '.join(at)} ip addr add 10.9.0.2/24 dev far",
                f"{' '.join(at)} ip link set far up",
            ):
                subprocess.run(words.split(), check=True)
            yield at
            # The kernel removes a network later than its last process.
            subprocess.run(["ip", "link", "del", "near"], check=True)
        finally:
            host.kill()


def hosts(table: FeatureTable, rounds: int) -> dict[str, Any]:
    """One and three jobs of one host, without workers and with two workers on another host."""
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        with (
            tempfile.TemporaryDirectory() as folder,
            other_host() as at,
            plain_workers(table, Path(folder), "10.9.0.2", at=at) as (workers, named),
        ):
            for count in (1, 3):
                one = run_jobs(table, count, workers, named)
                found.setdefault(f"workers on another host, {count} jobs", []).append(one)
        for count in (1, 3):
            one = run_jobs(table, count, [], None)
            found.setdefault(f"no workers, {count} jobs", []).append(one)
    return medians(found)


def calls(table: FeatureTable, rounds: int) -> dict[str, Any]:
    """Nanoseconds of the trainer's host a row, with a function in threads, in a process and on two remote workers."""
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for function in ("nothing", "text_crosses", "number_crosses", "service"):
            for backend in ("thread", "process", "remote"):
                one = run_backend(table, function, backend)
                found.setdefault(f"{function}, {backend}", []).append(one)
    return medians(found)


def run_backend(table: FeatureTable, function: str, backend: str) -> dict[str, float]:
    code = f"{remote_functions.__name__}:{function}"
    with BatchLoader(
        table,
        batch_size=BATCH,
        fill=0.0,
        read_ahead_epochs=100,
        workers="local:2",
        reading=Reading(reader="arrow"),
        transforms=[Transform("mine", code)],
        knobs=Knobs(
            workers={"read": 1, "mine": 4 if function == "service" or backend == "remote" else 1},
            backend={"read": "thread", "mine": backend},
        ),
    ) as loader:
        batches = (batch for _ in range(100) for batch in loader)
        for _ in range(100):
            next(batches)
        began, at, rows = host_s(loader), time.perf_counter(), 0
        while time.perf_counter() < at + 3:
            rows += next(batches).rows
        took = time.perf_counter() - at
        return {"host": (host_s(loader) - began) / rows * 1e9, "rows_per_s": rows / took}


def host_s(loader: BatchLoader) -> float:
    """The processor time of this process and its children, without remote workers."""
    elsewhere = set(loader.remote_pids)
    children = [c for c in psutil.Process().children(recursive=True) if c.pid not in elsewhere]
    return time.process_time() + sum(process_s(child.pid) for child in children)


def medians(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    told = {
        name: {key: round(statistics.median(one[key] for one in each)) for key in each[0]}
        for name, each in found.items()
    }
    for name, values in told.items():
        say(f"| {name} | " + " | ".join(f"{key} {value:,}" for key, value in values.items()) + " |")
    return told


PARTS = {"calls": calls, "hosts": hosts}


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="calls")
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        table = made_table(Path(folder), options.rows)
        return {name: PARTS[name](table, options.rounds) for name in options.only.split(",")}


if __name__ == "__main__":
    program(main)
