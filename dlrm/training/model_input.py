"""A batch as the model takes it, on the host or on its way to a device: `ModelInput`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from sluice.dlrm.model.ranker import TableLayout
from sluice.dlrm.staging import PinnedStaging
from sluice.ingest.batch import Batch


@dataclass
class ModelInput(Pipelineable):  # type: ignore[misc]
    """A batch as the model takes it, in a form that TorchRec's pipeline can move to a device."""

    dense: Tensor
    sparse: KeyedJaggedTensor
    label: Tensor
    weight: Tensor
    rows: float | None
    """The mean number of rows of a rank, without padding. None: there is no padding."""
    staging: PinnedStaging | None
    """The way to the device. None: the batch stays where it is."""

    @classmethod
    def of(
        cls,
        layout: TableLayout,
        batch: Batch,
        staging: PinnedStaging | None,
        rows: float | None = None,
    ) -> ModelInput:
        """Returns a batch of the loader, on the host."""
        return cls(*layout.features(batch), batch.label, batch.weight, rows, staging)

    def to(self, device: torch.device, non_blocking: bool = False) -> ModelInput:
        """Sends the batch to the device. TorchRec calls this on its stream for copies."""
        if self.staging is None:
            return self
        # The lengths per key are computed here. Otherwise the host would wait for the device to compute them.
        sparse = self.sparse.sync()
        dense, label, weight, values, lengths = self.staging.send(
            [self.dense, self.label, self.weight, sparse.values(), sparse.lengths()]
        )
        moved = KeyedJaggedTensor(
            keys=sparse.keys(),
            values=values,
            lengths=lengths,
            stride=sparse.stride(),
            length_per_key=sparse.length_per_key(),
            offset_per_key=sparse.offset_per_key(),
        )
        return replace(self, dense=dense, sparse=moved, label=label, weight=weight)

    def record_stream(self, stream: torch.Stream) -> None:
        for tensor in (self.dense, self.sparse, self.label, self.weight):
            tensor.record_stream(stream)
