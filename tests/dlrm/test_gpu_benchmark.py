"""The parts of benchmarks/gpu.py that need no GPU."""

import json
from unittest.mock import Mock

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_cases import compare
from tests.dlrm.rig import written
from tests.dlrm.test_checkpoint import META
from tests.product import UsageError
from tests.raises import assert_names, raises

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is an NVIDIA GPU")


@no_gpu
def test_without_a_gpu_one_sentence_says_so():
    with raises(UsageError, "sees no NVIDIA GPU", "--device cpu"):
        gpu.parse([])
    assert gpu.parse(["--device", "cpu", "--short"]).ranks == 1


@no_gpu
@pytest.mark.slow
def test_a_dry_run_on_cpus_finds_no_difference_and_has_every_figure(
    tmp_path, monkeypatch, capsys, forks
):
    """It compares CPUs with CPUs, so no weight differs."""

    def launch_forked(ranks, device, words):
        done = forks.run(*words, tmp=tmp_path, ranks=ranks)
        return Mock(returncode=0, communicate=lambda: (done.stdout, done.stderr))

    monkeypatch.setattr(gpu, "launch", launch_forked)
    words = [*["--device", "cpu", "--ranks", "1", "--short", "--only"], "bf16 tables"]
    result = gpu.main(words)
    assert result["equal"] is True
    assert (result["gpus"], result["ranks"]) == ([], 1)
    for case in result["cases"]:
        assert (case["backend"], case["losses"], case["weights"]) == ("gloo", 0.0, 0.0)
    for name in ("before", "after"):
        assert result[name]["samples_per_s"] > 0
        assert 0 <= result[name]["stall_fraction"] < 1
        assert result[name]["gpu_use"] is None
    assert_names(capsys.readouterr().err, "bf16 tables", "stall_fraction")


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
    verdict = compare("fused", *sides, tmp_path)
    assert verdict["equal"] is equal
    assert verdict["weights"] == pytest.approx(weight, abs=1e-6)
    assert verdict["losses"] == pytest.approx(loss)
    assert json.dumps(verdict)
