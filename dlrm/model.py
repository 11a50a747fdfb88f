"""The model: sharded tables over the feature table's columns under a tower, and first weights that no sharding can
change."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from dlrm.compress import Combine, Compression, Compressor
from dlrm.config import ModelConfig, Table
from dlrm.missing import Missing
from dlrm.towers import INPUTS, WIDE, build

if TYPE_CHECKING:
    from ingest.batch import Batch

_BLOCK = 65_536  # rows of a table that get their first weights from one generator


class Layout:
    """Which ordinary tables a model has for its columns, and a batch's ids as rows of them."""

    def __init__(self, config: ModelConfig, columns: Sequence[Table], missing: Missing | None = None) -> None:
        """`missing` masks dense features that are no finite numbers."""
        self.columns, self.missing = tuple(columns), missing
        self.compressor = Compressor(columns, {name: Compression.read(text) for name, text in config.compress.items()})
        self.wide = tuple(replace(t, name=f"{t.name}@wide", width=WIDE) for t in columns
                          ) if "wide" in INPUTS[config.kind] else ()
        self.tables = (*self.compressor.tables, *self.wide)
        self._names = [t.name for t in self.tables]
        self._plain = all(how.kind == "full" for how in self.compressor.choices)

    def features(self, batch: Batch, device: torch.device) -> tuple[torch.Tensor, KeyedJaggedTensor]:
        """What the model takes, made of a batch; without a copy where nothing is compressed or wide."""
        values, lengths, dense = batch.values, batch.lengths, batch.dense
        if self.missing is not None:
            dense = self.missing.mask(dense)
        if not self._plain:
            values, lengths, _ = self.compressor.expand(values, lengths)
        if self.wide:
            values, lengths = torch.cat([values, batch.values]), torch.cat([lengths, batch.lengths])
        sparse = KeyedJaggedTensor(keys=self._names, values=values, lengths=lengths)
        if device.type == "cpu":
            return dense, sparse
        return dense.to(device, non_blocking=True), sparse.to(device, non_blocking=True)


class Ranker(nn.Module):
    """A batch in, one logit a row out."""

    def __init__(self, config: ModelConfig, layout: Layout, dense: int) -> None:
        super().__init__()
        # Tables start without memory: each rank makes only its part, when they are sharded.
        self.tables = EmbeddingBagCollection(device=torch.device("meta"), tables=[
            EmbeddingBagConfig(name=t.name, feature_names=[t.name], num_embeddings=t.rows, embedding_dim=t.width)
            for t in layout.tables])
        self.combine = Combine(layout.compressor)
        self.tower = build(config, dense=dense, columns=len(layout.compressor.columns))
        self._wide = [t.name for t in layout.wide]
        self._half = config.precision == "bf16"

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.tables(sparse)
        inputs = [dense, self.combine(pooled)]
        if self._wide:
            inputs.append(torch.stack([pooled[name] for name in self._wide], 1))
        with torch.autocast(dense.device.type, torch.bfloat16, enabled=self._half):
            logits: torch.Tensor = self.tower(*inputs)
        return logits.float()


def loss_of(logits: torch.Tensor, label: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Weighted cross-entropy over the rows of this rank. Divided by the number of rows, not of weights: the mean over
    ranks is then that over the global batch."""
    return nn.functional.binary_cross_entropy_with_logits(logits, label, weight, reduction="sum") / len(label)


@torch.no_grad()
def first_weights(model: nn.Module, seed: int, starts: Mapping[str, tuple[float, float]]) -> None:
    """Fills the sharded tables. Row i of a table gets the same values on any number of ranks and under any sharding.

    `starts` has the range of a table's values where that is not ±1 / √rows."""
    for name, weight in model.state_dict().items():
        if not hasattr(weight, "local_shards"):
            continue
        rows, width = weight.size()
        bound = 1 / math.sqrt(rows)
        least, most = starts.get(name.removesuffix(".weight").rpartition(".")[2], (-bound, bound))
        for part in weight.local_shards():
            top, left = part.metadata.shard_offsets
            height, breadth = part.metadata.shard_sizes
            for block in range(top // _BLOCK, -(-(top + height) // _BLOCK)):
                start = block * _BLOCK
                values = torch.empty(min(_BLOCK, rows - start), width)
                values.uniform_(least, most, generator=_generator(seed, name, block))
                low, high = max(start, top), min(start + len(values), top + height)
                part.tensor[low - top:high - top] = values[low - start:high - start, left:left + breadth]


@torch.no_grad()
def first_bias(model: Any, rate: float) -> None:
    """The last layer begins at the labels' rate, so that the first steps need not learn it."""
    rate = min(max(rate, 1e-4), 1 - 1e-4)
    last = [p for name, p in model.named_parameters() if ".tower.over." in f".{name}" and name.endswith("bias")][-1]
    last.fill_(math.log(rate / (1 - rate)))


def _generator(*key: Any) -> torch.Generator:
    digest = hashlib.sha256("\0".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
