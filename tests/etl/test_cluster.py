"""The job on a real standalone cluster: our code travels, workers need little, the table is the same, whatever is
killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.spark_scale import Submitted, kill
from sluice.etl.spark.processes.standalone_cluster import StandaloneCluster
from sluice.etl.synth.raw_logs import synthesize
from sluice.etl.table.table import FeatureTable
from tests.etl.jobs import rows_of

pytestmark = [pytest.mark.spark, pytest.mark.slow]
_QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # what is short-lived is compiled quickly rather than well

# What the workers' Python sees: no checkout of ours, and of the packages only pyarrow and numpy.
BARE = """
import sys
ROOT, BARRED = {root!r}, {{"deltalake", "torch", "petastorm", "torchrec", "pandas", "psutil"}}
sys.path[:] = [p for p in sys.path if p != ROOT]
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in repr(f).lower()]
class Bar:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BARRED:
            raise ModuleNotFoundError(f"No module named {{name!r}} (barred)")
sys.meta_path.insert(0, Bar())
"""


@pytest.fixture
def cluster(tmp_path):
    with StandaloneCluster(tmp_path, _QUICK) as made:
        yield made


@pytest.mark.timeout(600)
def test_one_worker_and_two_make_the_same_table_from_code_that_travels(repo, cluster, tmp_path):
    """And one that loses an executor while it writes: what that had parsed is parsed again."""
    subprocess.run(["make", "dist"], cwd=repo, check=True, capture_output=True, timeout=60)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(BARE.format(root=str(repo)))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}/bare:$PYTHONPATH" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    synthesize(tmp_path / "clicks.tsv", rows=2000, seed=2)
    bin_folder = Path(sys.executable).parent

    def submit(output: Path, meanwhile: Callable[[str], None]) -> dict:
        command = [bin_folder / "spark-submit", "--properties-file", "spark-defaults.conf", "--master", cluster.url,
                   "--py-files", "build/sluice.zip", "--conf", f"spark.pyspark.driver.python={sys.executable}",
                   "--conf", f"spark.pyspark.python={python}", "--conf", "spark.executor.memory=512m",
                   "--conf", f"spark.executor.extraJavaOptions={_QUICK}",
                   "etl/job.py", "--spec", "features/criteo.toml", "--input", tmp_path / "clicks.tsv",
                   "--output", output]
        env = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "SPARK_LOCAL_IP": "127.0.0.1",
               "JAVA_TOOL_OPTIONS": _QUICK}
        return Submitted(subprocess.Popen([str(part) for part in command], cwd=repo, text=True, env=env,
                                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)).followed(meanwhile)

    workers = [cluster.add_worker()]
    came: list[str] = []
    one = submit(tmp_path / "one", lambda _line: None)
    workers.append(cluster.add_worker())
    two = submit(tmp_path / "two", lambda line: line.startswith("writing") and not came and kill(
        "executor", "writing", came))
    assert came == ["executor killed while writing"]
    first, second = (log.read_text().count("Asked to launch executor") for log in workers)
    assert first >= 2
    assert second >= 1
    assert one["fingerprint"] == two["fingerprint"]
    tables = [FeatureTable.open(tmp_path / name) for name in ("one", "two")]
    assert rows_of(tables[0]) == rows_of(tables[1])  # row by row, in order
    assert tables[0].record.state == tables[1].record.state
    assert tables[1].check() == []
