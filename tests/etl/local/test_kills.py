"""Local jobs in processes of their own: killed or interrupted, nothing of them is published, or all."""

import os
import signal
import subprocess
import sys

import pytest

import tests.etl.test_build as build
from tests.etl.tables import column, write_spec
from tests.run_program import last_json, run_program

pytestmark = pytest.mark.slow

raw = build.raw

# Forks children that run the same small job; each is killed after the next of some delays, then the next begins. The
# last one runs to its end and says how long it took.
_SPEC = write_spec(
    "label:int I1:int C1:text",
    column("I1", "dense", "fill_mean"),
    column("C1", "sparse", "categorify"),
    form="tsv",
    table="row_group_rows = 64\nsplit = {train = 1.0}",
)


def test_an_interrupt_leaves_nothing(raw, tmp_path, repo):
    big = tmp_path / "big.tsv"
    big.write_bytes(raw.read_bytes() * 80)
    (tmp_path / "spec.toml").write_text(build.TEXT)
    process = subprocess.Popen(
        f"{sys.executable} -m sluice etl --spec {tmp_path}/spec.toml --input {big} --output {tmp_path}/t".split(),
        cwd=repo,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("writing"):
            break
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130  # tests/etl/test_program.py tests the moment that it has
    process.stderr.close()
    assert not [
        path for path in (tmp_path / "t").rglob("*") if path.is_file() and "state" not in path.parts
    ]
    assert {path.name for path in tmp_path.iterdir()} - {"t"} == {"big.tsv", "spec.toml"}


def test_it_needs_neither_pyspark_nor_java(tmp_path, repo):
    (tmp_path / "spec.toml").write_text(_SPEC)
    (tmp_path / "rows.tsv").write_text("1\t2\ta\n0\t\tb\n")
    code = (
        "import sys; sys.modules['pyspark'] = None; from sluice.etl.job import program; program()"
    )
    words = f"--spec {tmp_path}/spec.toml --input {tmp_path}/rows.tsv --output {tmp_path}/t".split()
    done = run_program("-c", code, *words, check=True, env={"PYTHONPATH": str(repo)})
    said = last_json(done)
    assert (
        " ".join(said)
        == "rows_in rows_out rejected version fingerprint files splits ways engine inputs late seconds"
    )
    assert (said["rows_out"], said["engine"]) == (2, "local")
    assert done.stderr.startswith("engine: local, ")
