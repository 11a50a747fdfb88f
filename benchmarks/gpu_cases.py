"""The cases of `benchmarks.gpu`: how one is trained on a rank, and how far two trainings are from each other.

torchrun --nproc-per-node=2 -m benchmarks.gpu_cases "fp16 tables" FOLDER STEPS ROWS      one case, on all ranks
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist

from sluice.common.program import run
from sluice.dlrm.checkpoint.checkpoint import Checkpoint
from sluice.dlrm.checkpoint.meta import CheckpointMeta, latest
from sluice.dlrm.checkpoint.saving import Checkpoints
from sluice.dlrm.model.ranker import TableLayout
from sluice.dlrm.options import Config, ModelConfig, OptimConfig, Table
from sluice.dlrm.ranks import Ranks, machine, world
from sluice.dlrm.session.trainer import Trainer
from sluice.dlrm.sharding.apply import placed
from sluice.dlrm.telemetry.silence_warnings import quiet
from sluice.dlrm.training.assemble import parts_of
from sluice.dlrm.training.input_checks import BatchChecker
from sluice.dlrm.training.step_figures import StepFigures
from sluice.dlrm.training.synced_batches import SyncedBatches
from sluice.ingest.batch import Batch

ROWS = {"large": 200_000, "middle": 20_000, "small": 500, "tiny": 7}
DENSE = ("d0", "d1", "d2", "d3")
WIDTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to train, and how far a device may be from CPUs."""

    kinds: Mapping[str, str] = field(
        default_factory=lambda: {"large": "row", "middle": "table", "tiny": "data"}
    )
    kernel: str = "fused"
    model: Mapping[str, Any] = field(default_factory=dict)
    optim: Mapping[str, Any] = field(default_factory=dict)
    losses: float = 1e-4
    """The largest difference of a step's loss, as a part of the loss."""
    weights: float = 1e-3
    """The largest difference of a weight."""

    def sharding(self, device: str) -> dict[str, str]:
        """Returns the file of `--sharding`. A CPU has one kernel."""
        kernel = "fused" if device == "cpu" else self.kernel
        return {
            name: kind if kind == "data" else f"{kind}:{kernel}"
            for name, kind in self.kinds.items()
        }


_CUT = {"large": "row", "middle": "table"}
"""Tables of 16 bits have no copies."""
CASES = {
    "fused": Case(),
    "uvm": Case(kernel="uvm"),
    "uvm_caching": Case(kernel="uvm_caching"),
    "data-parallel": Case(kinds=dict.fromkeys(ROWS, "data")),
    "clip": Case(optim={"clip": 0.01}),
    "fp16 tables": Case(kinds=_CUT, model={"table_dtype": "fp16"}, losses=1e-2, weights=5e-2),
    "bf16 tables": Case(kinds=_CUT, model={"table_dtype": "bf16"}, losses=1e-2, weights=5e-2),
    "bf16 layers": Case(model={"precision": "bf16"}, losses=1e-2, weights=5e-2),
}


class Batches:
    """One epoch of drawn batches. Any number of ranks shares the same rows."""

    order_hash = ""
    resting = nullcontext

    def __init__(self, steps: int, rows: int, rank: int, ranks: int) -> None:
        self._steps = steps
        self._rows = rows
        self._part = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
        self._next = 0

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Batch]:
        for step in range(self._steps):
            self._next += 1
            yield self._drawn(step)

    def _drawn(self, step: int) -> Batch:
        draw = torch.Generator().manual_seed(step)
        dense = torch.rand(len(DENSE), self._rows, generator=draw)[:, self._part]
        ids = torch.stack(
            [(n * torch.rand(self._rows, generator=draw) ** 3).int() for n in ROWS.values()]
        )[:, self._part]
        label = (torch.rand(self._rows, generator=draw)[self._part] < dense[0]).float()
        return Batch(
            dense=dense.contiguous().T,
            values=ids.flatten(),
            lengths=torch.ones(ids.numel(), dtype=torch.int32),
            label=label,
            weight=torch.ones(len(label)),
            rows=len(label),
            epoch=0,
            step=step,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._next // self._steps, "step": self._next % self._steps}


def train_case(here: Ranks, name: str, folder: Path, *, steps: int, rows: int) -> dict[str, Any]:
    """Trains a case on one rank of several. The last step is saved in `folder`."""
    case = CASES[name]
    sharding = folder / f"sharding-{here.rank}.json"
    sharding.write_text(json.dumps(case.sharding(here.device.type)))
    config = Config(
        data="drawn",
        version=0,
        batch_size=rows,
        ranks=here.ranks,
        log_every=1,
        sharding=str(sharding),
        seed=1,
        model=ModelConfig(width=WIDTH, dense_layers=(32,), over_layers=(32,), **case.model),
        optim=OptimConfig(dense_optimiser="adagrad", dense_lr=0.02, **case.optim),
    )
    layout = TableLayout(
        config.model, [Table(name=n, rows=r, width=WIDTH) for n, r in ROWS.items()]
    )
    placement = placed(config, layout.tables, machine(here.ranks, here.local_ranks))
    parts = parts_of(config, layout, len(DENSE), placement, here)
    checkpoints = Checkpoints(folder, parts, here, keep=1)
    trainer = Trainer(
        config=config,
        meta=CheckpointMeta(
            config={}, version=0, fingerprint={}, columns=ROWS, dense=DENSE, trained={}
        ),
        world=here,
        parts=parts,
        feed=Batches(steps, rows, here.rank, here.ranks),
        checker=BatchChecker(ROWS, DENSE, "drawn batches"),
        checkpoints=checkpoints,
        validator=Mock(),
        journal=Mock(),
        figures=StepFigures(here),
        synced_batches=SyncedBatches(here, lambda: False),
    )
    with closing(checkpoints):
        trainer.train()
        checkpoints.wait()
    return {
        "losses": [call.args[0]["loss"] for call in trainer.journal.metric.call_args_list],
        "samples_per_s": trainer.figures.samples_per_s,
        "backend": dist.get_backend(),
    }


def compare(name: str, device: Mapping[str, Any], cpu: Mapping[str, Any], work: Path) -> dict:
    """Returns how far the device's losses and weights are from the CPUs', and whether that is within the tolerances."""
    case = CASES[name]
    readers = [Checkpoint(latest(work / side)[0]) for side in ("device", "cpu")]
    keys = [key for key in readers[0].sizes if key.startswith("model.")]
    on_device, other = (reader.tensors(keys) for reader in readers)
    losses = max(abs(a / b - 1) for a, b in zip(device["losses"], cpu["losses"], strict=True))
    weights = max((on_device[key].float() - other[key].float()).abs().max().item() for key in keys)
    return {
        "case": name,
        "backend": device["backend"],
        "losses": losses,
        "weights": weights,
        "most": [case.losses, case.weights],
        "equal": losses <= case.losses and weights <= case.weights,
        "samples_per_s": device["samples_per_s"],
    }


def main(argv: list[str]) -> dict[str, Any] | None:
    name, folder, steps, rows = argv
    quiet()
    with world() as here:
        result = train_case(here, name, Path(folder), steps=int(steps), rows=int(rows))
        return result if here.first else None


if __name__ == "__main__":
    run(main, at_once=True)
