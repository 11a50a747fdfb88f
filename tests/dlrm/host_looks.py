"""Where a training step looks at numbers, so that the host waits for the device: `looks_of`. A device is a mark on
tensors: those that were sent to it, the weights, and all that is computed from them.

    torchrun --nproc-per-node=2 -m tests.dlrm.host_looks FOLDER     prints them as JSON
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sluice.dlrm.ranks import world
from sluice.dlrm.telemetry.silence_warnings import quiet
from sluice.dlrm.training import finite_guard, overlapped_steps, trainer
from tests.dlrm import ranks

PLACES = ("/dlrm/", "/ingest/", "/torchrec/", "/torch/optim/", "/fbgemm_gpu/")
READS = {"_local_scalar_dense": "item", "nonzero": "nonzero"}
METHODS = ("tolist", "numpy", "cpu")


class Looks(TorchDispatchMode):
    """Notes each read of a tensor by the host, and each collective. `steps` has a list for each finished step."""

    def __init__(self) -> None:
        super().__init__()
        self._marked: dict[int, torch.Tensor] = {}
        self._now: list[str] = []
        self.steps: list[list[str]] = []

    def mark(self, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                self._marked[value.untyped_storage()._cdata] = value

    def on_device(self, values: Any) -> bool:
        return any(
            isinstance(one, torch.Tensor) and one.untyped_storage()._cdata in self._marked
            for one in tree_leaves(values)
        )

    def note(self, what: str, values: Any) -> None:
        where = "device" if self.on_device(values) else "host"
        self._now.append(f"{where} {what} in {_place()}")

    def end_step(self) -> None:
        self.steps.append(self._now)
        self._now = []

    def send(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """As the staging of a device."""
        sent = [tensor.clone() for tensor in tensors]
        self.mark(sent)
        return sent

    def fetch(self, numbers: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """As the copy to the host in the background."""
        arrived = numbers.clone()
        del self._marked[arrived.untyped_storage()._cdata]
        return arrived, lambda: True

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d":
            self.note(name.strip("_"), args)
        elif name in READS:
            self.note(READS[name], args)
        found = func(*args, **kwargs or {})
        if self.on_device([args, kwargs]):
            self.mark(found)
        return found


def _place() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/tests/" not in path and any(place in path for place in PLACES):
            return f"{Path(path).stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "tests"


def _methods(looks: Looks) -> Iterator[Any]:
    """Patches the methods that read numbers without an operator."""
    for name in METHODS:
        method = getattr(torch.Tensor, name)

        def noted(self: torch.Tensor, *args: Any, _name: str = name, _method: Any = method) -> Any:
            looks.note(_name, self)
            return _method(self, *args)

        yield patch.object(torch.Tensor, name, noted)


def looks_of(here: Any, folder: Path, *, ahead: bool, **settings: Any) -> dict[str, int]:
    """Returns what happens in each step of a training, once it runs, and how often."""
    looks = Looks()
    made = ranks.build

    def build(*args: Any, **more: Any) -> Any:
        config, parts = made(*args, **more)
        looks.mark([*parts.model.parameters(), *parts.model.buffers()])
        return config, parts

    class Ticking(trainer.Trainer):
        def __post_init__(self) -> None:
            self.tick = looks.end_step
            super().__post_init__()

    with ExitStack() as stack:
        for module in (trainer, overlapped_steps):
            stack.enter_context(patch.object(module, "staging_for", lambda _: looks))
        stack.enter_context(patch.object(finite_guard, "fetch", looks.fetch))
        stack.enter_context(patch.object(ranks, "STEPS", 10))
        stack.enter_context(patch.object(ranks, "build", build))
        stack.enter_context(patch.object(ranks, "Trainer", Ticking))
        for one in _methods(looks):
            stack.enter_context(one)
        with looks:
            ranks.trained(here, "row", folder, ahead=ahead, **{"log_every": 1000, **settings})
    one, other = map(sorted, looks.steps[3:5])
    assert one == other, (one, other)
    return dict(Counter(other))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"optim": ranks.OptimConfig(dense_optimiser="adagrad", dense_lr=0.05, clip=0.1)},
    "skip": {"on_nonfinite": "skip"},
    "report": {"log_every": 1},
}


def all_looks(here: Any, folder: Path) -> dict[str, dict[str, int]]:
    return {
        f"{name}{', ahead' * ahead}": looks_of(here, folder / f"{name}-{ahead}", ahead=ahead, **one)
        for name, one in CASES.items()
        for ahead in (False, True)
    }


if __name__ == "__main__":
    quiet()
    with world() as here:
        found = all_looks(here, Path(sys.argv[1]))
        if here.first:
            print(json.dumps(found), flush=True)
    # After these many trainings in one process, a library's thread aborted one exit of four on a busy machine. This
    # program is about what was counted.
    os._exit(0)
