"""Checkpoints: weights, both optimisers' states, and a `Meta` with the loader's position. Saved by all ranks together,
while training goes on.

Each lies in a folder of its own, complete once it holds meta.json. torch.distributed.checkpoint cuts the saved tables
anew for another number of ranks or another sharding.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException  # not an Exception
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts

from dlrm.meta import CheckpointError, Meta, best, damage, refuse
from dlrm.weights import whole_rows
from dlrm.world import World

if TYPE_CHECKING:
    from dlrm.build import Parts


class Checkpoints:
    """A run's, in one folder: the newest `keep` stay, and the best. Every rank has one and calls the same methods."""

    def __init__(self, folder: Path, parts: Parts, world: World, *, keep: int,
                 record: Callable[[dict[str, Any]], None]) -> None:
        self.folder, self._parts, self._world = folder, parts, world
        self._keep, self._record = keep, record
        self._pending: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sluice-checkpoint")
        self._path = folder

    def save(self, meta: Meta) -> None:
        """Copies the state and returns; the copy is written meanwhile. LATEST moves when all ranks have written."""
        self.wait()
        began = time.perf_counter()
        self._path = path = self.folder / f"step-{meta.step:09d}"
        if self._world.first:
            shutil.rmtree(path, ignore_errors=True)  # a half-written one of a run that was killed here
        self._world.barrier()
        state = _copied(_state(self._parts), self._world)
        held = time.perf_counter() - began

        def write() -> None:
            save_parts(state, checkpoint_id=path, process_group=self._world.saving)
            if self._world.first:  # it comes back after all ranks have written
                meta.write(path)
                self._forget()
                self._record({"kind": "checkpoint", "step": meta.step, "path": path.name, "held_s": round(held, 3),
                              "seconds": round(time.perf_counter() - began, 3)})

        self._pending = self._thread.submit(write)

    def wait(self) -> None:
        """Until the last one is complete; CheckpointError if it could not be written. Those before it stay."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except (Exception, CheckpointException) as error:
            if self._world.first:
                shutil.rmtree(self._path, ignore_errors=True)
            raise CheckpointError(f"checkpoint {self._path} could not be written ({_root(error)}); the one before it "
                                  "is whole") from error

    def close(self) -> None:
        """Ends the writing thread, after what it still writes."""
        self._thread.shutdown()

    def _forget(self) -> None:
        good = best(self.folder)
        for old in sorted(self.folder.glob("step-*"))[:-self._keep]:
            if good is None or old.name != good[0].name:
                shutil.rmtree(old, ignore_errors=True)


def load(path: Path, parts: Parts, world: World, *, optimisers: bool = True) -> None:
    """Fills the model, and both optimisers, from a checkpoint; called by every rank."""
    check(path, world)
    if optimisers:
        parts.dense.init_state()  # Adam makes its state at the first step only; the values come from the file
        parts.dense.zero_grad()
    state = _state(parts) if optimisers else {"model": parts.model.state_dict()}
    try:
        recut = _otherwise_cut(path, state) if optimisers else []
        load_parts(state, checkpoint_id=path, process_group=world.control)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"checkpoint {path} cannot be loaded: {_root(error)}") from error
    for one in recut:
        one.fill()
    parts.model.load_state_dict(state["model"])
    if optimisers:
        parts.model.fused_optimizer.load_state_dict(state["tables"])
        parts.dense.load_state_dict(state["dense"])


def check(path: Path, world: World) -> None:
    """CheckpointError on every rank if a file is not as it was written; each reads its part of them."""
    wrong = world.gather_objects(damage(path, rank=world.rank, ranks=world.ranks))
    refuse(path, [text for texts in wrong for text in texts])


@dataclass(frozen=True, slots=True)
class _Recut:
    """A row-wise state of a table that was cut into other runs of columns than now: each run that is cut anew begins
    with the whole row's."""

    values: dict[str, Any]
    """What the optimiser takes: filled under `key`."""
    key: str
    now: ShardedTensor
    saved: torch.Tensor
    """[runs × rows], as in the checkpoint; every rank reads all of it."""
    rows: int

    def fill(self) -> None:
        whole = whole_rows(self.saved, self.rows)
        for part in self.now.local_shards():
            first = part.metadata.shard_offsets[0] % self.rows
            part.tensor.copy_(whole[first:first + len(part.tensor)])
        self.values[self.key] = self.now


def _otherwise_cut(path: Path, state: dict[str, Any]) -> list[_Recut]:
    """Row-wise states whose size differs from the saved: replaced by tensors that the saved fit into."""
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    found = []
    for table, values in state["tables"]["state"].items():
        rows = state["model"][table].size(0)
        for key, now in values.items():
            size = getattr(saved.get(f"tables.state.{table}.{key}"), "size", None)
            if size is not None and now.dim() == len(size) == 1 and tuple(size) != tuple(now.size()) \
                    and not size[0] % rows:
                found.append(_Recut(values, key, now, torch.zeros(size), rows))
                values[key] = found[-1].saved
    return found


def _state(parts: Parts) -> dict[str, Any]:
    return {"model": parts.model.state_dict(), "tables": parts.model.fused_optimizer.state_dict(),
            "dense": parts.dense.state_dict()}


def _copied(value: Any, world: World) -> Any:
    """A state's tensors in memory that training does not touch: on the CPU."""
    if isinstance(value, dict):
        return {key: _copied(inner, world) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(inner, world) for inner in value)
    if world.device.type == "cpu":
        return value.clone() if isinstance(value, (torch.Tensor, ShardedTensor)) else value
    if isinstance(value, ShardedTensor):
        return value.cpu(process_group=world.saving)
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _root(error: BaseException) -> str:
    """The innermost cause's words: the libraries wrap it."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}".splitlines()[0]
