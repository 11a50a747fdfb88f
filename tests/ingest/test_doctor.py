"""The doctor: all well on a good table, and each illness found, named and, if a dead run's, cleaned."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.ingest.__main__ import main as ingest_main
from sluice.ingest.columns import ColumnError
from sluice.ingest.process.worker import WorkerProcess
from sluice.tools import doctor_checks
from sluice.tools.doctor import main
from sluice.tools.doctor_checks import chunks_with_crc
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


def parquet(path, *, checksums=True, **options):
    pq.write_table(
        pa.table({"a": range(1000), "b": ["x"] * 1000}),
        path,
        write_page_checksum=checksums,
        **options,
    )
    return path


def test_all_well(tidy, table, capsys):
    code, result, text = said(capsys, table.uri)
    assert (code, result["problems"]) == (0, [])
    assert result["machine"]["cores"] > 0
    assert result["limits"]["memory"] > 2**28
    for line in ("✓ python", "✓ process workers", "✓ checksums", "✓ table"):
        assert line in text
    assert "✗" not in text


def test_plain_files_without_checksums_are_named_and_no_problem(tidy, tmp_path, capsys):
    parquet(tmp_path / "good.parquet")
    parquet(tmp_path / "plain.parquet", checksums=False)
    code, result, text = said(capsys, str(tmp_path))
    assert (code, result["problems"]) == (0, [])
    assert_names(text, "– checksums", "2 of 4", "2 files", "plain.parquet", "– columns", "--label")
    assert "✓ checksums" in said(capsys, str(tmp_path / "g*.parquet"))[2]


def test_a_file_of_a_table_without_checksums_is_a_problem(tidy, tmp_path, table, capsys):
    copy = tmp_path / "table"
    shutil.copytree(table.uri, copy)
    victim = sorted(copy.rglob("*.parquet"))[0]
    pq.write_table(pq.ParquetFile(victim).read(), victim)
    code, result, text = said(capsys, str(copy))
    assert code == 1
    assert victim.name in result["problems"][0]
    assert "✗ checksums" in text


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


def test_a_missing_table_and_a_broken_file(tidy, tmp_path, table, capsys):
    code, result, _ = said(capsys, str(tmp_path / "nothing"))
    assert code == 1
    assert "nothing" in result["problems"][0]
    copy = tmp_path / "table"
    shutil.copytree(table.uri, copy)
    victim = next(copy.rglob("*.parquet"))
    victim.write_bytes(victim.read_bytes()[:1000])
    code, result, _ = said(capsys, str(copy))
    assert code == 1
    assert victim.name in result["problems"][0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "zstd"},
        {"use_dictionary": False},
        {"compression": "none"},
        {"data_page_version": "2.0"},
        {"row_group_size": 100},
    ],
)
@pytest.mark.parametrize("checksums", [True, False])
def test_checksums_are_seen_in_every_kind_of_page(tmp_path, options, checksums):
    path = parquet(tmp_path / "x.parquet", checksums=checksums, **options)
    with pa.OSFile(str(path)) as file:
        having, total = chunks_with_crc(file, pq.read_metadata(path))
    assert having == (total if checksums else 0)
    assert total == (4 if "row_group_size" in options else 2)


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
            lambda found=doctor_checks._orphans: (p for p in found() if p == orphan),
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
