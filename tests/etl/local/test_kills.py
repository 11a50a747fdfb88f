"""Local jobs in processes of their own: killed or interrupted, nothing of them is published, or all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

import tests.etl.test_build as build
from benchmarks.small_table import small_table
from sluice.etl.table.table import FeatureTable
from tests.etl.tables import column, write_spec

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
_KILLED = """
import json, os, random, signal, sys, threading, time
from pathlib import Path
from sluice.etl.jobs.job import Job
from sluice.etl.jobs.job_run import run_job
from sluice.etl.jobs.progress import JobProgress
from sluice.etl.local.engine import LocalEngine
from sluice.etl.spec.spec import Spec
from sluice.etl.table.store import TableStore
text, raw, folder, count = Path(sys.argv[1]).read_text(), sys.argv[2], sys.argv[3], int(sys.argv[4])
def job(table):
    made = Job(spec=Spec.parse(text), inputs=(raw,), store=TableStore(table), mode="overwrite")
    run_job(made, LocalEngine(made, JobProgress(open(os.devnull, "w")), threads=2))
def child(table):
    child = os.fork()
    if not child:
        try:
            job(table)
        finally:
            os._exit(0)
    return child
start = time.monotonic()
os.waitpid(child(f"{folder}/whole"), 0)
took, draw, ended = time.monotonic() - start, random.Random(5), []
for number in range(count):
    begun, share = child(f"{folder}/{number}"), 0.8 + 0.4 * draw.random() if number % 2 else draw.random()
    threading.Event().wait(took * share)
    os.kill(begun, signal.SIGKILL)
    ended.append(os.waitstatus_to_exitcode(os.waitpid(begun, 0)[1]))
    if not ended[-1] and share < 1:  # the machine is faster by now
        took *= share
print(json.dumps(ended))
"""


def test_a_job_killed_at_thirty_moments_publishes_nothing_or_all(tmp_path, repo):
    (tmp_path / "spec.toml").write_text(_SPEC)
    raw = tmp_path / "rows.tsv"
    raw.write_text("".join(f"{n % 2}\t{n}\t{n % 17}\n" for n in range(400)))
    small_table(tmp_path / "old", rows=30, files=1, splits={"train": 1.0})
    for name in ("whole", *range(30)):
        shutil.copytree(tmp_path / "old", tmp_path / "tables" / str(name))
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, tmp_path / "spec.toml", raw, tmp_path / "tables", "30"],
        cwd=repo,
        capture_output=True,
        text=True,
        timeout=170,
        check=True,
    )
    codes = json.loads(done.stdout)
    assert codes.count(-signal.SIGKILL) >= 10
    for number in range(30):
        table = FeatureTable.open(tmp_path / "tables" / str(number))
        assert [problem for problem in table.check() if "orphan" not in problem] == []
        assert (table.version, table.rows) in ((0, 30), (1, 400))


def test_an_interrupt_leaves_nothing(raw, tmp_path, repo):
    big = tmp_path / "big.tsv"
    big.write_bytes(raw.read_bytes() * 200)
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
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=repo,
        env={"PYTHONPATH": str(repo)},
        capture_output=True,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout.splitlines()[-1])
    assert (
        " ".join(said)
        == "rows_in rows_out rejected version fingerprint files splits ways engine inputs seconds"
    )
    assert (said["rows_out"], said["engine"]) == (2, "local")
    assert done.stderr.startswith("engine: local, ")
