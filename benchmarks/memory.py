"""Measures whether a loader stays within its memory limit and keeps all rows: `python benchmarks/memory.py`

Each case runs in a process of its own; its result is one line of `--output`, and a case that is there already is not
run again. So a long run can be interrupted and goes on where it was.

  limits      peak of use at limits above the start's: wide rows, lists, lists that a transform makes ten times longer
  switches    random resizes and changes of the back end within an epoch: order, leftovers, the longest pause
  epochs      many epochs: does anything grow?
  processes   a Python and a numpy transform in two processes against one, beside two busy processes against one
  checksums   reading with page checksums verified, against without: the made-up data, or the table of `--table`
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.results import Cases

MIB = 2**20
_START_S = 1.5  # until all workers are at work
WIDE = {"label": "label", "dense": "d*", "sparse": "s*"}
LISTS = {**WIDE, "id_list": "bag*"}


# ---- what the cases run on


def make_data(folder: Path, lists: bool, files: int = 4, rows: int = 131_072) -> None:
    """Wide rows (13 floats, 26 ids), or lists: 4 columns of 0 to 15 ids."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        path = folder / f"part-{number}.parquet"
        if path.exists():
            continue
        chance = np.random.default_rng(number)
        columns: dict[str, Any] = {"label": chance.integers(0, 2, rows, np.int8)}
        columns |= {f"d{n}": chance.random(rows, np.float32) for n in range(4 if lists else 13)}
        columns |= {
            f"s{n}": chance.integers(0, 10**6, rows, np.int32) for n in range(4 if lists else 26)
        }
        for n in range(4 if lists else 0):
            offsets = np.concatenate([[0], np.cumsum(chance.integers(0, 16, rows))]).astype(
                np.int32
            )
            columns[f"bag{n}"] = pa.ListArray.from_arrays(
                offsets, chance.integers(0, 10**6, offsets[-1], np.int32)
            )
        draft = path.with_suffix(".draft")
        pq.write_table(
            pa.table(columns),
            draft,
            row_group_size=32_768,
            compression="lz4",
            use_dictionary=False,
            write_page_checksum=True,
        )
        draft.rename(path)


def ten_times(columns: dict[str, Any]) -> dict[str, Any]:
    """Every third batch's lists become ten times as long."""
    if int(columns["s0"][0]) % 3:
        return {}
    return {"bag0": np.repeat(columns["bag0"], 10), "bag0.lengths": columns["bag0.lengths"] * 10}


def in_numpy(columns: dict[str, Any]) -> None:
    for _ in range(2000):  # so much that its stage is the bottleneck
        columns["d0"][:] = np.log1p(np.abs(columns["d0"]))


def in_python(columns: dict[str, Any]) -> None:
    values = columns["s0"].tolist()
    for _ in range(200):
        values = [value ^ 1 for value in values]
    columns["s0"][:] = values


# ---- cases


def load(data: str, *, limit: int | None, seconds: float, jump: bool = False) -> dict[str, Any]:
    """Loads for a while with knobs that ask for all they can get; looks at the memory a hundred times a second."""
    from sluice.ingest.knobs import Knobs
    from sluice.ingest.loader import BatchLoader
    from sluice.ingest.machine import Machine

    machine, peak, over = Machine(), 0, threading.Event()
    total = None if limit is None else machine.memory_used() + limit

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.01):
            peak = max(peak, machine.memory_used())

    watcher = threading.Thread(target=watch)
    knobs = Knobs(workers={"read": 4, "shuffle": 2}, read_ahead_bytes=2**32, prefetch_bytes=2**32)
    rows, end = 0, float("inf")
    with BatchLoader(
        data,
        batch_size=8192,
        read_ahead_epochs=10**6,
        roles=LISTS if data.endswith("lists") else WIDE,
        knobs=knobs,
        memory_limit=total,
        transforms=[("ten_times", ten_times)] if jump else [],
    ) as loader:
        watcher.start()
        for batch in itertools.chain.from_iterable(iter(loader) for _ in itertools.count()):
            if not rows:
                end = time.monotonic() + seconds
            rows += batch.rows
            time.sleep(0.005)  # a trainer that is slower than the loader: all buffers fill
            if time.monotonic() > end:
                break
        over.set()
        watcher.join()
        memory = loader.memory()
    return {
        "limit": total,
        "peak": peak,
        "rows_per_s": round(rows / seconds),
        "held_back": memory["held_back"],
        "over": None if total is None else round(peak / total - 1, 4),
    }


def switches(data: str, count: int) -> dict[str, Any]:
    from sluice.ingest.knobs import Knobs
    from sluice.ingest.loader import BatchLoader
    from sluice.ingest.row_order import Order
    from sluice.ingest.stages.transform import Transform

    def run(turn: Callable[[Any, int], None]) -> tuple[list[str | None], float, dict[str, int]]:
        hashes, longest = [], 0.0
        with BatchLoader(
            data,
            batch_size=512,
            read_ahead_epochs=4,
            roles=WIDE,
            transforms=[Transform("mine", "benchmarks.memory:in_numpy")],
            knobs=Knobs(read_ahead_bytes=2**22, prefetch_bytes=2**20),
            order=Order(window_rows=2048),
        ) as loader:
            for _ in range(4):
                at = time.monotonic()
                for step, _ in enumerate(loader):
                    longest = max(longest, time.monotonic() - at)
                    turn(loader, step)
                    at = time.monotonic()
                hashes.append(loader.order_hash)
        return hashes, longest, leftovers()

    chance, turned = random.Random(1), 0

    def turn(loader: Any, step: int) -> None:
        nonlocal turned
        if turned < count and step % 5 == 0:
            turned += 1
            workers = {
                stage: chance.randint(low, min(high, 4))
                for stage, (low, high) in loader.limits.workers.items()
            }
            loader.apply(
                Knobs(
                    workers=workers,
                    backend={"mine": chance.choice(["thread", "process"])},
                    read_ahead_bytes=2**22,
                    prefetch_bytes=2**20,
                )
            )

    untouched, pause, _ = run(lambda *_: None)
    before = leftovers()
    hashes, longest, after = run(turn)
    return {
        "turned": turned,
        "same_order": hashes == untouched,
        "longest_pause_s": round(longest, 3),
        "longest_pause_untouched_s": round(pause, 3),
        "before": before,
        "after": after,
    }


def leftovers() -> dict[str, int]:
    from sluice.ingest.machine import Machine

    return {
        "threads": threading.active_count(),
        "processes": len(Machine().tree()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "segments": len(os.listdir("/dev/shm")),
    }


def epochs(data: str, count: int) -> dict[str, Any]:
    from sluice.ingest.loader import BatchLoader
    from sluice.ingest.machine import Machine

    machine, used = Machine(), []
    with BatchLoader(data, batch_size=8192, read_ahead_epochs=count, roles=WIDE) as loader:
        for _ in range(count):
            for _batch in loader:
                pass
            used.append(machine.memory_own())
        counts = leftovers()
    quarter = max(
        1, count // 4
    )  # use swings by tens of MiB from epoch to epoch, so medians are compared
    return {
        "epochs": count,
        "second_quarter": int(np.median(used[quarter : 2 * quarter])),
        "last_quarter": int(np.median(used[-quarter:])),
        "counts": counts,
    }


def processes(data: str, function: str, seconds: float) -> dict[str, Any]:
    """The gain of a second process, as a share of what two busy processes gain over one at the same time: medians of
    three rounds, and where the processor time went."""
    from sluice.ingest.knobs import Knobs
    from sluice.ingest.loader import BatchLoader
    from sluice.ingest.stages.transform import Transform

    def rate(workers: int) -> tuple[float, float]:
        """Rows a second once every worker is there, and microseconds of this process's own a row."""
        rows, cpu, begin = 0, 0.0, 0.0
        with BatchLoader(
            data,
            batch_size=8192,
            read_ahead_epochs=10**6,
            roles=WIDE,
            transforms=[Transform("mine", f"benchmarks.memory:{function}", columns=("d0", "s0"))],
            knobs=Knobs(workers={"mine": workers, "read": 1}, backend={"mine": "process"}),
        ) as loader:
            for batch in itertools.chain.from_iterable(iter(loader) for _ in itertools.count()):
                now = time.monotonic()
                begin = begin or now + _START_S
                if now < begin:
                    rows, cpu = 0, time.process_time()
                    continue
                rows += batch.rows
                if now > begin + seconds:
                    return rows / (now - begin), 1e6 * (time.process_time() - cpu) / rows
        raise AssertionError("a loader without an end ended")

    rounds = [(rate(1), rate(2), busy(1, seconds), busy(2, seconds)) for _ in range(3)]

    def median(of: Callable[..., float]) -> float:
        return round(statistics.median(of(*one) for one in rounds), 3)

    return {
        "rows_per_s": [
            round(median(lambda one, two, *_: one[0])),
            round(median(lambda one, two, *_: two[0])),
        ],
        "own_us_a_row": [median(lambda one, two, *_: one[1]), median(lambda one, two, *_: two[1])],
        "gain": median(lambda one, two, *_: two[0] / one[0]),
        "busy_gain": median(lambda one, two, alone, both: both / alone),
        "share": median(lambda one, two, alone, both: two[0] / one[0] / (both / alone)),
    }


def busy(count: int, seconds: float) -> float:
    """Loops a second of so many processes together."""
    code = (
        f"import time\nend=time.monotonic()+{seconds}\nn=0\n"
        "while time.monotonic()<end:\n for _ in range(10000): n+=1\nprint(n)"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(count)
    ]
    return sum(int(p.communicate()[0]) for p in running) / seconds


def checksums(data: str, repeats: int) -> dict[str, Any]:
    """Best times of bare reads, and the least processor time a row of the whole loader, in turns."""
    from sluice.ingest.loader import BatchLoader
    from sluice.ingest.read import reader

    read, whole = (
        {True: float("inf"), False: float("inf")},
        {True: float("inf"), False: float("inf")},
    )
    plain = reader.pq.ParquetFile
    paths, roles = (
        sorted(Path(data).rglob("*.parquet")),
        None if Path(data, "_sluice").exists() else WIDE,
    )
    for verify in [True, False] * repeats:
        began = time.perf_counter()
        for path in paths:
            with plain(path, page_checksum_verification=verify) as file:
                for group in range(file.num_row_groups):
                    file.read_row_group(group, use_threads=False)
        read[verify] = min(read[verify], time.perf_counter() - began)

        def opened(*where: Any, verify: bool = verify, **how: Any) -> Any:
            return plain(*where, **{**how, "page_checksum_verification": verify})

        with (
            mock.patch.object(reader.pq, "ParquetFile", opened),
            BatchLoader(data, batch_size=8192, read_ahead_epochs=4, roles=roles) as loader,
        ):
            began = time.process_time()
            rows = sum(batch.rows for _ in range(4) for batch in loader)
            whole[verify] = min(whole[verify], (time.process_time() - began) / rows)
    return {
        "read_with_s": round(read[True], 4),
        "read_without_s": round(read[False], 4),
        "cost_of_a_read": round(read[True] / read[False] - 1, 4),
        "loader_ns_a_row": [round(whole[v] * 1e9, 1) for v in (True, False)],
        "cost_of_the_loader": round(whole[True] / whole[False] - 1, 4),
    }


# ---- the programme


def cases(
    options: argparse.Namespace, wide: str, lists: str
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(name, function, arguments)."""
    for extra in (256, 512, 1024):
        for kind, data, jump in (
            ("wide", wide, False),
            ("lists", lists, False),
            ("jump", lists, True),
        ):
            yield (
                f"limits {kind} {extra} MiB",
                "load",
                {"data": data, "limit": extra * MIB, "seconds": options.seconds, "jump": jump},
            )
    yield "switches", "switches", {"data": wide, "count": options.switches}
    yield "epochs", "epochs", {"data": wide, "count": options.epochs}
    for function in ("in_numpy", "in_python"):
        yield (
            f"processes {function}",
            "processes",
            {"data": wide, "function": function, "seconds": options.seconds},
        )
    yield "checksums", "checksums", {"data": wide, "repeats": 5}
    if options.table:
        yield f"checksums {options.table}", "checksums", {"data": options.table, "repeats": 5}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        default=Path("memory.jsonl"),
        help="results, a line each (default %(default)s)",
    )
    add("--data", type=Path, help="where to keep the data (default: a temporary folder)")
    add("--only", default="", help="cases whose name begins so")
    add("--seconds", type=float, default=4.0, help="of each case (default %(default)s)")
    add("--switches", type=int, default=500, help="(default %(default)s)")
    add("--epochs", type=int, default=20, help="(default %(default)s; 200 shows slow growth)")
    add("--table", help="a folder of Parquet files on which checksums are measured as well")
    options = parser.parse_args()
    kept = Cases(options.output)
    with tempfile.TemporaryDirectory() as temporary:
        data = options.data or Path(temporary)
        make_data(data / "wide", lists=False)
        make_data(data / "lists", lists=True)
        for name, function, arguments in cases(options, str(data / "wide"), str(data / "lists")):
            if name.startswith(options.only):
                kept.run(name, "memory", function, arguments)


if __name__ == "__main__":
    main()
