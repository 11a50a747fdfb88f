"""What a job would take, told from the same job on the first rows."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from sluice.etl import estimate
from sluice.etl.estimate import Estimate, Took, estimate_job, last_spark_job, lines_of
from sluice.etl.local.sample import cut_sample
from sluice.etl.spec.spec import Spec
from sluice.etl.synth.raw_logs import synthesize
from tests.etl.jobs import job_of
from tests.etl.tables import column, write_rows, write_spec
from tests.raises import assert_names

FEW = Took(rows=100, seconds=3.0, cpu_s=2.0, bytes=5000)
MANY = Took(rows=300, seconds=5.0, cpu_s=3.0, bytes=15_000)


def test_what_a_row_takes_is_told_from_what_a_job_takes():
    """Two seconds a job and 10 ms a row; of the memory 50 bytes a row, of which budgets end at half of the limit."""
    found = Estimate.of(FEW, MANY, share=0.1, base_bytes=1000, limit=10**9)
    assert (found.rows, found.seconds, found.cpu_s) == (
        3000,
        pytest.approx(32.0),
        pytest.approx(16.5),
    )
    assert found.memory == 1000 + 3000 * 50
    assert Estimate.of(FEW, MANY, share=0.1, base_bytes=1000, limit=10_000).memory == 1000 + 5000


def test_from_which_size_on_spark_pays_is_reckoned_from_its_last_job_here():
    found = Estimate.of(FEW, MANY, share=0.1, base_bytes=0, limit=10**9)
    slower = found.pays({"rows": 1000, "seconds": 40.0, "start_s": 10.0})
    assert_names(slower, "no size", "8 machines", "2,000 rows")
    faster = found.pays({"rows": 1000, "seconds": 5.0, "start_s": 10.0})
    assert_names(faster, "2,000 rows")
    assert "machines" not in faster
    assert "not known" in found.pays(None)


SPEC = write_spec(
    "label:int I1..I13:int C1..C26:text",
    column("C*", "sparse", "categorify"),
    form="%s",
    table="",
)


def test_a_sample_is_measured_and_nothing_is_left(tmp_path, monkeypatch):
    synthesize(tmp_path / "log", rows=400, seed=1)
    monkeypatch.setattr(estimate, "ROWS", 80)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    job = job_of(tmp_path / "t", tmp_path / "log", text=SPEC % "tsv")
    before = {path.name for path in tmp_path.iterdir()}
    found = estimate_job(job)
    assert found is not None
    assert found.rows == pytest.approx(400, rel=0.1)
    assert found.seconds > 0
    assert found.cpu_s > 0
    assert {path.name for path in tmp_path.iterdir()} == before
    assert last_spark_job(job) is None
    assert lines_of(found, None)[0].startswith("local: 4")


def test_a_sample_of_parquet_is_rows_of_its_first_file(tmp_path):
    write_rows(tmp_path / "1.parquet", label=list(range(100)))
    write_rows(tmp_path / "2.parquet", label=list(range(100)))
    (tmp_path / "some").mkdir()
    paths = (str(tmp_path / "1.parquet"), str(tmp_path / "2.parquet"))
    found = cut_sample(Spec.parse(SPEC % "parquet").input, paths, tmp_path / "some", 30, 2)
    assert found == (30, pytest.approx(0.15))
    assert pq.read_table(tmp_path / "some")["label"].to_pylist() == list(range(30))
