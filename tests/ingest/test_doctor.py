"""The doctor: all well on a good table, and each illness found, named and, if a dead run's, cleaned."""

import json
import os
import select
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.ingest.__main__ import main as ingest_main
from sluice.tools import doctor_checks
from sluice.tools.doctor import main
from tests.etl.tables import write_rows
from tests.product import ColumnError, WorkerProcess
from tests.raises import assert_names, raises

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tidy(monkeypatch, tmp_path):
    """A machine on which no other run left a worker, and a cache folder that is the test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor_checks, "_orphans", lambda: iter(()))


def said(capsys, *argv):
    """(exit code, the JSON line's object, what a person reads)."""
    try:
        result, code = main(list(argv)), 0
    except SystemExit as end:
        result, code = None, end.code
    out, text = capsys.readouterr()
    return code, result or json.loads(out.splitlines()[-1]), text


def test_all_well(tidy, table, capsys):
    code, result, text = said(capsys, table.uri)
    assert (code, result["problems"]) == (0, [])
    assert {"machine", "cores", "memory limit"} <= {
        finding["what"] for finding in result["findings"]
    }
    for line in ("✓ python", "✓ numpy", "✓ process workers", "✓ table"):
        assert line in text
    assert "✗" not in text


def test_what_a_loader_takes_of_plain_files_is_named_and_a_label_that_it_cannot_guess_is_no_problem(
    tidy, tmp_path, capsys
):
    write_rows(tmp_path / "a.parquet", label=[0, 1] * 50, x=np.arange(100) / 2)
    assert_names(said(capsys, str(tmp_path))[2], "✓ table", "100 rows", "✓ columns", "1 dense")
    write_rows(tmp_path / "a.parquet", x=np.arange(100) / 2)
    code, result, text = said(capsys, str(tmp_path))
    assert (code, result["problems"]) == (0, [])
    assert_names(text, "– columns", "--label")


def test_a_package_that_is_missing_or_too_old_is_a_problem_if_the_loader_needs_it(monkeypatch):
    known = {"numpy": "1.26.4", "petastorm": "0.12.1", "pyarrow": "20.0.0"}

    def version(name: str) -> str:
        if name in known:
            return known[name]
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", version)
    findings = {finding.what: finding for finding in doctor_checks.check_versions()}
    wells = {"numpy": False, "pyarrow": True, "torch": False, "petastorm": True, "ray": None}
    assert {name: findings[name].well for name in wells} == wells
    assert_names(findings["numpy"].advice, "2 or newer", "pip install -U numpy")
    assert_names(findings["ray"].advice, "[ray]")


def test_a_missing_label_of_plain_files_stops_doctor_and_loader(tidy, tmp_path, capsys):
    label = pa.array([None] * 100 + [1] * 200)
    rows = pa.table({"label": label, "price": np.arange(300) / 2})
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=100)
    code, result, _ = said(capsys, str(tmp_path))
    assert code == 1
    (problem,) = result["problems"]
    assert_names(problem, "row group 0", "'label'", "100 empty")
    with raises(ColumnError, "row group 0", "'label'", "100 empty"):
        ingest_main(f"bench {tmp_path} --batch-size 80 --seconds 0.05".split())


def test_a_missing_table_and_a_broken_file(tidy, tmp_path, capsys):
    code, result, _ = said(capsys, str(tmp_path / "nothing"))
    assert code == 1
    assert "nothing" in result["problems"][0]
    (tmp_path / "a.parquet").write_bytes(b"PAR1" * 100)
    code, result, _ = said(capsys, str(tmp_path))
    assert code == 1
    assert "a.parquet" in result["problems"][0]


def test_a_dead_runs_worker_is_found_and_cleaned_a_live_ones_left(
    capsys, monkeypatch, tmp_path, request
):
    """A worker that outlives its parent, because the user's function made it deaf to the signal that ends it."""
    monkeypatch.setenv("SLUICE_TEST_DIR", str(tmp_path))
    os.mkfifo(tmp_path / "held")
    held = os.open(tmp_path / "held", os.O_RDWR)
    code = """if True:
        import os, numpy
        from sluice.ingest.process.worker import WorkerProcess
        WorkerProcess("tests.ingest.worker_functions:hold_deaf").call(dict(a=numpy.zeros(1)))
    """
    with WorkerProcess("builtins:dict") as alive:
        alive.start()
        parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
        request.addfinalizer(parent.kill)
        orphan = int(os.read(held, 100))
        watched = os.pidfd_open(orphan)
        assert orphan not in doctor_checks._orphans(), "its parent lives"
        parent.kill()
        parent.wait()
        assert orphan in doctor_checks._orphans()
        monkeypatch.setattr(
            doctor_checks,
            "_orphans",
            lambda orphans=doctor_checks._orphans: (p for p in orphans() if p == orphan),
        )
        code, result, _ = said(capsys)
        assert code == 1
        assert str(orphan) in result["problems"][0]
        code, _, text = said(capsys, "--clean")
        assert code == 0
        assert f"1 removed: {orphan}" in text
        gone = select.poll()
        gone.register(watched, select.POLLIN)
        assert gone.poll(30_000)
        assert alive.call({}) == {}
    for descriptor in (held, watched):
        os.close(descriptor)
