"""The job as a person starts it: spark-submit in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from sluice.etl.synth.raw_logs import synthesize
from sluice.etl.synth.small_table import small_table
from sluice.etl.table.table import FeatureTable

pytestmark = [pytest.mark.spark, pytest.mark.slow]
_PATIENCE_S = 150


@contextmanager
def submitted(repo: Path, *arguments: object) -> Iterator[subprocess.Popen]:
    """spark-submit with its whole family in a process group, which is gone afterwards whatever happens."""
    bin_folder = Path(sys.executable).parent
    command = [bin_folder / "spark-submit", "--properties-file", "spark-defaults.conf", "--master", "local[2]",
               "--conf", f"spark.pyspark.python={sys.executable}", "etl/job.py", *arguments]
    process = subprocess.Popen([str(part) for part in command], cwd=repo, text=True, start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env={**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}",
                                    # What is short-lived is compiled quickly rather than well.
                                    "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"})
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(process: subprocess.Popen, text: str) -> None:
    """Reads the job's own lines until one begins so."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith(text):
            return
    pytest.fail(f"no line begins with {text!r} in:\n{''.join(seen)}")


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("logs") / "clicks.tsv"
    synthesize(path, rows=3000, seed=2)
    return path


def test_a_submitted_job_ends_with_its_json_line(repo, raw, tmp_path):
    with submitted(repo, "--spec", "features/criteo.toml", "--input", raw, "--output", tmp_path / "t") as process:
        out, err = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    table = FeatureTable.open(tmp_path / "t")
    assert (result["rows_in"], result["rows_out"], result["rejected"], result["version"]) == (3000, 3000, {}, 0)
    assert (result["files"], result["fingerprint"]["layout"]) == (len(table.files), table.fingerprint.layout)
    assert table.check() == []
    assert not [line for line in err.splitlines() if " INFO " in line], err
    for stage in ("starting Spark", "fitting", "writing 3,000 rows", "checking"):
        assert f"{stage}: done" in err
    summary = {words[0]: words[1] for line in err.splitlines() if len(words := line.split()) == 2}
    assert (summary["read"], summary["rejected"], summary["written"]) == ("3,000", "0", "3,000")
    assert summary["train"] == f"{table.rows_of('train'):,}"


def test_a_job_killed_before_its_commit_leaves_the_old_version(repo, raw, tmp_path):
    old = small_table(tmp_path / "t", rows=300)
    with submitted(repo, "--spec", "features/criteo.toml", "--input", raw, "--output", tmp_path / "t",
                   "--mode", "overwrite") as process:
        wait_for(process, "writing")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(_PATIENCE_S)
    table = FeatureTable.open(tmp_path / "t")
    assert (table.version, table.files) == (0, old.files)
    assert all("orphan" in problem for problem in table.check())


def test_an_interrupted_job_exits_130_and_publishes_nothing(repo, raw, tmp_path):
    with submitted(repo, "--spec", "features/criteo.toml", "--input", raw, "--output", tmp_path / "t") as process:
        wait_for(process, "fitting")
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(_PATIENCE_S) == 130
    assert not (tmp_path / "t" / "_delta_log").exists()


def test_wrong_input_exits_2_with_one_clear_line(repo, tmp_path):
    spec = tmp_path / "bad.toml"
    spec.write_text((repo / "features" / "criteo.toml").read_text().replace("min_count", "min_cuont"))
    with submitted(repo, "--spec", spec, "--input", "nothing", "--output", tmp_path / "t") as process:
        _, err = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 2
    assert "did you mean 'min_count'?" in err
    assert "Traceback" not in err
    assert not (tmp_path / "t").exists()
