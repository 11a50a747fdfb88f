"""Overlaps training steps: `OverlappedSteps`, on TorchRec's `TrainPipelineSparseDist`.

While a batch is computed, the ids of the next batch are exchanged between ranks, and the batch after it is copied to
the GPU. On a CPU nothing overlaps, so only tests use it there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from sluice.dlrm.ranks import Ranks
from sluice.dlrm.staging import staging_for
from sluice.dlrm.training.assemble import TrainingParts
from sluice.dlrm.training.model_input import ModelInput
from sluice.dlrm.training.synced_batches import TrainingStep
from sluice.ingest.batch import Batch


class _Lookup(nn.Module):
    """Shows TorchRec's pipeline that the tables take the sample's ids unchanged. It needs to know no more of the
    model."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, sample: ModelInput) -> Any:
        return self.tables(sample.sparse)


@dataclass(eq=False)
class OverlappedSteps:
    """Makes training steps. Call `pause()` before the model is used for anything else. The next step continues."""

    parts: TrainingParts
    world: Ranks
    compute_loss: Callable[[ModelInput, int, Batch], Tensor | None]
    """Gets a batch twice: as the model takes it, and as it was loaded."""
    update: Callable[[], None]
    """Called after each backward pass."""

    def __post_init__(self) -> None:
        self._step = 0
        self._skipped = False
        self._started: deque[TrainingStep] = deque()
        self._staging = staging_for(self.world.device)
        # The pipeline uses this object as its optimiser, through `zero_grad` and `step`.
        self._pipeline: Any = TrainPipelineSparseDist(
            _Lookup(self.parts.model.module.tables),
            self,
            self.world.device,
            custom_model_fwd=self._forward,
        )

    def zero_grad(self) -> None:
        self.parts.dense.zero_grad()

    def step(self) -> None:
        if not self._skipped:
            self.update()

    def _forward(self, sample: ModelInput | None) -> tuple[Tensor, Tensor]:
        assert sample is not None
        loss = self.compute_loss(sample, self._step, self._started[0].batch)
        self._skipped = loss is None
        if loss is None:  # the pipeline makes its backward pass through nothing
            loss = torch.zeros((), device=sample.label.device, requires_grad=True)
        return loss, loss.detach()

    def steps(
        self, batches: Iterator[TrainingStep], first: int, check: Callable[[Batch], None]
    ) -> Iterator[TrainingStep]:
        """Makes a step of each batch; the first is number `first`. `check` is called with each batch as it comes."""
        self._started.clear()
        waited_s = 0.0

        def samples() -> Iterator[ModelInput]:
            nonlocal waited_s
            for step in batches:
                waited_s += step.wait_s
                check(step.batch)
                self._started.append(step)
                yield ModelInput.of(
                    self.parts.layout, step.batch, self._staging, step.rows / self.world.ranks
                )

        self._step, source = first, samples()
        while True:
            try:
                loss = self._pipeline.progress(source)
            except StopIteration:
                break
            self._step += 1
            step = self._started.popleft()
            step.loss = None if self._skipped else loss
            # Batches that the pipeline takes ahead were waited for during this step.
            waited_s, step.wait_s = 0.0, waited_s
            yield step
        self.pause()

    def pause(self) -> None:
        self._pipeline.detach()
