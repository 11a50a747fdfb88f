"""What every peer shares: the work to be done, and how it is timed. Each peer runs in an environment of its own, so
this file and the peers import nothing of ours.

A peer is a file with `arms(job)`: for each setting of its own parallelism a function that starts an endless iteration
over batches. It is asked on standard input for an arm and a number of seconds, and answers with rows a second and the
processor time of a row.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import Any

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

    @property
    def row_groups(self) -> list[tuple[str, int]]:
        import pyarrow.parquet as pq

        return [
            (path, n) for path in self.files for n in range(pq.read_metadata(path).num_row_groups)
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


def turn(arm: Arm, seconds: float) -> tuple[float, float]:
    """Rows a second from the second batch on, and the nanoseconds of processor time that each took."""
    with closing(arm()) as batches:
        next(batches)
        rows, spent, before = 0, 0.0, processor_s(os.getpid())
        began = time.perf_counter()
        while not rows or spent < seconds:
            rows += next(batches)
            spent = time.perf_counter() - began
        return rows / spent, (processor_s(os.getpid()) - before) / rows * 1e9


def processor_s(root: int) -> float:
    """The processor time of a process and of all that it started, those that have ended and were waited for too."""
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
    total, left = 0.0, [root]
    while left:
        process = left.pop()
        total += spent.get(process, 0.0)
        left += children.get(process, ())
    return total


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
    prepared = Prepared()
    found = arms(job, prepared)

    def answer(what: Any) -> None:
        print(json.dumps(what), file=out, flush=True)

    answer(
        {
            "arms": list(found),
            "prepared_bytes": prepared.bytes,
            "prepared_seconds": prepared.seconds,
            "prepared_for": prepared.settings,
        }
    )
    for line in sys.stdin:
        name, seconds = json.loads(line)
        try:
            rows_per_s, row_ns = turn(found[name], seconds)
            answer({"rows_per_s": rows_per_s, "row_ns": row_ns})
        except Exception as error:  # whatever a peer raises belongs into its line of the table
            answer({"error": f"{type(error).__name__}: {error}"})
