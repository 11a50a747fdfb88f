"""The loader alone needs numpy, psutil, pyarrow and torch: nothing else can be imported in these interpreters."""

import subprocess

import numpy as np
import pytest

from tests.etl.tables import write_rows
from tests.raises import assert_names
from tests.run_program import run_program

pytestmark = pytest.mark.slow

PROGRAM = """
import importlib.abc, sys
class Ban(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"petastorm", "deltalake", "pyspark", "torchrec", "fbgemm_gpu", "fsspec",
                                  "pandas", "rich", "scipy", "optuna", "tensorboardX"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Ban())
from sluice.ingest.loader import BatchLoader
from sluice.ingest.read.sources import Reading
with BatchLoader(sys.argv[1], batch_size=512, reading=Reading(reader=sys.argv[2])) as loader:
    print(sum(batch.rows for batch in loader))
"""


@pytest.fixture
def files(tmp_path):
    rows = 2048
    write_rows(
        tmp_path / "part.parquet",
        row_group_size=512,
        label=np.arange(rows, dtype=np.int8) % 2,
        d=np.ones(rows, np.float32),
        c=np.arange(rows, dtype=np.int32),
    )
    return tmp_path


def load(files, reader: str) -> subprocess.CompletedProcess:
    return run_program("-c", PROGRAM, files, reader)


def test_plain_parquet_needs_no_extra(files):
    result = load(files, "arrow")
    assert result.stdout.strip() == "2048", result.stderr


def test_without_petastorm_its_reader_names_the_extra_and_another_reader(files):
    result = load(files, "petastorm")
    assert result.returncode
    assert_names(result.stderr, "sluice-recsys[petastorm]", "reader='arrow'")


FIRST_BATCH = """
import sys
from sluice import Loader
with Loader(sys.argv[1], batch_size=512, tuning="auto", run_dir=sys.argv[2]) as loader:
    next(iter(loader))
    print(*sorted(sys.modules))
"""


def test_a_tuned_first_batch_imports_neither_the_trainer_nor_the_report(files, tmp_path):
    done = run_program("-c", FIRST_BATCH, files, tmp_path / "run", check=True)
    unneeded = "torchrec fbgemm_gpu tensordict torch._dynamo torch._inductor sympy pyspark rich"
    report = "sluice.agent.report.page sluice.agent.report.figures sluice.agent.report.story"
    loaded = set(done.stdout.split())
    assert "sluice.agent.tuning" in loaded
    assert not loaded & {*unneeded.split(), *report.split()}
    assert (tmp_path / "run" / "report.html").exists()
