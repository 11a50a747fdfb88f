"""Training steps that look ahead: while a batch is computed, the next one's ids travel between ranks and the one after
it to the GPU. TorchRec's `TrainPipelineSparseDist`, fed from a loader: `OverlappedSteps`.

On a CPU it works too, but overlaps nothing; there it serves tests alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.streamable import Pipelineable

from sluice.dlrm.model.ranker import loss_of
from sluice.dlrm.training.steps import FinishedStep

if TYPE_CHECKING:
    from sluice.dlrm.training.assemble import TrainingParts
    from sluice.dlrm.training.steps import Fetched
    from sluice.ingest.batch import Batch


@dataclass
class ModelInput(Pipelineable):  # type: ignore[misc]
    """A batch as the model takes it, in the shape that TorchRec's pipeline moves about."""

    dense: Tensor
    sparse: KeyedJaggedTensor
    label: Tensor
    weight: Tensor
    rows: float
    """The mean number of rows of a rank, without those that only fill the batch."""

    def to(self, device: torch.device, non_blocking: bool = False) -> ModelInput:
        return ModelInput(*(tensor.to(device, non_blocking=non_blocking)
                            for tensor in (self.dense, self.sparse, self.label, self.weight)), self.rows)

    def record_stream(self, stream: torch.Stream) -> None:
        for tensor in (self.dense, self.sparse, self.label, self.weight):
            tensor.record_stream(stream)


class _Lookup(nn.Module):
    """Shows the pipeline the only thing that it must know of a model: the tables take the sample's ids as they are."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, sample: ModelInput) -> Any:
        return self.tables(sample.sparse)


class OverlappedSteps:
    """Makes training steps. Call `pause()` before the model is used for anything else; the next step goes on from
    there."""

    def __init__(self, parts: TrainingParts, device: torch.device, ranks: int, update: Callable[[], None]) -> None:
        """`update` is called after each backward pass."""
        self._parts, self._device, self._ranks, self._update = parts, device, ranks, update
        self._step = 0
        # The pipeline takes this object for its optimiser.
        self._pipeline: Any = TrainPipelineSparseDist(_Lookup(parts.model.module.tables), self, device,
                                                      custom_model_fwd=self._forward)

    def zero_grad(self) -> None:
        self._parts.dense.zero_grad()

    def step(self) -> None:
        self._update()

    def _forward(self, sample: ModelInput | None) -> tuple[Tensor, Tensor]:
        assert sample is not None
        self._parts.rates.begin(self._step)
        logits = self._parts.model(sample.dense, sample.sparse, sample.rows)
        loss = loss_of(logits, sample.label, sample.weight, sample.rows)
        return loss, loss.detach()

    def steps(self, batches: Iterator[Fetched], first: int, check: Callable[[Batch], None]) -> Iterator[FinishedStep]:
        """Makes a step of each batch; the first is number `first`. `check` is called with each batch as it comes."""
        begun: deque[FinishedStep] = deque()
        waited = 0.0

        def samples() -> Iterator[ModelInput]:
            nonlocal waited
            for fetched in batches:
                batch = fetched.batch
                waited += fetched.wait_s
                check(batch)
                begun.append(FinishedStep(batch.label, batch.rows, fetched.rows, 0.0, fetched.position))
                yield ModelInput(*self._parts.layout.features(batch, torch.device("cpu")), batch.label, batch.weight,
                                 fetched.rows / self._ranks)

        self._step, source = first, samples()
        while True:
            try:
                loss = self._pipeline.progress(source)
            except StopIteration:
                break
            waited, wait = 0.0, waited
            self._step += 1
            yield replace(begun.popleft(), loss=loss, wait_s=wait)
        self.pause()

    def pause(self) -> None:
        self._pipeline.detach()
