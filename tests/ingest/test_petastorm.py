"""The stand-in's second mode, for Petastorm's own tests. `make test-petastorm` runs all of them; here, a few."""

from __future__ import annotations

import json
import sys

import pytest

from tests.petastorm_folders import compat
from tests.petastorm_own import Result, Suite
from tests.run_program import run_program

pytestmark = pytest.mark.slow

READ = """
import json, sys
from tests.petastorm_folders import compat
compat(trust=True)
import pyarrow as pa, pyarrow.parquet as pq
from petastorm import make_batch_reader
from petastorm.predicates import in_lambda
folder = sys.argv[1]
for day in (1, 2, 3):
    table = pa.table({"id": list(range(10 * day, 10 * day + 10)), "day": [day] * 10})
    pq.write_to_dataset(table, folder, partition_cols=["day"], row_group_size=4)

def read(source="file://" + folder, **options):
    with make_batch_reader(source, reader_pool_type="dummy", shuffle_row_groups=False, **options) as reader:
        return [(int(i), int(d)) for batch in reader for i, d in zip(batch.id, getattr(batch, "day", batch.id))]

file = pq.ParquetDataset(folder).pieces[1].path
print(json.dumps({"all": read(), "filtered": read(filters=[("day", ">", 2)]), "one": read(["file://" + file]),
                  "chosen": read(predicate=in_lambda(["day"], lambda day: day == 2)),
                  "half": read(cur_shard=0, shard_count=3)}))
"""


def test_compat_refuses_to_unpickle_without_trust():
    before = set(sys.modules)
    with pytest.raises(
        PermissionError,
        match=r"can run any program: compat\(trust=True\) for datasets that you made",
    ):
        compat()
    assert set(sys.modules) == before


def test_petastorms_public_reader_runs_on_this_arrow(tmp_path):
    done = run_program("-W", "ignore", "-c", READ, tmp_path / "data", check=True)
    found = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("{"))
    )  # it says more itself
    every = [[10 * day + n, day] for day in (1, 2, 3) for n in range(10)]
    assert found["all"] == every
    assert found["filtered"] == every[20:]
    assert found["chosen"] == every[10:20]
    assert [i for i, _ in found["one"]] == [i for i, _ in every[10:20]]
    assert 0 < len(found["half"]) < 30


def test_some_of_petastorms_own_tests_pass(tmp_path):
    suite = Suite(tmp_path)
    file = suite.package / "workers_pool" / "tests" / "test_ventilator.py"
    some = [
        f"TestWorkersPool::{name}"
        for name in (
            "test_ventilator_threads",
            "test_empty_ventilation",
            "test_multiple_iterations",
            "test_reset_ventilator",
        )
    ]
    assert suite.run(file, some) == [Result("test_ventilator", name, "passed") for name in some]
    assert {"test_parquet_reader", "test_end_to_end", "test_weighted_sampling_reader"} <= {
        f.stem for f in suite.files
    }
