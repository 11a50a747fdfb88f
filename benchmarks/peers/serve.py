"""What every peer shares: the work to be done, and how it is timed. Each peer runs in an environment of its own, so
this file and the peers import nothing of ours.

A peer is a file with `arms(job)`: for each setting of its own parallelism a function that starts an endless iteration
over batches. The first is what the loader does by default, or the least. A peer is asked on standard input for an arm
and a number of seconds, and answers with what `turn` measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from benchmarks.peers import functions

_PACKAGES = (
    "sluice",
    "tensorflow",
    "torch",
    "spdl",
    "ray",
    "datasets",
    "grain",
    "petastorm",
    "pyarrow",
    "numpy",
)

Batches = Iterator[int]
"""Starts over by itself; each item is the number of rows of a batch whose tensors are ready."""
Arm = Callable[[], AbstractContextManager[Batches] | Any]


@dataclass(frozen=True, slots=True)
class Job:
    """Which columns of which files become batches: floats (the label last) and ids, each as one tensor."""

    files: tuple[str, ...]
    floats: tuple[str, ...]
    ids: tuple[str, ...]
    batch_size: int
    folder: str
    """For what a peer has to prepare."""
    function: str = "log1p"
    """The user's function over a batch (`functions.apply`)."""
    texts: str = ""
    """The column of texts that the function takes."""
    store: str = ""
    """HOST:PORT of an S3 server that has the files; none: they are local."""
    step_passes: int = 0
    """What a trainer computes for each batch (`functions.train`)."""
    change_s: float = 0.0
    """After that time the function costs three times as much. After twice that time half of the cores are gone."""
    convert: bool = True
    """Whether settings that need files of their own, written before the race, take part."""

    @property
    def columns(self) -> list[str]:
        return [*self.floats, *self.ids, *([self.texts] if self.texts else [])]

    @property
    def row_groups(self) -> list[tuple[str, int]]:
        from benchmarks.peers.arrow import opened

        return [
            (path, n) for path in self.files for n in range(opened(self, path)[1].num_row_groups)
        ]


@dataclass(slots=True)
class Prepared:
    """What a peer made before it could read, if anything."""

    bytes: int = 0
    seconds: float = 0.0
    settings: str = ""
    """How the names of the settings begin that need it."""


def size_of(folder: str) -> int:
    return sum(
        os.path.getsize(os.path.join(at, name))
        for at, _, names in os.walk(folder)
        for name in names
    )


@dataclass(frozen=True, slots=True)
class Turn:
    """What one setting did in one turn, from its first batch to its end."""

    rows_per_s: float
    row_ns: float
    """The nanoseconds of processor time that a row took, of all processes."""
    waiting: float
    """The share of the time spent waiting for batches."""


def turn(arm: Arm, seconds: float, job: Job | None = None) -> Turn:
    with closing(arm()) as batches:
        next(batches)
        rows, waited, before = 0, 0.0, processor_s(os.getpid())
        began = now = time.perf_counter()
        due = (
            [(job.change_s, raise_cost), (2 * job.change_s, halve_cores)]
            if job and job.change_s
            else []
        )
        while not rows or now - began < seconds:
            rows += next(batches)
            waited += time.perf_counter() - now
            functions.train(job.step_passes if job else 0)
            now = time.perf_counter()
            while due and now - began >= due[0][0]:
                due.pop(0)[1]()
        spent = now - began
        return Turn(rows / spent, (processor_s(os.getpid()) - before) / rows * 1e9, waited / spent)


def raise_cost() -> None:
    with open(functions.dearer(), "w"):
        pass


def halve_cores() -> None:
    """Takes half of the cores from this process and all that it started."""
    cores = sorted(os.sched_getaffinity(0))
    for process in tree(os.getpid()):
        for thread in os.listdir(f"/proc/{process}/task"):
            with suppress(OSError):  # it has just ended
                os.sched_setaffinity(int(thread), cores[: max(1, len(cores) // 2)])


def processor_s(root: int) -> float:
    """The processor time of a process and of all that it started, those that have ended and were waited for too."""
    return sum(tree(root).values())


def tree(root: int) -> dict[int, float]:
    """A process and all that it started, each with its processor time in seconds."""
    children: dict[int, list[int]] = {}
    spent: dict[int, float] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as text:
                words = text.read().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        children.setdefault(int(words[1]), []).append(int(name))
        spent[int(name)] = sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")
    members, left = {}, [root]
    while left:
        process = left.pop()
        members[process] = spent.get(process, 0.0)
        left += children.get(process, ())
    return members


def versions() -> dict[str, str]:
    """The versions of those packages of a race that this environment has."""
    installed = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def serve(arms: Callable[[Job, Prepared], dict[str, Arm]]) -> None:
    """The life of a peer: a job as one line of JSON, then requests `[arm, seconds]`, each answered with one line."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    job = Job(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in json.loads(sys.stdin.readline()).items()
        }
    )
    os.environ["RACE_FOLDER"] = job.folder
    prepared = Prepared()
    offered = arms(job, prepared)

    def answer(what: Any) -> None:
        print(json.dumps(what), file=out, flush=True)

    answer(
        {
            "arms": list(offered),
            "prepared_bytes": prepared.bytes,
            "prepared_seconds": prepared.seconds,
            "prepared_for": prepared.settings,
            "versions": versions(),
        }
    )
    for line in sys.stdin:
        name, seconds = json.loads(line)
        try:
            answer(asdict(turn(offered[name], seconds, job)))
        except Exception as error:  # whatever a peer raises belongs into its line of the table
            answer({"error": f"{type(error).__name__}: {error}"})
