"""Loads each event with its user's last events, by Sluice from a plain table and by hand from mapped arrays.

    python -m benchmarks.sequences --work DIR [--rows 10000000] [--last 100] [--turns 3] [--seconds 5]

The events have the shape of Yambda-5B (arXiv 2505.22238, and the figures of MLPerf Training's recommendation_v4): a
median of 2,695 events a user, 4,763 on average, at most 27,738, of 9.39 M items over 300 days in steps of 5 s. They are
made here. Four ways take turns, each in a process of its own:

- `sluice`: a `Loader` with a `History` on the Parquet files.
- `by_sample`: as MLPerf's reference. Each column is first written to an array that is mapped into memory (`expand`). A
  torch DataLoader with 0 or 2 workers then gathers one sample after another in numpy. It takes events in the stored
  order, as the reference does by default, which is the best order for it.
- `by_batch`: the same, but all samples of a batch are gathered by one index. `shuffled` is this in random order, as
  Sluice mixes rows.

Both give item, share played, length and label of the earlier events, and of the event itself. An event at the same time
is not in a history. Rates are measured for some seconds after the first batch. Memory is the most that the process and
its children had, without mapped files. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.results import Cases
from sluice import History, Loader
from sluice.ingest.machine import Machine

MEDIAN, MEAN, MOST = 2_695, 4_763, 27_738  # events a user
ITEMS, SECONDS, STEP = 9_390_000, 300 * 86_400, 5
LISTENED = 0.613  # the share of events with label 1
FILE_ROWS, GROUP_ROWS, BATCH = 2**19, 2**15, 8_192
COLUMNS = ("item_id", "played_ratio", "track_length", "label")
KEYS = ("uid", "timestamp")
HANDS = [
    ("by_sample", 0),
    ("by_sample", 2),
    ("by_batch", 0),
    ("by_batch", 2),
    ("shuffled", 0),
    ("shuffled", 2),
]


def make_events(folder: Path, rows: int) -> None:
    """Writes events sorted by user and time."""
    random = np.random.default_rng(41)
    spread = np.sqrt(2 * np.log(MEAN / MEDIAN))
    counts = np.minimum(random.lognormal(np.log(MEDIAN), spread, rows // 500), MOST).astype(int) + 1
    counts = counts[: np.searchsorted(np.cumsum(counts), rows) + 1]
    users = np.repeat(np.arange(1, len(counts) + 1, dtype=np.uint32), counts)[:rows]
    times = (random.integers(0, SECONDS // STEP, rows) * STEP).astype(np.uint32)
    times = times[np.lexsort((times, users))]
    folder.mkdir(parents=True)
    for number, start in enumerate(range(0, rows, FILE_ROWS)):
        stop = min(rows, start + FILE_ROWS)
        listened = random.random(stop - start) < LISTENED
        table = pa.table(
            {
                "uid": users[start:stop],
                "timestamp": times[start:stop],
                "item_id": (ITEMS * random.random(stop - start) ** 4).astype(np.uint32),
                "is_organic": random.integers(0, 2, stop - start, np.uint8),
                "played_ratio": np.where(
                    listened, 100, random.integers(0, 50, stop - start)
                ).astype(np.float32),
                "track_length": random.integers(60, 400, stop - start).astype(np.float32),
                "label": listened.astype(np.uint8),
            }
        )
        pq.write_table(table, folder / f"part-{number:03}.parquet", row_group_size=GROUP_ROWS)


def sluice(folder: str, last: int, seconds: float) -> dict[str, Any]:
    began = time.perf_counter()
    history = History(by="uid", time="timestamp", columns=COLUMNS, last=last)
    roles = "label=label;dense=played_ratio,track_length;sparse=item_id,is_organic"
    with Loader(folder, batch_size=BATCH, roles=roles, history=history) as loader:
        figures = consume(((len(b), len(b.values)) for b in epochs(loader)), began, seconds)
        return figures | {"least_limit": loader.memory()["minimum"], "knobs": str(loader.knobs)}


def epochs(loader: Iterable[Any]) -> Iterable[Any]:
    while True:
        yield from loader


def expand(folder: str, into: str) -> dict[str, Any]:
    """Writes each column as an array, and for each event where those of its user, and of its moment, begin."""
    began = time.perf_counter()
    memory = Memory()
    Path(into).mkdir()
    for name in (*KEYS, *COLUMNS, "is_organic"):
        column = pq.read_table(folder, columns=[name]).column(0).to_numpy()
        np.save(f"{into}/{name}.npy", column.astype(np.int64 if column.dtype.kind == "u" else "f4"))
    users, times = (np.load(f"{into}/{name}.npy", mmap_mode="r") for name in KEYS)
    is_new = np.diff(users, prepend=-1) != 0
    for name, begins in (("user", is_new), ("moment", is_new | (np.diff(times, prepend=-1) != 0))):
        at = np.flatnonzero(begins)
        np.save(f"{into}/{name}_start.npy", np.repeat(at, np.diff([*at, len(users)])))
    return {
        "seconds": time.perf_counter() - began,
        "peak_bytes": memory.peak(),
        "mapped_bytes": sum(file.stat().st_size for file in Path(into).iterdir()),
    }


class Samples(Dataset[Any]):
    """Gathers one sample after another from mapped arrays."""

    def __init__(self, folder: str, last: int) -> None:
        def mapped(name: str) -> np.ndarray:
            return np.asarray(np.load(f"{folder}/{name}.npy", mmap_mode="r"))

        self.ends = mapped("moment_start")
        self.starts = np.maximum(mapped("user_start"), self.ends - last)
        self.columns = [mapped(name) for name in COLUMNS]
        self.own = [*self.columns, mapped("is_organic")]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> tuple[Any, ...]:
        start, end = self.starts[row], self.ends[row]
        histories = [column[start:end] for column in self.columns]
        return end - start, histories, [column[row] for column in self.own]

    @staticmethod
    def collate(samples: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        lengths, histories, own = zip(*samples, strict=True)
        values = [torch.from_numpy(np.concatenate(some)) for some in zip(*histories, strict=True)]
        return (
            torch.tensor(lengths),
            values,
            [torch.tensor(np.array(c)) for c in zip(*own, strict=True)],
        )


class Batches(Samples):
    """Gathers the samples of a batch by one index."""

    def __getitems__(self, rows: list[int]) -> tuple[Any, ...]:
        starts, ends = self.starts[rows], self.ends[rows]
        lengths = ends - starts
        at = np.arange(lengths.sum()) + np.repeat(ends - np.cumsum(lengths), lengths)
        values = [torch.from_numpy(column[at]) for column in self.columns]
        return torch.from_numpy(lengths), values, [torch.from_numpy(c[rows]) for c in self.own]

    @staticmethod
    def collate(samples: tuple[Any, ...]) -> tuple[Any, ...]:
        return samples


def by_hand(folder: str, last: int, seconds: float, kind: str, workers: int) -> dict[str, Any]:
    began = time.perf_counter()
    samples = Samples(folder, last) if kind == "by_sample" else Batches(folder, last)
    rows = np.arange(len(samples))
    if kind == "shuffled":
        np.random.default_rng(7).shuffle(rows)
    order = np.array_split(rows, len(rows) // BATCH)
    loader: Iterable[Any] = DataLoader(
        samples, batch_sampler=order, num_workers=workers, collate_fn=samples.collate
    )
    sizes = ((len(lengths), sum(map(len, values))) for lengths, values, _ in epochs(loader))
    return consume(sizes, began, seconds)


class Memory:
    """The most memory that this process and its children have had since."""

    def __init__(self) -> None:
        self._machine, self._over = Machine(), threading.Event()
        self._most = self._machine.memory_used()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            self._most = max(self._most, self._machine.memory_used())

    def peak(self) -> int:
        self._over.set()
        self._thread.join()
        return self._most


def consume(sizes: Iterable[tuple[int, int]], began: float, seconds: float) -> dict[str, Any]:
    """Takes batches for some seconds after the first."""
    memory, machine = Memory(), Machine()
    steps = iter(sizes)
    next(steps)
    start, used_s = time.perf_counter(), machine.cpu_used_s()
    rows = events = 0
    for count, values in steps:
        rows += count
        events += values
        if (taken := time.perf_counter() - start) > seconds:
            break
    return {
        "first_batch_s": start - began,
        "rows_per_s": rows / taken,
        "rows_per_core_s": rows / (machine.cpu_used_s() - used_s),
        "values_a_row": events / rows,
        "peak_bytes": memory.peak(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--last", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5)
    given = parser.parse_args()
    events, arrays = given.work / f"events-{given.rows}", given.work / "arrays"
    if not events.exists():
        make_events(events, given.rows)
    path = given.work / f"sequences-{given.last}.jsonl"
    cases = Cases(path)
    shared = {"last": given.last, "seconds": given.seconds}
    for turn in range(given.turns):
        cases.run(f"sluice {turn}", "sequences", "sluice", {"folder": str(events), **shared})
        shutil.rmtree(arrays, ignore_errors=True)
        cases.run(
            f"expand {turn}", "sequences", "expand", {"folder": str(events), "into": str(arrays)}
        )
        for kind, workers in HANDS:
            options = {"folder": str(arrays), "kind": kind, "workers": workers, **shared}
            cases.run(f"{kind}_{workers} {turn}", "sequences", "by_hand", options)
    results = [json.loads(line) for line in path.read_text().splitlines()]
    names = dict.fromkeys(result["case"].split()[0] for result in results)
    medians = {
        name: medians_of([o for o in results if o["case"].startswith(f"{name} ")]) for name in names
    }
    ratios = {
        f"sluice_over_{kind}": medians["sluice"]["rows_per_s"]
        / max(figures["rows_per_s"] for name, figures in medians.items() if name.startswith(kind))
        for kind in ("by_sample", "by_batch", "shuffled")
    }
    print(json.dumps({"last": given.last, **ratios, **medians}))


def medians_of(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    numbers = [name for name, value in results[0].items() if isinstance(value, (int, float))]
    return {name: statistics.median(result[name] for result in results) for name in numbers}


if __name__ == "__main__":
    main()
