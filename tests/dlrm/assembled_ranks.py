"""What runs on every rank in test_assembled.py: compressed tables, a tower, schedules and LAMB put together, trained
through TorchRec's pipeline, saved, and taken up again.

    python -m tests.dlrm.assembled_ranks FOLDER LAST [FOLDER_OF_ANOTHER_RUN]
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint import load, save
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.streamable import Pipelineable

from dlrm.compress import Combine, Compression, Compressor
from dlrm.config import ModelConfig, Table
from dlrm.lamb import Lamb
from dlrm.machines import Machine
from dlrm.placement import place
from dlrm.quiet import quiet
from dlrm.schedule import Schedule, Scheduled
from dlrm.towers import WIDE, build
from dlrm.world import World, world
from tests.dlrm.rig import DENSE, SIZES, batch

WIDTH, ROWS, HALF = 16, 64, 3
CHOICES = {"big": Compression(kind="product", rows=67), "mid": Compression(kind="quotient", rows=20),
           "small": Compression(kind="hash", rows=5)}


@dataclass
class Examples(Pipelineable):
    """A batch as the pipeline hands it to the model."""

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    label: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Examples:
        return Examples(self.dense.to(device), self.sparse.to(device), self.label.to(device))

    def record_stream(self, stream: torch.Stream) -> None:
        pass


class Whole(nn.Module):
    """Tables, their combination, and a tower."""

    def __init__(self, kind: str, compressor: Compressor) -> None:
        super().__init__()
        tables = [*compressor.tables]
        self.wide = [f"{t.name}@wide" for t in compressor.columns] if kind == "deepfm" else []
        tables += [Table(name=n, rows=t.rows, width=WIDE) for n, t in zip(self.wide, compressor.columns, strict=False)]
        self.tables = EmbeddingBagCollection(device=torch.device("meta"), tables=[
            EmbeddingBagConfig(name=t.name, feature_names=[t.name], num_embeddings=t.rows, embedding_dim=t.width)
            for t in tables])
        self.names = tables
        self.combine = Combine(compressor)
        self.tower = build(ModelConfig(kind=kind, width=WIDTH, dense_layers=(8,), over_layers=(8,)), dense=len(DENSE),
                           columns=len(SIZES))

    def forward(self, examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.tables(examples.sparse)
        more = [torch.stack([pooled[n] for n in self.wide], 1)] if self.wide else []
        logits = self.tower(examples.dense, self.combine(pooled), *more)
        return nn.functional.binary_cross_entropy_with_logits(logits, examples.label), logits


def examples(compressor: Compressor, wide: list[str], step: int, here: World) -> Examples:
    b = batch(step, ROWS, here.rank, here.ranks)
    values, lengths, _ = compressor.expand(b.values, b.lengths)
    keys = [t.name for t in compressor.tables] + wide
    if wide:
        values, lengths = torch.cat([values, b.values]), torch.cat([lengths, b.lengths])
    return Examples(b.dense, KeyedJaggedTensor(keys=keys, values=values, lengths=lengths), b.label)


class Sharder(EmbeddingBagCollectionSharder):
    """Row-wise on a CPU too."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["table_wise", "row_wise", "column_wise"]


def sharded(plain: Whole, here: World) -> DistributedModelParallel:
    """The tables where `place` puts them, told in TorchRec's words."""
    kinds = {"table": lambda ranks: table_wise(rank=ranks[0]), "row": lambda _: row_wise(),
             "column": lambda ranks: column_wise(ranks=list(ranks))}
    places = place(plain.names, Machine(ranks=here.ranks, memory_bytes=10**9)).places
    plan = construct_module_sharding_plan(
        plain.tables, {p.name: kinds[p.kind](p.ranks) for p in places}, sharder=Sharder(), local_size=here.ranks,
        world_size=here.ranks, device_type="cpu")
    return DistributedModelParallel(plain, env=ShardingEnv.from_process_group(here.group), device=here.device,
                                    plan=ShardingPlan(plan={"tables": plan}), sharders=[Sharder()])


def shards(model: nn.Module):
    """Name, whole size, and for each part here its tensor and where it begins."""
    for name, value in model.state_dict().items():
        if hasattr(value, "local_shards"):
            yield name, tuple(value.size()), [(p.tensor, p.metadata.shard_offsets) for p in value.local_shards()]


def first_weights(model: nn.Module, compressor: Compressor) -> None:
    """The same numbers however the tables are cut."""
    for i, (name, size, parts) in enumerate(shards(model)):
        low, high = compressor.starts.get(name.split(".")[-2], (-0.1, 0.1))
        whole = torch.empty(size).uniform_(low, high, generator=torch.Generator().manual_seed(i))
        for tensor, (top, left) in parts:
            tensor.detach().copy_(whole[top:top + tensor.shape[0], left:left + tensor.shape[1]])


def whole_weights(model: nn.Module, here: World) -> dict[str, torch.Tensor]:
    """Every weight in full, tables put together from all ranks."""
    found = {n: v.clone() for n, v in model.state_dict().items() if not hasattr(v, "local_shards")}
    for name, size, parts in shards(model):
        whole = torch.zeros(size)
        for tensor, (top, left) in parts:
            whole[top:top + tensor.shape[0], left:left + tensor.shape[1]] = tensor.detach()
        found[name] = here.sum(whole)
    return found


def state(model: DistributedModelParallel, dense: KeyedOptimizerWrapper) -> dict:
    return {"model": model.state_dict(), "tables": model.fused_optimizer.state_dict(), "dense": dense.state_dict()}


def run(folder: Path, kind: str, here: World, *, last: int, start: Path | None) -> dict:
    """Trains up to step `last`, from the checkpoint after step HALF if there is one, and saves."""
    compressor = Compressor([Table(name=n, rows=r, width=WIDTH) for n, r in SIZES.items()], CHOICES)
    torch.manual_seed(1)
    plain = Whole(kind, compressor)
    apply_optimizer_in_backward(RowWiseAdagrad, plain.tables.parameters(), {"lr": 0.1, "eps": 1e-8})
    model = sharded(plain, here)
    first_weights(model, compressor)
    own = {n: p for n, p in model.named_parameters() if n not in model.fused_optimizer.params}
    dense = KeyedOptimizerWrapper(own, lambda params: Lamb(params, lr=0.02))
    schedule = Schedule(warmup=2, decay_start=2, decay=4)
    rates = [Scheduled(dense, schedule, steps_per_epoch=1),
             Scheduled(model.fused_optimizer, schedule, steps_per_epoch=1, fused=True)]
    steps, kept = range(last), {}
    if start is not None:
        dense.init_state()
        dense.zero_grad()
        kept_state = state(model, dense)
        load(kept_state, checkpoint_id=start)
        model.load_state_dict(kept_state["model"])
        model.fused_optimizer.load_state_dict(kept_state["tables"])
        dense.load_state_dict(kept_state["dense"])
        steps = range(HALF, last)
        kept["loaded"] = whole_weights(model, here)
    pipeline = TrainPipelineSparseDist(model, CombinedOptimizer([dense]), here.device, execute_all_batches=True)
    batches, losses = iter([examples(compressor, plain.wide, s, here) for s in steps]), []
    model.train()
    for step in steps:
        for r in rates:
            r.begin(step)
        logits = pipeline.progress(batches)
        kept[f"after {step + 1}"] = whole_weights(model, here)
        label = batch(step, ROWS, here.rank, here.ranks).label
        losses.append(nn.functional.binary_cross_entropy_with_logits(logits, label).detach())
    save(state(model, dense), checkpoint_id=folder / kind)
    if here.first:
        torch.save(kept, folder / f"{kind}.pt")
    return {"losses": [here.sum(loss).item() / here.ranks for loss in losses], "tables": [t.name for t in plain.names]}


def main(folder: Path, last: int, start: Path | None) -> None:
    quiet()
    with world() as here:
        found = {kind: run(folder, kind, here, last=last, start=start and start / kind)
                 for kind in ("dcn", "deepfm")}
        if here.first:
            print(json.dumps(found), flush=True)
    # A library's thread sometimes ends a rank with SIGABRT while Python shuts down (1 in 20 runs here); all is done.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
