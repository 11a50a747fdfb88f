"""Checkpoints: weights, both optimisers' states, and a `Meta` with the loader's position. Saved by all ranks together.

Each lies in a folder of its own, complete once it holds meta.json. torch.distributed.checkpoint cuts the saved tables
anew for another number of ranks or another sharding.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts
from torchrec.optim.keyed import KeyedOptimizerWrapper

from dlrm.meta import Meta
from dlrm.world import World

KEEP = 3


def save(checkpoints: Path, meta: Meta, model: Any, dense: KeyedOptimizerWrapper, world: World) -> Path:
    """Writes a checkpoint and moves LATEST to it; called by every rank. The newest few stay."""
    path = checkpoints / f"step-{meta.step:09d}"
    if world.first:
        shutil.rmtree(path, ignore_errors=True)  # a half-written one of a run that was killed here
    world.barrier()
    save_parts(_state(model, dense), checkpoint_id=path, process_group=world.control)
    if world.first:
        meta.write(path)
        for old in sorted(checkpoints.glob("step-*"))[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)
    world.barrier()
    return path


def load(path: Path, model: Any, dense: KeyedOptimizerWrapper | None, world: World) -> None:
    """Fills the model, and both optimisers if `dense` is given, from a checkpoint; called by every rank."""
    if dense is not None:
        dense.init_state()  # Adam makes its state at the first step only; the values come from the file
        dense.zero_grad()
    state = _state(model, dense)
    load_parts(state, checkpoint_id=path, process_group=world.control)
    model.load_state_dict(state["model"])
    if dense is not None:
        model.fused_optimizer.load_state_dict(state["tables"])
        dense.load_state_dict(state["dense"])


def _state(model: Any, dense: KeyedOptimizerWrapper | None) -> dict[str, Any]:
    state = {"model": model.state_dict()}
    if dense is not None:
        state |= {"tables": model.fused_optimizer.state_dict(), "dense": dense.state_dict()}
    return state
