"""Counts the kills of short runs inside a real memory cgroup at 1.3 times the limit.

    python benchmarks/kills.py --runs 200                                    ours, with the governor and without
    python benchmarks/kills.py --runs 200 --tensorflow ENV/bin/python        beside tf.data's AUTOTUNE

Every contender does the same: decode row groups, shuffle, log1p, batches of 2,048, for a trainer that takes 20 ms each,
with buffers as large as they may become. A run is forked from a process that has imported all it needs, so that it
takes little longer than its loading; it makes what it inherits its own before, so that the kernel charges it with all
it uses. Each line of `--output` is one piece of `--piece` runs; pieces that are there are not run again. It takes root,
and a writable /sys/fs/cgroup (version 1 or 2).
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.memory import control_group
from benchmarks.results import ROOT, Cases

MIB = 2**20
EXTRA, ROOM = 192 * MIB, 1.3
BATCH, STEP_S = 2048, 0.02


def make_data(folder: str, rows: int = 131_072, group_rows: int = 32_768) -> None:
    """Writes four files of wide rows: a label, 13 floats, 26 ids, and a text of 20 words."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    Path(folder).mkdir(parents=True, exist_ok=True)
    for number in range(4):
        path = Path(folder) / f"part-{number}.parquet"
        if path.exists():
            continue
        draw = np.random.default_rng(number)
        columns = {"label": draw.integers(0, 2, rows, np.int8)}
        columns |= {f"d{n}": draw.random(rows, np.float32) for n in range(13)}
        columns |= {f"s{n}": draw.integers(0, 10**6, rows, np.int32) for n in range(26)}
        columns["query"] = [f"{' '.join(['running shoes'] * 10)} {n}" for n in range(rows)]
        pq.write_table(
            pa.table(columns),
            path.with_suffix(".draft"),
            row_group_size=group_rows,
            compression="lz4",
            use_dictionary=False,
            write_page_checksum=True,
        )
        path.with_suffix(".draft").rename(path)


def runs(load: Callable[[int], None], count: int, base: int) -> dict[str, Any]:
    """So many runs of `load(limit)`, each in a process of its own."""
    limit = base + EXTRA
    made = control_group(int(ROOM * limit))
    if made is None:
        return {
            "skipped": "no memory cgroup can be made here: it takes root, and a writable /sys/fs/cgroup"
        }
    group = made.folder
    ended = dict.fromkeys(("well", "killed", "failed"), 0)
    began = time.monotonic()
    for _ in range(count):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                (group / "cgroup.procs").write_text(str(os.getpid()))
                own_pages()
                load(limit)
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        status = os.waitpid(pid, 0)[1]
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == 9
        ended["killed" if killed else "failed" if status else "well"] += 1
    group.rmdir()
    return {
        "runs": count,
        **ended,
        "limit": limit,
        "cgroup": int(ROOM * limit),
        "seconds": round(time.monotonic() - began, 1),
    }


def own_pages() -> None:
    """Writes to every page that was inherited, what is there already: the copies are charged to this process."""
    page = os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/maps") as maps, open("/proc/self/pagemap", "rb") as pages:
        for line in list(maps):
            span, rights, *_ = line.split()
            low, high = (int(x, 16) for x in span.split("-"))
            if not rights.startswith("rw") or not rights.endswith("p"):
                continue
            pages.seek(low // page * 8)
            there = pages.read((high - low) // page * 8)[7::8]
            for number, flags in enumerate(there):
                if flags & 0x80:
                    ctypes.memmove(low + number * page, low + number * page, 1)


def ours(data: str, governed: bool, seconds: float) -> tuple[Callable[[int], None], int]:
    from sluice.ingest.knobs import Knobs
    from sluice.ingest.loader import BatchLoader
    from sluice.ingest.machine import Machine
    from sluice.ingest.read.petastorm import compat
    from sluice.ingest.row_order import Order

    class Host(Machine):
        """The cgroup's limit is not looked at: the governor has the user's, or none at all."""

        def memory_limit(self, user: int | None = None) -> int:
            return user or 2**50

        def memory_group(self) -> None:
            """Nor what the kernel charges to it."""

    knobs = Knobs(workers={"decode": 4}, read_ahead_bytes=2**32, prefetch_bytes=2**32)

    def load(limit: int) -> None:
        end = float("inf")
        with BatchLoader(
            data,
            batch_size=BATCH,
            read_ahead_epochs=10**6,
            roles={"label": "label", "dense": "d*", "sparse": "s*"},
            knobs=knobs,
            memory_limit=limit if governed else None,
            machine=Host(),
            transforms=[("log1p", log1p)],
            order=Order(window_rows=4096),
        ) as loader:
            for _ in itertools.chain.from_iterable(iter(loader) for _ in itertools.count()):
                end = min(end, time.monotonic() + seconds)
                time.sleep(STEP_S)
                if time.monotonic() > end:
                    return

    compat.install()
    return load, Machine().memory_used()


def log1p(columns: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    return {name: np.log1p(array) for name, array in columns.items() if name.startswith("d")}


def tensorflow(data: str, seconds: float) -> tuple[Callable[[int], None], int]:
    """tf.data with AUTOTUNE wherever it can be said, batches before maps; pyarrow decodes, as it does for us."""
    import numpy as np
    import pyarrow.parquet as pq
    import tensorflow as tf

    files = sorted(map(str, Path(data).glob("*.parquet")))
    columns = [f"d{n}" for n in range(13)], [f"s{n}" for n in range(26)]

    def group(path: bytes, number: int) -> tuple[Any, ...]:
        with pq.ParquetFile(path.decode(), page_checksum_verification=True) as file:
            table = file.read_row_group(int(number), use_threads=False)
        return tuple(np.stack([table.column(c).to_numpy() for c in some], 1) for some in columns)

    def read(path: Any, number: Any) -> Any:
        dense, sparse = tf.numpy_function(group, [path, number], [tf.float32, tf.int32])
        return tf.ensure_shape(dense, [None, 13]), tf.ensure_shape(sparse, [None, 26])

    def load(_limit: int) -> None:
        auto = tf.data.AUTOTUNE
        groups = [(f, n) for f in files for n in range(4)]
        chosen = tf.data.Dataset.from_tensor_slices(
            ([f for f, _ in groups], [n for _, n in groups])
        )
        batches = (
            chosen.repeat()
            .shuffle(len(groups))
            .map(read, num_parallel_calls=auto)
            .unbatch()
            .shuffle(65536)
            .batch(BATCH)
            .map(lambda d, s: (tf.math.log1p(d), s), num_parallel_calls=auto)
            .prefetch(auto)
        )
        end = float("inf")
        for _ in batches:
            end = min(end, time.monotonic() + seconds)
            time.sleep(STEP_S)
            if time.monotonic() > end:
                return

    with open("/proc/self/status") as status:
        base = next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))
    return load, base


def piece(contender: str, data: str, count: int, seconds: float) -> dict[str, Any]:
    made = (
        tensorflow(data, seconds)
        if contender == "tensorflow"
        else ours(data, contender == "governed", seconds)
    )
    return runs(made[0], count, made[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        default=Path("kills.jsonl"),
        help="results, a line a piece (default %(default)s)",
    )
    add("--data", type=Path, help="where to keep the data (default: a temporary folder)")
    add("--runs", type=int, default=1000, help="of each contender (default %(default)s)")
    add("--piece", type=int, default=25, help="runs from one process (default %(default)s)")
    add("--seconds", type=float, default=1.0, help="of loading in each run (default %(default)s)")
    add("--contenders", default="governed,free", help="(default %(default)s)")
    add(
        "--tensorflow",
        metavar="PYTHON",
        help="an interpreter with tensorflow and pyarrow: tf.data's AUTOTUNE as well",
    )
    options = parser.parse_args()
    cases = Cases(options.output)
    contenders = {name: sys.executable for name in options.contenders.split(",") if name}
    if options.tensorflow:
        contenders["tensorflow"] = options.tensorflow
    with tempfile.TemporaryDirectory() as temporary:
        data = (options.data or Path(temporary)) / "wide"
        make = "import sys; from benchmarks import kills; kills.make_data(sys.argv[1])"
        subprocess.run([sys.executable, "-c", make, str(data)], cwd=ROOT, check=True)
        for number, (contender, python) in itertools.product(
            range(-(-options.runs // options.piece)), contenders.items()
        ):
            count = min(options.piece, options.runs - number * options.piece)
            cases.run(
                f"{contender} {number}",
                "kills",
                "piece",
                {
                    "contender": contender,
                    "data": str(data),
                    "count": count,
                    "seconds": options.seconds,
                },
                python=python,
            )


if __name__ == "__main__":
    main()
