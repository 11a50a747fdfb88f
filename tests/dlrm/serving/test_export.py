"""The dense side as a program of its own: equal to the model at any batch size, and wrong ones found out."""

from __future__ import annotations

import json

import pytest
import torch

from sluice.dlrm.checkpoint.meta import CheckpointMeta
from sluice.dlrm.export import NOT_EXPORTED, main
from sluice.dlrm.model import ranker  # noqa: F401  torch makes a folder of its own: before a test is watched
from sluice.dlrm.options import Config, ModelConfig
from sluice.dlrm.serving import exported as made
from sluice.dlrm.serving.exported import SIZES, Head, NotEqual, difference, example, exported
from tests.dlrm.rig import written
from tests.raises import raises

pytestmark = pytest.mark.slow

DENSE, COLUMNS = 3, 4
KINDS = [
    {},
    {"kind": "dcn"},
    {"kind": "dcn", "cross_rank": 4, "cross_experts": 2},
    {"kind": "wide_deep"},
    *({"kind": kind} for kind in ("deepfm", "xdeepfm", "autoint", "pnn", "dnn")),
    {"kind": "dien", "history": "h", "target": "t"},
    {"precision": "bf16"},
]


def config(**how: object) -> ModelConfig:
    return ModelConfig(width=8, dense_layers=(16,), over_layers=(16,), **how)


def batches(model: ModelConfig) -> list[made.Inputs]:
    return [example(model, dense=DENSE, columns=COLUMNS, longest=5, rows=rows) for rows in SIZES]


@pytest.mark.parametrize("how", KINDS)
def test_every_kind_of_model_is_exported_and_equal(how):
    model = config(**how)
    head = Head(model, DENSE, COLUMNS).eval()
    program = exported(head, batches(model)[-1]).module()
    assert difference(head, program, batches(model)) <= 1e-6
    with raises(NotEqual, "differ"):
        difference(
            Head(model, DENSE, COLUMNS).eval(), program, batches(model)
        )  # a model of other weights


@pytest.fixture
def run(tmp_path):
    """A checkpoint as a trainer leaves it, without its tables."""
    torch.manual_seed(3)
    model = config()
    head = Head(model, DENSE, COLUMNS)
    path = tmp_path / "run" / "checkpoints" / "step-000000007"
    state = {f"tower.{name}": value for name, value in head.tower.state_dict().items()}
    written(
        {f"model.{name}": value for name, value in state.items()},
        path,
        CheckpointMeta(
            config=Config(data="/nowhere", version=0, model=model).to_dict(),
            version=0,
            fingerprint={},
            columns=dict.fromkeys("abcd", 10),
            dense=("x", "y", "z"),
            trained={},
            step=7,
        ),
    )
    return tmp_path / "run", head.eval()


def test_the_command_writes_a_program_that_others_can_load(run, capsys):
    folder, head = run
    found = main([str(folder)])
    program = torch.export.load(folder / "export" / "dense.pt2").module()
    inputs = example(config(), dense=DENSE, columns=COLUMNS, longest=0, rows=33)
    torch.testing.assert_close(program(*inputs), head(*inputs))
    about = json.loads((folder / "export" / "export.json").read_text())
    assert (about["dense"], about["columns"], about["inputs"]) == (
        ["x", "y", "z"],
        list("abcd"),
        ["dense", "pooled"],
    )
    assert found["written"] == [str(folder / "export" / "dense.pt2")]
    told = capsys.readouterr().err
    for what in NOT_EXPORTED:
        assert f"not exported: {what}" in told


def test_a_failed_compilation_is_reported_and_the_rest_stays(run, monkeypatch, capsys):
    def no_compiler(*_: object):
        raise RuntimeError("no C++ compiler\nand a long trace")

    monkeypatch.setattr(made, "compiled", no_compiler)
    found = main([str(run[0]), "--compile"])
    assert found["not_compiled"] == "RuntimeError: no C++ compiler"
    assert len(found["written"]) == 1
    assert "not compiled: RuntimeError" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_is_refused(tmp_path):
    from sluice.dlrm.checkpoint.meta import CheckpointError

    with raises(CheckpointError, "no checkpoint in", tmp_path):
        main([str(tmp_path)])
