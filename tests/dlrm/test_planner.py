"""TorchRec's plan as a placement, compared with our own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.dlrm.options import SHARDING_KINDS
from sluice.dlrm.sharding.machine import TrainingMachine
from sluice.dlrm.sharding.placement import TARGET, place
from sluice.dlrm.sharding.shard_sizes import PlacementError, Storage
from sluice.dlrm.sharding.torchrec_planner import propose
from tests.dlrm.test_placement import MLPERF_LOOKUPS, MLPERF_ROWS, made
from tests.raises import raises


@pytest.fixture(autouse=True)
def inductors_folder(monkeypatch, tmp_path):
    """Importing the planner makes torch's compiler choose a folder; it may be this one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


MACHINE = TrainingMachine(ranks=8, memory_bytes=80_000_000_000)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_its_plan_covers_every_cell_and_ours_is_better_balanced(device):
    tables = made(MLPERF_ROWS, MLPERF_LOOKUPS, 128)
    theirs = propose(tables, replace(MACHINE, device=device), batch_size=65_536)
    for p, t in zip(theirs.places, tables, strict=True):
        assert sum(part.rows * part.width for part in p.parts) == t.rows * t.width
        assert p.kind in SHARDING_KINDS
    ours = place(tables, MACHINE)
    assert max(ours.balance) <= TARGET < max(theirs.balance)


def test_tables_that_do_not_fit_are_refused():
    with raises(PlacementError, "no plan"):
        propose(made([10**9]), TrainingMachine(ranks=2, memory_bytes=10**9), batch_size=64)


def test_storage_that_its_arithmetic_does_not_know_is_refused():
    with raises(PlacementError, "fp16", "sgd"):
        propose(made([10]), MACHINE, batch_size=64, storage=Storage(dtype="fp16", optimiser="sgd"))
