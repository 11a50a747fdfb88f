"""Workers elsewhere, with processes of this host in the place of hosts: how far they scale, what a trainer still waits,
what kills cost, what a row costs the trainer, and what two trainers find.

    python -m benchmarks.service [--only scaling,stall,kills,price,trainers] [--seconds 6] [--kill-s 600]

Transforms wait, as for a service, since cores are few. In each part the order hash must be the local one; a part that
finds another fails. `--kill-s 600` is the long form; the default takes a minute or two.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.loaders import made_table
from benchmarks.lookup import WAIT_S, lookup
from benchmarks.shapes import cpu_s
from benchmarks.small_table import small_table
from sluice.common.errors import UsageError
from sluice.common.program import run as program
from sluice.common.program import say
from sluice.etl.table.table import FeatureTable
from sluice.ingest.knobs import Knobs
from sluice.ingest.loader import BatchLoader
from sluice.ingest.read.sources import Reading
from sluice.ingest.stages.transform import Transform

ROOT = Path(__file__).resolve().parent.parent
BATCH, FLEETS = 1024, (1, 2, 4, 8, 16)


def process_s(pid: int) -> float:
    """The processor time of a process, all of its threads."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def elsewhere(table: FeatureTable, workers: int, read: str = "thread", **how: Any) -> BatchLoader:
    """A loader whose lookups are made by so many workers, two requests for each; without workers here, by a thread."""
    backend = {"read": read, "lookup": "remote"} if workers else {}
    return BatchLoader(
        table,
        batch_size=BATCH,
        fill=0.0,
        read_ahead_epochs=10**6,
        workers=f"local:{workers}" if workers else None,
        reading=Reading(reader="arrow"),
        **{
            "transforms": [Transform("lookup", f"{lookup.__module__}:lookup", pure=True)],
            "knobs": Knobs(workers={"read": 1, "lookup": max(1, 2 * workers)}, backend=backend),
            **how,
        },
    )


class Trainer:
    """Takes batches, each for `step_s`, and adds up what it waited."""

    def __init__(self, loader: BatchLoader, step_s: float = 0.0):
        self.loader, self.step_s, self.hashes = loader, step_s, list[str]()
        self._batches = self._endless()

    def _endless(self) -> Iterator[int]:
        while True:
            for batch in self.loader:
                yield batch.rows
            assert self.loader.order_hash is not None
            self.hashes.append(self.loader.order_hash)

    def run(self, seconds: float) -> tuple[int, float, float]:
        """Rows, seconds and the share of them that it waited."""
        rows, waited, began = 0, 0.0, time.perf_counter()
        while (at := time.perf_counter()) < began + seconds:
            rows += next(self._batches)
            waited += time.perf_counter() - at
            time.sleep(self.step_s)
        took = time.perf_counter() - began
        return rows, took, waited / took

    def warm(self, workers: int) -> None:
        """Until all workers are there, and what was made before is gone."""
        end = time.perf_counter() + 120
        while self.loader.remote.get("workers", 0) < workers and time.perf_counter() < end:
            self.run(0.2)
        self.run(4.0)


def checked(table: FeatureTable, hashes: list[str]) -> int:
    """Compares order hashes with those of a loader without workers; the number of epochs."""
    with BatchLoader(
        table,
        batch_size=BATCH,
        fill=0.0,
        read_ahead_epochs=max(1, len(hashes)),
        reading=Reading(reader="arrow"),
    ) as loader:
        for number, found in enumerate(hashes):
            for _ in loader:
                pass
            if loader.order_hash != found:
                raise UsageError(
                    f"epoch {number}: the order hash is {found}, and without workers {loader.order_hash}"
                )
    return len(hashes)


def scaling(table: FeatureTable, options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for workers in FLEETS:
        with elsewhere(table, workers) as loader:
            trainer = Trainer(loader)
            trainer.warm(workers)
            rows, took, _ = trainer.run(options.seconds)
        found[workers] = rows / took
        say(
            f"| {workers} workers | {rows / took:,.0f} rows/s | {rows / took / workers / found[1]:.3f} of linear, "
            f"{rows / took * WAIT_S / BATCH / workers:.3f} of what waiting allows |"
        )
    return {
        str(n): {"rows_per_s": round(rate), "linear": round(rate / n / found[1], 3)}
        for n, rate in found.items()
    }


def stall(table: FeatureTable, options: argparse.Namespace) -> dict[str, Any]:
    """A trainer that takes a batch in a sixth of the time that one is looked up in."""
    found = {}
    for workers in (0, 8):
        with elsewhere(table, workers) as loader:
            trainer = Trainer(loader, WAIT_S / 6)
            trainer.warm(workers)
            found[str(workers)] = round(trainer.run(options.seconds)[2], 4)
        say(f"| {workers} workers | the trainer waits {found[str(workers)]:.2%} |")
    return found


def kills(table: FeatureTable, options: argparse.Namespace) -> dict[str, Any]:
    """A worker is killed every five seconds, and their number changes as often."""
    over, killed, sizes = threading.Event(), [0], itertools.cycle((12, 4, 16, 8))
    with elsewhere(table, 8, "remote") as loader:
        trainer = Trainer(loader, WAIT_S / 3)
        trainer.warm(3)

        def disturb() -> None:
            while not over.wait(2.5):
                with contextlib.suppress(IndexError, ProcessLookupError):
                    os.kill(loader.remote_pids[0], signal.SIGKILL)
                    killed[0] += 1
                if not over.wait(2.5):
                    loader.apply(Knobs(workers={"lookup": next(sizes)}))

        thread = threading.Thread(target=disturb)
        thread.start()
        rows, took, waited = trainer.run(options.kill_s)
        over.set()
        thread.join()
        remote = loader.remote
    epochs = checked(table, trainer.hashes)
    say(
        f"| {killed[0]} kills in {took:.0f} s, {epochs} epochs with the local order hash | waits {waited:.2%} | "
        f"{remote['retries']} requests made again |"
    )
    return {
        "kills": killed[0],
        "rows": rows,
        "epochs_equal": epochs,
        "stall": round(waited, 4),
        **remote,
    }


def price(table: FeatureTable, options: argparse.Namespace) -> dict[str, Any]:
    """The trainer's processor time a row, whole pipeline, in turns."""
    found: dict[str, list[float]] = {"here": [], "received": []}
    for _ in range(3):
        for name, workers in (("here", 0), ("received", 2)):
            knobs = Knobs(
                workers={"read": max(1, 2 * workers)}, backend={"read": "remote"} if workers else {}
            )
            with elsewhere(table, workers, transforms=(), knobs=knobs) as loader:
                trainer = Trainer(loader)
                trainer.warm(workers)
                began = cpu_s()
                rows, _, _ = trainer.run(options.seconds / 2)
                found[name].append((cpu_s() - began) / rows * 1e9)
    told = {name: round(statistics.median(each)) for name, each in found.items()}
    say(
        f"| processor time of the trainer's process | {told['here']} ns a row read here, {told['received']} received |"
    )
    return told


def trainers(_: FeatureTable, options: argparse.Namespace) -> dict[str, Any]:
    """Two ranks that train for two epochs, without workers, with one and with four for each of them."""
    found: dict[str, tuple[float | None, list[str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        table = small_table(
            Path(folder) / "table", rows=options.rows // 20, values=50
        )  # with rows to test on
        for workers in (0, 1, 4):
            run = Path(folder) / f"run{workers}"
            told = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    "--nproc-per-node=2",
                    "-m",
                    "dlrm.train",
                    "--run-dir",
                    run,
                    "--data",
                    str(table.uri),
                    "--batch-size",
                    str(BATCH),
                    "--epochs",
                    "2",
                    "--width",
                    "8",
                    "--dense-layers",
                    "16",
                    "--over-layers",
                    "16",
                    "--reader",
                    "arrow",
                    *(["--workers", f"local:{workers}"] if workers else []),
                ],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            if told.returncode:
                raise UsageError(told.stderr[-2000:])
            events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
            found[str(workers)] = (
                json.loads(told.stdout.splitlines()[-1])["auc"],
                [event["order_hash"] for event in events if event["kind"] == "epoch"],
            )
            say(
                f"| two ranks, {workers} workers each | AUC {found[str(workers)][0]} | {found[str(workers)][1]} |"
            )
    if found["0"][0] is None or any(one != found["0"] for one in found.values()):
        raise UsageError(f"AUC and order hash differ with workers and without: {found}")
    return {"auc": found["0"][0], "equal": True}


PARTS = {
    "scaling": scaling,
    "stall": stall,
    "kills": kills,
    "price": price,
    "trainers": trainers,
}


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help="some parts (default: %(default)s)")
    parser.add_argument(
        "--rows", type=int, default=400_000, help="of the table (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=6, help="of each measurement (default: %(default)s)"
    )
    parser.add_argument(
        "--kill-s",
        type=float,
        default=20,
        help="how long workers are killed (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        table = made_table(Path(folder), options.rows)
        return {name: PARTS[name](table, options) for name in options.only.split(",")}


if __name__ == "__main__":
    program(main)
