"""The job as a person starts it: spark-submit in a process of its own."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from sluice import FeatureTable
from tests.etl.tables import column, write_spec
from tests.raises import assert_names

pytestmark = [pytest.mark.spark, pytest.mark.slow]
_PATIENCE_S = 150


@contextmanager
def submitted(
    repo: Path, *arguments: object, spec: Path, home: str = ""
) -> Iterator[subprocess.Popen]:
    """spark-submit from another folder, with its whole family in a process group, which is gone afterwards whatever
    happens."""
    bin_folder = Path(sys.executable).parent
    command = [
        bin_folder / "spark-submit",
        "--properties-file",
        repo / "spark-defaults.conf",
        "--master",
        "local[2]",
        repo / "etl" / "job.py",
        "--spec",
        spec,
        *arguments,
    ]
    path = [folder for folder in os.environ["PATH"].split(os.pathsep) if Path(folder) != bin_folder]
    own = {"SPARK_HOME": home} if home else {}
    path = path if home else [str(bin_folder), *path]
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd="/",
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={
            **os.environ,
            **own,
            "PATH": os.pathsep.join(path),
        },
    )
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


@pytest.fixture
def spec(tmp_path) -> Path:
    (tmp_path / "spec.toml").write_text(
        write_spec(
            "click:int item:text",
            column("item", "sparse", "categorify, min_count = 2"),
            form="tsv",
            table="split = {train = 0.8, validation = 0.1, test = 0.1}",
        )
    )
    return tmp_path / "spec.toml"


@pytest.fixture
def raw(tmp_path) -> Path:
    (tmp_path / "raw.tsv").write_text("".join(f"{n % 2}\ti{n % 90}\n" for n in range(3000)))
    return tmp_path / "raw.tsv"


def test_a_submitted_job_ends_with_its_json_line(repo, raw, spec, tmp_path):
    with submitted(repo, "--input", raw, "--output", tmp_path / "t", spec=spec) as process:
        out, err = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    table = FeatureTable.open(tmp_path / "t")
    assert (result["rows_in"], result["rows_out"], result["rejected"], result["version"]) == (
        3000,
        3000,
        {},
        0,
    )
    assert (result["files"], result["fingerprint"]["layout"]) == (
        len(table.files),
        table.fingerprint.layout,
    )
    assert table.check() == []
    # Nothing is said but what the job says: no warning of Java's or of Spark's.
    stages = (
        r"(starting Spark|fitting|writing 3,000 rows|checking)"
        r"( …|: done in .* s| (\[.*%.*|…) \d+ s)"
    )
    first, *others = [line for line in err.splitlines() if not re.fullmatch(stages, line)]
    assert re.fullmatch(r"version 0 of \S+/t: 3,000 rows in 3 files, \d+\.\d s", first), err
    assert [line.split()[0] for line in others] == [
        "read",
        "rejected",
        "written",
        "test",
        "train",
        "validation",
    ], err


def test_an_interrupted_job_exits_130_and_publishes_nothing(repo, raw, spec, tmp_path):
    with submitted(repo, "--input", raw, "--output", tmp_path / "t", spec=spec) as process:
        wait_for(process, "fitting")
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(_PATIENCE_S) == 130
    assert not (tmp_path / "t" / "_delta_log").exists()


def test_wrong_input_exits_2_with_one_clear_line(repo, spec, tmp_path):
    """Also with a Spark beside this environment, which takes any Python: the driver goes on in the checkout's own."""
    home = str(Path(find_spec("pyspark").origin).parent)
    spec.write_text(spec.read_text().replace("min_count", "min_cuont"))
    with submitted(
        repo, "--input", "nothing", "--output", tmp_path / "t", spec=spec, home=home
    ) as process:
        _, err = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 2
    assert_names(err, "'min_count'")
    assert "Traceback" not in err
    assert not (tmp_path / "t").exists()
