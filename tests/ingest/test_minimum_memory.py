"""The least memory that a run needs: what it is made of, and that it holds in a real control group."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.ingest import stage_spec
from sluice.ingest.read.decoding import decoding_of
from sluice.ingest.read.parquet_files import table_of
from sluice.ingest.stages.minimum_memory import MinimumMemory, footprint_of
from tests.ingest import twin
from tests.open_loader import open_loader
from tests.product import Columns, Machine, MemoryGroup, RowsPlan, Spec
from tests.raises import assert_names
from tests.run_program import run_program

pytestmark = pytest.mark.slow

MIB = 2**20
COLUMNS = Columns(dense=("d",), sparse=("s",), label="label")


def written(path, rows, group):
    table = group_of(np.random.default_rng(0), rows).drop_columns("part")
    pq.write_table(table, path, row_group_size=group)
    return pq.read_metadata(path)


def footprint(metadata, epochs=2, transforms=(), held=0):
    counts = tuple(metadata.row_group(n).num_rows for n in range(metadata.num_row_groups))
    decoding = decoding_of(metadata, 0, metadata.schema.to_arrow_schema(), {})
    made = RowsPlan(groups=(counts,), batch_size=64, window_rows=512)
    return footprint_of(
        made,
        COLUMNS,
        decoding,
        share=made.share_of(0, 1),
        stages=stage_spec.pipeline(transforms),
        converted=2,
        epochs=epochs,
        held=held,
    )


def test_a_row_group_counts_as_it_is_decoded_and_the_one_before_with_it(tmp_path):
    metadata = written(tmp_path / "one.parquet", 100_000, 100_000)
    decoded = 100_000 * (1 + 8 + 8)
    single, two = footprint(metadata, epochs=1), footprint(metadata, epochs=2)
    assert 2 * decoded < single.row_groups < 2.6 * decoded
    assert two.orders > single.orders, "the next epoch has permutations of its own"
    stored = sum(metadata.row_group(0).column(n).total_compressed_size for n in range(3))
    assert single.decoding > stored
    assert single.orders >= 512 * 8, "the place of each row of a window"
    more = footprint(metadata, transforms=[stage_spec.transform("mine", movable=True)])
    assert more.batches - two.batches >= 3 * 64 * COLUMNS.row_bytes, "a series before and behind it"
    assert footprint(metadata, held=999).row_groups - two.row_groups == 999


@pytest.mark.parametrize("seed", range(4))
def test_a_split_needs_at_most_the_memory_of_all_rows_however_few_it_keeps(tmp_path, seed):
    """Row groups of drawn sizes. The split has drawn shares of their rows: all, some, one or none."""
    chance = np.random.default_rng(seed)
    groups = []
    for rows in chance.integers(1, 20_000, 12).tolist():
        kept = min(rows, int(chance.choice([0, 1, 1, rows // 10, rows])))
        part = chance.permutation(rows) < kept
        groups.append(group_of(chance, rows, part=part))
    groups.append(group_of(chance, 20_000, part=np.arange(20_000) == 0))
    for number, several in enumerate((groups[:5], groups[5:12], groups[12:])):
        with pq.ParquetWriter(tmp_path / f"{number}.parquet", groups[0].schema) as file:
            for group in several:
                file.write_table(group)
    few = minimum_of(tmp_path, "other = 0, few = 1")
    every = minimum_of(tmp_path, "few = 0, other = 2")
    assert few.row_groups <= every.row_groups
    assert few.decoding <= every.decoding
    assert few.total <= every.total
    decoded = 20_000 * (1 + 8 + 8)
    assert few.decoding > decoded, "the largest row group is decoded for one row"


def group_of(chance, rows, part=None):
    return pa.table(
        {
            "label": pa.array(chance.integers(0, 2, rows), pa.int8()),
            "d": chance.random(rows),
            "s": chance.integers(0, 10**6, rows),
            "part": np.zeros(rows, np.int64) if part is None else part.astype(np.int64),
        }
    )


def minimum_of(folder, splits):
    """The minimum memory for loading only the split `few` of `splits`."""
    source = table_of(folder, spec=Spec.own(_SPLIT_SPEC % splits, "mine.toml"))
    with open_loader(source, batch_size=16, split="few", last="pad") as loader:
        parts = loader.memory()["parts"]
    del parts["in_use_at_the_start"]
    return MinimumMemory(**parts)


_SPLIT_SPEC = """
[input]
format = "parquet"
columns = ["label:int", "d:float", "s:int", "part:int"]
[table]
split_time = "part"
split = {%s}
[[column]]
name = "label"
role = "label"
[[column]]
name = "d"
role = "dense"
ops = [{op = "fill"}]
[[column]]
name = "s"
role = "sparse"
ops = [{op = "hash", size = 100}]
"""
_RUN = """
import json, os, re, subprocess, sys, threading
group, data, ballast = sys.argv[1], sys.argv[2], int(sys.argv[3])
knob = next(k for k in ("memory.max", "memory.limit_in_bytes") if os.path.exists(f"{group}/{k}"))

def limit(size):
    with open(f"{group}/{knob}", "w") as file:
        file.write(str(size))

with open(f"{group}/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
other = subprocess.Popen([sys.executable, "-c", f"x = b'x' * {ballast}; print(len(x), flush=True); input()"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
other.stdout.readline()
from sluice.ingest.memory.governor import MemoryLimitError
from sluice.ingest.loader import BatchLoader
from sluice.common.control_groups import MemoryGroup
from sluice.ingest.machine import Machine
from sluice.ingest.read.parquet_files import ParquetFiles

def load():
    return BatchLoader(ParquetFiles.open(data, *json.loads(sys.argv[4])), batch_size=4096, read_ahead_epochs=2)

limit(Machine().memory_used() + ballast + 2**26)
refused = None
try:
    load()
except MemoryLimitError as error:
    refused = str(error)
    limit(int(re.search(r"take at least (\\d+) bytes", refused)[1]))
with load() as loader:
    read = threading.Event()
    for epoch in range(2):
        for step, batch in enumerate(loader):
            while step == 3 and loader.snapshot().stages[0].items < min(2, epoch + 2):
                read.wait(0.01)  # the second epoch's row group lies beside the first one's
    print(json.dumps({"refused": refused, "minimum": loader.pipeline.least_limit, "order": loader.order_hash,
                      "own": Machine().memory_used()}))
other.communicate(b"\\n")
"""


@pytest.fixture
def group():
    """A memory control group of its own, of version 2 or 1."""
    for top in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")):
        made = top / f"sluice-footprint-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        if any((made / knob).exists() for knob in ("memory.max", "memory.limit_in_bytes")):
            yield made
            # A neighbour whose run was killed ends by itself, at the end of its input.
            twin.eventually(lambda made=made: not (made / "cgroup.procs").read_text())
            made.rmdir()
            return
        made.rmdir()
    pytest.skip(
        "no memory control group can be made here: it takes root, and a writable /sys/fs/cgroup"
    )


@pytest.mark.parametrize(
    ("rows", "roles"),
    [
        (1_500_000, [{"label": "label", "dense": "d*", "sparse": "s*"}]),
        (40_000, [{"label": "label", "id_list": "t"}, {"t": 100}]),
    ],
)
def test_the_kernel_kills_no_run_at_the_limit_that_was_asked_for(
    group, repo, tmp_path, rows, roles
):
    """The file has one row group. Another process in the same group holds 64 MiB."""
    chance, ballast = np.random.default_rng(0), 64 * MIB
    if "dense" in roles[0]:
        columns = {f"d{n}": chance.random(rows, np.float32) for n in range(4)}
        columns |= {f"s{n}": chance.integers(0, 10**6, rows) for n in range(4)}
    else:
        columns = {"t": [["x" * 900, "y" * 900]] * rows}
    table = pa.table({"label": chance.integers(0, 2, rows, np.int8), **columns})
    pq.write_table(table, tmp_path / "part-0.parquet", row_group_size=rows)
    done = run_program(
        "-c",
        _RUN,
        group,
        tmp_path,
        ballast,
        json.dumps(roles),
        env=os.environ | {"PYTHONPATH": str(repo)},
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    last = json.loads(done.stdout)
    assert last["refused"] is not None
    assert_names(last["refused"], "row groups", "decoding", "batches", "moving rows")
    assert last["minimum"] > ballast + 2 * table.nbytes, "and two decoded row groups"


@pytest.mark.parametrize("seed", range(4))
def test_files_of_small_row_groups_ask_for_no_more_memory_than_large_ones(tmp_path, seed):
    """Most of such a file is its footer. It stands beside a file of one row group, alone or with one of dense rows."""
    chance = np.random.default_rng(seed)
    (tmp_path / "large").mkdir()
    (tmp_path / "all").mkdir()

    def write(path, rows, group, distinct=50):
        columns = {f"s{n}": chance.integers(0, distinct, rows).astype(np.int32) for n in range(8)}
        table = pa.table({"label": chance.integers(0, 2, rows, np.int8), **columns})
        pq.write_table(table, path, row_group_size=group)

    def asked(folder):
        roles = {"label": "label", "sparse": "s*"}
        with open_loader(folder, roles=roles, batch_size=64) as loader:
            return loader.pipeline.footprint.total, loader._input.groups.decoding

    for folder in ("large", "all"):
        write(tmp_path / folder / "a.parquet", 200_000, 200_000)
    write(tmp_path / "all/b.parquet", 7 * 200, 7)
    if seed % 2:
        write(tmp_path / "all/c.parquet", 50_000, 25_000, 2**31 - 1)
        write(tmp_path / "large/c.parquet", 50_000, 25_000, 2**31 - 1)
    alone, together = asked(tmp_path / "large"), asked(tmp_path / "all")
    assert together[0] < 1.3 * alone[0]
    densest = pq.read_table(tmp_path / f"all/{'c' if seed % 2 else 'a'}.parquet")
    assert together[1].row_bytes >= densest.nbytes / len(densest)


V2 = {
    "proc/7/cgroup": "0::/a/b\n",
    "proc/7/mountinfo": "30 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
}


def memory_group(root: Path, files: dict[str, str]) -> MemoryGroup | None:
    """What a machine with these files says of process 7."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Machine(root, pid=7).memory_group()


def test_the_kernels_charge_is_all_but_clean_page_cache(tmp_path):
    """Files in memory (shmem is part of `file`, not of the lists of files), sockets and page tables stay."""
    told = (
        "anon 300\nfile 500\nshmem 100\ninactive_file 250\nactive_file 150\nfile_dirty 60\n"
        "file_writeback 40\nslab_reclaimable 30\nsock 50\npagetables 20\n"
    )
    files = {"memory.max": "5000\n", "memory.current": "1000\n", "memory.stat": told}
    group = memory_group(
        tmp_path, V2 | {f"sys/fs/cgroup/a/b/{name}": files[name] for name in files}
    )
    assert group is not None
    assert (group.limit, group.charged()) == (5000, 1000 - (250 + 150 + 30 - 60 - 40))


def test_the_group_that_leaves_the_least_counts_not_the_lowest_limit(tmp_path):
    files = dict(V2)
    for folder, limit, current in (("a", 6000, 5500), ("a/b", 5000, 1000)):
        files[f"sys/fs/cgroup/{folder}/memory.max"] = f"{limit}\n"
        files[f"sys/fs/cgroup/{folder}/memory.current"] = f"{current}\n"
        files[f"sys/fs/cgroup/{folder}/memory.stat"] = ""
    group = memory_group(tmp_path, files)
    assert group is not None
    assert (group.limit, group.charged()) == (6000, 5500), "a sibling of b uses it up"
    (tmp_path / "sys/fs/cgroup/a/memory.current").unlink()
    (tmp_path / "sys/fs/cgroup/a/b/memory.current").unlink()
    assert memory_group(tmp_path, {}) is None, "without a charge by the kernel there is no guess"


def test_version_1_is_charged_by_its_hierarchy(tmp_path):
    job = "sys/fs/cgroup/memory/job"
    files = {
        "proc/7/cgroup": "4:memory:/job\n",
        "proc/7/mountinfo": "31 1 0:2 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        f"{job}/memory.limit_in_bytes": "9000\n",
        f"{job}/memory.usage_in_bytes": "2000\n",
        f"{job}/memory.stat": "inactive_file 1\ntotal_inactive_file 500\ntotal_active_file 300\n"
        "total_dirty 100\ntotal_writeback 0\n",
    }
    group = memory_group(tmp_path, files)
    assert group is not None
    assert group.charged() == 2000 - 700
    unlimited = {f"{job}/memory.limit_in_bytes": f"{2**63 - 4096}\n"}
    assert memory_group(tmp_path, unlimited) is None
