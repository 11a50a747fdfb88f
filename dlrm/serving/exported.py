"""Exports a run's tower as a separate program: `Head`, by torch.export and AOTInductor, and checks the result."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from sluice.dlrm.model.towers import WIDE, build, tower_of
from sluice.dlrm.options import ModelConfig

SIZES = (1, 2, 7, 64, 1000)
"""The batch sizes at which an exported program is compared with the model."""
TOLERANCE = 1e-5

Inputs = tuple[Tensor, ...]


class NotEqual(RuntimeError):
    """An exported program gives other logits than the model."""


class Head(nn.Module):
    """The tower. It takes the inputs that `sluice.dlrm.model.towers` describes, and returns a logit for each row."""

    def __init__(self, config: ModelConfig, dense: int, columns: int) -> None:
        super().__init__()
        self.tower = build(config, dense=dense, columns=columns)
        self._bf16 = config.precision == "bf16"

    def forward(self, *inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._bf16):
            logits: Tensor = self.tower(*inputs)
        return logits.float()


def example(config: ModelConfig, *, dense: int, columns: int, longest: int, rows: int) -> Inputs:
    """Returns example inputs of the right shapes, always the same for the same arguments."""
    generator = torch.Generator().manual_seed(rows)
    shapes = {
        "dense": (rows, dense),
        "pooled": (rows, columns, config.width),
        "wide": (rows, columns, WIDE),
        "history": (rows, longest, config.width),
        "target": (rows, config.width),
    }
    return tuple(
        torch.randint(0, longest + 1, (rows,), generator=generator)
        if name == "lengths"
        else torch.randn(shapes[name], generator=generator)
        for name in tower_of(config.kind).inputs
    )


def exported(head: Head, inputs: Inputs) -> torch.export.ExportedProgram:
    """Exports the tower as a program for any number of rows."""
    rows = torch.export.Dim("rows", min=1)
    with warnings.catch_warnings():
        # torch's GRU stores its weights twice. They are still parameters.
        warnings.filterwarnings("ignore", message="The tensor attributes")
        return torch.export.export(head, inputs, dynamic_shapes=(tuple({0: rows} for _ in inputs),))


def compiled(program: torch.export.ExportedProgram, path: Path) -> Callable[..., Tensor]:
    """Compiles the program to a package that needs no Python. Returns the program as loaded from the package."""
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    with warnings.catch_warnings():
        # torch's own code causes this warning.
        warnings.filterwarnings("ignore", message="`isinstance.treespec, LeafSpec.` is deprecated")
        aoti_compile_and_package(program, package_path=str(path))
    loaded: Callable[..., Tensor] = aoti_load_package(str(path))
    return loaded


@torch.no_grad()
def difference(head: Head, program: Callable[..., Tensor], batches: Sequence[Inputs]) -> float:
    """Returns the largest difference between two logits, relative for logits above 1. Raises NotEqual beyond
    TOLERANCE."""
    largest = 0.0
    for inputs in batches:
        expected, answered = head(*inputs), program(*inputs)
        if answered.shape != expected.shape:
            raise NotEqual(
                f"it gives logits of shape {tuple(answered.shape)}, the model of {tuple(expected.shape)}"
            )
        largest = max(
            largest, float(((answered - expected).abs() / expected.abs().clamp(min=1)).max())
        )
    if not largest <= TOLERANCE:
        raise NotEqual(f"its logits differ by up to {largest:.3g}, more than {TOLERANCE:g}")
    return largest
