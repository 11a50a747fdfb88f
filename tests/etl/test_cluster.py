"""The job on a real standalone cluster: our code travels, workers need little, the table is the same, whatever is
killed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.spark_scale import Submitted, kill
from examples.demo.__main__ import spark_cluster
from examples.demo.standalone_cluster import JAVA_OPTIONS
from sluice import FeatureTable
from tests.etl.jobs import rows_of, run
from tests.product import synthesize

pytestmark = [pytest.mark.spark, pytest.mark.slow]

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
def of_demo(tmp_path):
    """The words for spark-submit of a cluster that `make demo-cluster` starts."""
    with spark_cluster(tmp_path) as words:
        yield words


@pytest.mark.timeout(600)
def test_two_workers_that_lose_executors_make_what_one_process_makes_from_code_that_travels(
    repo, of_demo, tmp_path
):
    """By the commands of docs/spark-cluster.md, on the cluster of `make demo-cluster`. What a lost
    executor had parsed and counted is parsed again. (One process: the local engine.)"""
    (page,) = re.findall(
        r"^```sh\n(.*?)^```", (repo / "docs/spark-cluster.md").read_text(), re.M | re.S
    )
    make, submitted = page.replace("\\\n", "").splitlines()
    assert shlex.split(make, comments=True) == ["make", "dist"], "as the demo does"
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(BARE.format(root=str(repo)))
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="{tmp_path}/bare:$PYTHONPATH" exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    synthesize(tmp_path / "clicks.tsv", rows=2000, seed=2)
    bin_folder = Path(sys.executable).parent
    here = {
        "spark://HOST:7077": of_demo[1],
        "spark.pyspark.python=python3": f"spark.pyspark.python={python}",
        "spark.driver.host=DRIVER": "spark.driver.host=127.0.0.1",
        "spark.driver.bindAddress=0.0.0.0": "spark.driver.bindAddress=127.0.0.1",
        "logs/day_*": f"{tmp_path}/clicks.tsv",
        "/shared/table": f"{tmp_path}/two",
    }
    words = shlex.split(submitted)
    assert set(here) <= set(words)
    command = [
        f"{bin_folder}/{words[0]}",
        *of_demo,
        *f"--conf spark.pyspark.driver.python={sys.executable}".split(),
        *(here.get(word, word) for word in words[1:]),
    ]
    env = {
        **os.environ,
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "JAVA_TOOL_OPTIONS": JAVA_OPTIONS,
    }
    came, stages = list[str](), ["writing", "checking"]  # it publishes after the check
    said = Submitted(
        subprocess.Popen(
            command,
            cwd=repo,
            text=True,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    ).followed(
        lambda line: stages and line.startswith(stages[0]) and kill("executor", stages.pop(0), came)
    )
    assert came == ["executor killed while writing", "executor killed while checking"]
    workers = list(tmp_path.glob("cluster/*worker.Worker.log"))
    assert len(workers) == 2
    assert all("Asked to launch executor" in log.read_text() for log in workers)
    alone = run(
        None,
        tmp_path / "one",
        tmp_path / "clicks.tsv",
        text=(repo / "features/criteo.toml").read_text(),
    )
    assert said["fingerprint"] == {
        "layout": alone.fingerprint.layout,
        "vocabulary": alone.fingerprint.vocabulary,
    }
    tables = [FeatureTable.open(tmp_path / name) for name in ("one", "two")]
    assert rows_of(tables[0]) == rows_of(tables[1])  # row by row, in order
    assert tables[0].record.state == tables[1].record.state
    assert tables[1].check() == []
