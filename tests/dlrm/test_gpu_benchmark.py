"""The parts of benchmarks/gpu.py that need no GPU."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.gpu import parse
from benchmarks.gpu_cases import compare
from sluice.common.errors import UsageError
from tests.dlrm.rig import environment, last_json, written
from tests.dlrm.test_checkpoint import META
from tests.raises import assert_names, raises
from tests.run_program import run_program

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is an NVIDIA GPU")


@no_gpu
def test_without_a_gpu_one_sentence_says_so():
    with raises(UsageError, "sees no NVIDIA GPU", "--device cpu"):
        parse([])
    assert parse(["--device", "cpu", "--short"]).ranks == 1


@no_gpu
@pytest.mark.slow
def test_a_dry_run_on_cpus_finds_no_difference_and_has_every_figure(tmp_path):
    """It compares CPUs with CPUs, so no weight differs."""
    words = [*["--device", "cpu", "--ranks", "1", "--short", "--only"], "bf16 tables"]
    process = run_program("-m", "benchmarks.gpu", *words, env=environment(tmp_path))
    assert process.returncode == 0, process.stderr[-3000:]
    found = last_json(process)
    assert found["equal"] is True
    assert (found["gpus"], found["ranks"]) == ([], 1)
    for one in found["cases"]:
        assert (one["backend"], one["losses"], one["weights"]) == ("gloo", 0.0, 0.0)
    for name in ("before", "after"):
        assert found[name]["samples_per_s"] > 0
        assert 0 <= found[name]["stall_fraction"] < 1
        assert found[name]["gpu_use"] is None
    assert_names(process.stderr, "bf16 tables", "stall_fraction")


@pytest.mark.parametrize(
    ("weight", "loss", "equal"), [(0.0, 0.0, True), (1e-2, 0, False), (0, 1e-3, False)]
)
def test_a_difference_beyond_a_tolerance_is_none(tmp_path, weight, loss, equal):
    values = torch.ones(4)
    for side, more in (("device", weight), ("cpu", 0.0)):
        folder = tmp_path / side / "step-000000001"
        written({"model.table": values + more}, folder, META)
        (tmp_path / side / "LATEST").write_text("step-000000001\n")
    sides = [
        {"losses": [0.5, 0.5 * (1 + more)], "samples_per_s": 1.0, "backend": name}
        for name, more in (("nccl", loss), ("gloo", 0.0))
    ]
    found = compare("fused", *sides, tmp_path)
    assert found["equal"] is equal
    assert found["weights"] == pytest.approx(weight, abs=1e-6)
    assert found["losses"] == pytest.approx(loss)
    assert json.dumps(found)
