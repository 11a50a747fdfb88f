"""The model: TorchRec's DLRM over the feature table's columns, and first weights that no sharding can change."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

from dlrm.config import ModelConfig, Table

if TYPE_CHECKING:
    from ingest.batch import Batch

_BLOCK = 65_536  # rows of a table that get their first weights from one generator


class Ranker(nn.Module):
    """A batch in, one logit a row out."""

    def __init__(self, config: ModelConfig, tables: Sequence[Table], dense: int) -> None:
        super().__init__()
        # Tables start without memory: each rank makes only its part, when they are sharded.
        embeddings = EmbeddingBagCollection(device=torch.device("meta"), tables=[
            EmbeddingBagConfig(name=t.name, feature_names=[t.name], num_embeddings=t.rows, embedding_dim=t.width)
            for t in tables])
        self.dlrm = DLRM(embeddings, dense_in_features=dense,
                         dense_arch_layer_sizes=[*config.dense_layers, config.width],
                         over_arch_layer_sizes=[*config.over_layers, 1])

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        logits: torch.Tensor = self.dlrm(dense, sparse)
        return logits.squeeze(1)


def features(batch: Batch, names: Sequence[str], device: torch.device) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """What the model takes, made of a batch without a copy on the CPU."""
    sparse = KeyedJaggedTensor(keys=list(names), values=batch.values, lengths=batch.lengths)
    if device.type == "cpu":
        return batch.dense, sparse
    return batch.dense.to(device, non_blocking=True), sparse.to(device, non_blocking=True)


def loss_of(logits: torch.Tensor, label: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Weighted cross-entropy over the rows of this rank. Divided by the number of rows, not of weights: the mean over
    ranks is then that over the global batch."""
    return nn.functional.binary_cross_entropy_with_logits(logits, label, weight, reduction="sum") / len(label)


@torch.no_grad()
def first_weights(model: nn.Module, seed: int) -> None:
    """Fills the sharded tables. Row i of a table gets the same values on any number of ranks and under any sharding."""
    for name, weight in model.state_dict().items():
        if not hasattr(weight, "local_shards"):
            continue
        rows, width = weight.size()
        bound = 1 / math.sqrt(rows)
        for part in weight.local_shards():
            top, left = part.metadata.shard_offsets
            height, breadth = part.metadata.shard_sizes
            for block in range(top // _BLOCK, -(-(top + height) // _BLOCK)):
                start = block * _BLOCK
                values = torch.empty(min(_BLOCK, rows - start), width)
                values.uniform_(-bound, bound, generator=_generator(seed, name, block))
                low, high = max(start, top), min(start + len(values), top + height)
                part.tensor[low - top:high - top] = values[low - start:high - start, left:left + breadth]


def _generator(*key: Any) -> torch.Generator:
    digest = hashlib.sha256("\0".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
