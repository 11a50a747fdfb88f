"""The job on a real standalone cluster: our code travels, workers need little, the table is the same."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.etl.synth.raw_logs import synthesize
from sluice.etl.table.table import FeatureTable
from tests.etl.jobs import rows_of

pytestmark = [pytest.mark.spark, pytest.mark.slow]
_PATIENCE_S = 240
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


class Cluster:
    """A master, and workers of one core each, from the pyspark wheel."""

    def __init__(self, place: Path) -> None:
        import pyspark

        self.place, self.home = place, Path(pyspark.__file__).parent
        self._started: list[subprocess.Popen] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"spark://127.0.0.1:{port}"
        self._start("master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0", until="ALIVE")

    def add_worker(self) -> Path:
        """Returns what it writes down."""
        folder, log = self.place / f"worker-{len(self._started)}", self.place / f"{len(self._started)}.log"
        self._start("worker.Worker", "--host", "127.0.0.1", "--webui-port", "0", "--cores", "1", "--memory", "1g",
                    "--work-dir", str(folder), self.url, until="Successfully registered")
        return log

    def _start(self, name: str, *words: str, until: str) -> None:
        env = {"PATH": os.environ["PATH"], "SPARK_HOME": str(self.home), "SPARK_LOCAL_IP": "127.0.0.1",
               "JAVA_TOOL_OPTIONS": _QUICK, "SPARK_DAEMON_MEMORY": "256m"}
        log = self.place / f"{len(self._started)}.log"
        with open(log, "w") as out:
            process = subprocess.Popen([self.home / "bin/spark-class", f"org.apache.spark.deploy.{name}", *words],
                                       env=env, cwd=self.place, stdout=out, stderr=out, start_new_session=True)
        self._started.append(process)
        with subprocess.Popen(["tail", "-n", "+1", "-F", "--pid", str(process.pid), log], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as lines:
            found = any(until in line for line in lines.stdout)
            lines.kill()
        assert found, f"{name} ended before it said {until!r}"

    def close(self) -> None:
        for process in reversed(self._started):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path)
    yield made
    made.close()


@pytest.mark.timeout(600)
def test_one_worker_and_two_make_the_same_table_from_code_that_travels(repo, cluster, tmp_path):
    subprocess.run(["make", "dist"], cwd=repo, check=True, capture_output=True, timeout=60)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(BARE.format(root=str(repo)))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}/bare:$PYTHONPATH" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    synthesize(tmp_path / "clicks.tsv", rows=2000, seed=2)
    bin_folder = Path(sys.executable).parent

    def submit(output: Path) -> dict:
        command = [bin_folder / "spark-submit", "--properties-file", "spark-defaults.conf", "--master", cluster.url,
                   "--py-files", "build/sluice.zip", "--conf", f"spark.pyspark.driver.python={sys.executable}",
                   "--conf", f"spark.pyspark.python={python}", "--conf", "spark.executor.memory=512m",
                   "etl/job.py", "--spec", "features/criteo.toml", "--input", tmp_path / "clicks.tsv",
                   "--output", output]
        env = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "SPARK_LOCAL_IP": "127.0.0.1",
               "JAVA_TOOL_OPTIONS": _QUICK}
        done = subprocess.run([str(part) for part in command], cwd=repo, text=True, capture_output=True, check=False,
                              timeout=_PATIENCE_S, env=env)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    workers = [cluster.add_worker()]
    one = submit(tmp_path / "one")
    workers.append(cluster.add_worker())
    two = submit(tmp_path / "two")
    assert [log.read_text().count("Asked to launch executor") for log in workers] == [2, 1]
    assert one["fingerprint"] == two["fingerprint"]
    tables = [FeatureTable.open(tmp_path / name) for name in ("one", "two")]
    assert rows_of(tables[0]) == rows_of(tables[1])  # row by row, in order
    assert tables[0].record.state == tables[1].record.state
    assert tables[1].check() == []
