"""Defines the model: `Ranker`, which has embedding tables and a tower. Its first weights do not depend on the
sharding."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.types import LazyAwaitable
from torchrec.types import DataType

from sluice.dlrm.model.bag_weights import BagWeighting
from sluice.dlrm.model.item_history import items_by_position
from sluice.dlrm.model.local_parts import local_parts
from sluice.dlrm.model.missing import MissingNumbers
from sluice.dlrm.model.table_compression import (
    Compression,
    Compressor,
    rows_of,
    table_name,
)
from sluice.dlrm.model.towers import WIDE, build, tower_of
from sluice.dlrm.options import MODELS, ConfigError, ModelConfig, Table
from sluice.ingest.batch import Batch
from sluice.ingest.knobs import nearest

_BLOCK_ROWS = 65_536  # so many rows of a table get their first weights from one random generator


class TableLayout:
    """Decides which ordinary tables a model has for its columns, and turns a batch's ids into their rows."""

    def __init__(
        self, config: ModelConfig, columns: Sequence[Table], missing: MissingNumbers | None = None
    ) -> None:
        """`missing` masks dense features that are not finite numbers."""
        self.columns = tuple(columns)
        self.missing = missing
        if dotted := next((t.name for t in columns if "." in t.name), None):
            raise ConfigError(
                f"column {dotted!r}: a model's table has no dot in its name; in the spec write name = "
                f"{dotted.replace('.', '_')!r} and from = {dotted!r}, and make the feature table anew"
            )
        inputs = tower_of(config.kind).inputs
        reads = "history" in inputs
        of_history = [kind for kind in MODELS if "history" in tower_of(kind).inputs]
        if (bool(config.history), bool(config.target)) != (reads, reads):
            raise ConfigError(
                f"--model {config.kind} needs --history by=USER,time=TIME,columns=ITEM, or --history COLUMN, a column "
                "of bags, and --target COLUMN, the item in question"
                if reads
                else f"--history and --target are of --model {' and '.join(of_history)} alone, not of {config.kind}"
            )
        self.history = (
            _find_column(config.history_column, "history", columns) if config.history else None
        )
        kept = [t for t in columns if t is not self.history]
        self.target = (
            kept.index(_find_column(config.target, "target", kept)) if config.target else None
        )
        self.compressor = Compressor(
            kept, {name: Compression.read(text) for name, text in config.compress.items()}
        )
        self.wide = (
            tuple(replace(t, name=f"{t.name}@wide", width=WIDE) for t in columns)
            if "wide" in inputs
            else ()
        )
        past = (replace(self.history, name=table_name(self.history.name)),) if self.history else ()
        tables = [*self.compressor.tables, *self.wide, *past]
        self.keys = {t.name: [t.name] for t in tables}
        """The features that are looked up in each table. Each position of a history is a feature."""
        self.names = [t.name for t in tables]
        """All features, in the order in which `features` gives them."""
        self.past: list[str] = []
        self._items = self.compressor.columns[0], Compression()
        if self.history is not None:
            tables = self._with_history(config, tables)
        self.tables = tuple(tables)
        self._is_uncompressed = all(how.kind == "full" for how in self.compressor.choices)
        for name in config.bags:
            _find_column(name, "bags", kept)
        self.weighting = (
            tuple(BagWeighting.read(config.bags.get(t.name, "sum")) for t in kept)
            if config.bags
            else ()
        )
        """How the ids of each column except the history are weighted. Empty: they are summed without weights."""

    def features(self, batch: Batch) -> tuple[torch.Tensor, KeyedJaggedTensor]:
        """Makes the model's inputs from a batch. It copies nothing if no column is compressed or wide."""
        values = batch.values
        lengths = batch.lengths
        dense = batch.dense
        if self.missing is not None:
            dense = self.missing.mask(dense)
        past: list[torch.Tensor] = []
        if self.history is not None:
            # The other columns' ids and lengths remain. The history's ids and lengths are by position: all first items,
            # then all second items, and so on.
            number = self.columns.index(self.history)
            counts = lengths.view(len(self.columns), -1)
            bags = list(torch.split(values, counts.sum(1, dtype=torch.int64).tolist()))
            items, exists = items_by_position(
                bags.pop(number), counts[number], self.history.longest
            )
            past = [rows_of(items[exists], *self._items), exists.flatten().to(lengths.dtype)]
            values = torch.cat(bags)
            lengths = torch.cat([counts[:number], counts[number + 1 :]]).flatten()
        weights = None
        if self.weighting:
            columns = lengths.view(len(self.weighting), -1)
            weights = torch.cat(
                [how.weights(n) for how, n in zip(self.weighting, columns, strict=True)]
            )
        own = values, lengths, weights
        rows = values if self._is_uncompressed else self.compressor.rows(values, lengths)
        found = [(rows, lengths, weights)]
        if self.wide:
            found.append(own)
        if past:
            found.append((past[0], past[1], torch.ones(len(past[0])) if self.weighting else None))
        if len(found) > 1:
            v, n, w = zip(*found, strict=True)
            found = [(torch.cat(v), torch.cat(n), torch.cat(w) if self.weighting else None)]
        values, lengths, weights = found[0]
        return dense, KeyedJaggedTensor(
            keys=self.names, values=values, lengths=lengths, weights=weights
        )

    def _with_history(self, config: ModelConfig, tables: list[Table]) -> list[Table]:
        """Returns the tables with that of the history, which is the last of them, or with the target's table for
        both."""
        history = tables[-1]
        target = self.compressor.columns[self.target or 0]
        self.past = [f"{history.name}@{n}" for n in range(history.longest)]
        self.names[-1:] = self.past
        if config.history_table != "target":
            self.keys[history.name] = self.past
            self._items = history, Compression()
            return tables
        how = self.compressor.choices[self.target or 0]
        self._items = target, how
        if history.rows != target.rows:
            raise ConfigError(
                f"history table: {history.name!r} ({history.rows} ids) cannot be looked up in the table of "
                f"{target.name!r} ({target.rows} ids): it needs a table with as many ids; write --history-table own"
            )
        del self.keys[history.name]
        shared = self.compressor.tables[self.target or 0].name
        self.keys[shared] += self.past
        return [
            replace(t, lookups=t.lookups + history.lookups, longest=t.longest + history.longest)
            if t.name == shared
            else t
            for t in tables[:-1]
        ]


def _find_column(name: str, what: str, columns: Sequence[Table]) -> Table:
    found = next((t for t in columns if t.name == name), None)
    if found is None:
        raise ConfigError(
            f"{what}: no sparse column {name!r}{nearest(name, [t.name for t in columns])}"
        )
    return found


class Ranker(nn.Module):
    """The model. It takes a batch and returns one logit a row."""

    def __init__(
        self, config: ModelConfig, layout: TableLayout, dense: int, *, decay: float = 0.0
    ) -> None:
        """`decay` is the weight decay of the vectors that a batch looks up (`OptimConfig.table_decay`)."""
        super().__init__()
        # Tables have no memory yet. When they are sharded, each rank makes only its part.
        kind = DataType[config.table_dtype.upper()]
        self.tables = EmbeddingBagCollection(
            device=torch.device("meta"),
            is_weighted=bool(layout.weighting),
            tables=[
                EmbeddingBagConfig(
                    name=t.name,
                    feature_names=layout.keys[t.name],
                    num_embeddings=t.rows,
                    embedding_dim=t.width,
                    data_type=kind,
                )
                for t in layout.tables
            ],
        )
        self._own = [t.name for t in layout.compressor.tables]
        self.tower = build(config, dense=dense, columns=len(layout.compressor.columns))
        self._wide = [t.name for t in layout.wide]
        self._past = layout.past
        self._target = layout.target
        self._bf16 = config.precision == "bf16"
        self._decay = decay
        self._repeats = config.width // (config.table_width or config.width)

    def forward(
        self, dense: torch.Tensor, sparse: KeyedJaggedTensor, rows: float | None = None
    ) -> torch.Tensor:
        """Returns a logit for each row. `rows`: the number of rows without padding. None: there is no padding."""
        found: Any = self.tables(sparse)
        if isinstance(found, LazyAwaitable):
            found = found.wait()
        # One split makes each table's vectors. The gradient of a slice is as large as all vectors, so the backward pass
        # of a slice for each table takes ten times as long.
        pooled = found.to_dict() if isinstance(found, KeyedTensor) else found
        vectors = torch.stack([pooled[name] for name in self._own], 1)
        if self._decay:
            vectors = decayed(vectors, self._decay / (rows or len(dense)))
        inputs = [dense, vectors.repeat(1, 1, self._repeats) if self._repeats > 1 else vectors]
        if self._wide:
            inputs.append(torch.stack([pooled[name] for name in self._wide], 1))
        with torch.autocast(dense.device.type, torch.bfloat16, enabled=self._bf16):
            if self._past:
                lengths = sparse.lengths().view(-1, len(dense))[-len(self._past) :].sum(0)
                history = torch.stack([pooled[name] for name in self._past], 1)
                inputs += [history, lengths, inputs[1][:, self._target]]
            logits: torch.Tensor = self.tower(*inputs)
        return logits.float()  # bfloat16 until here


class _Decay(torch.autograd.Function):
    """Adds the gradient of rate/2 · ‖x‖² in the backward pass.

    The fused kernels silently ignore weight decay on a CPU. This works on every device."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rate: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.rate = rate
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient + ctx.rate * x, None


@torch.fx.wrap
def decayed(x: torch.Tensor, rate: float) -> torch.Tensor:
    found: torch.Tensor = _Decay.apply(x, rate)  # type: ignore[no-untyped-call]
    return found


def loss_of(
    logits: torch.Tensor, label: torch.Tensor, weight: torch.Tensor, rows: float | None = None
) -> torch.Tensor:
    """Returns the weighted cross-entropy over the rows of this rank. It is divided by the number of rows, not by the
    sum of weights, so that the mean over ranks is the mean over the global batch. `rows` is the mean number of rows of
    a rank without padding. None: there is no padding."""
    return nn.functional.binary_cross_entropy_with_logits(
        logits, label, weight, reduction="sum"
    ) / (rows or len(label))


@torch.no_grad()
def first_weights(model: nn.Module, seed: int, starts: Mapping[str, float]) -> None:
    """Fills the sharded tables. Row i of a table gets the same values on any number of ranks and under any sharding.

    `starts` has a table's largest value where that is not 1 / √rows."""
    for name, weight in model.state_dict().items():
        if ".embedding_bags." not in name:
            continue
        rows, width = weight.size()
        bound = starts.get(name.removesuffix(".weight").rpartition(".")[2], 1 / math.sqrt(rows))
        for (top, left), part in local_parts(weight):
            height, breadth = part.shape
            for block in range(top // _BLOCK_ROWS, -(-(top + height) // _BLOCK_ROWS)):
                start = block * _BLOCK_ROWS
                values = torch.empty(min(_BLOCK_ROWS, rows - start), width)
                digest = hashlib.sha256(f"{seed}\0{name}\0{block}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                values.uniform_(-bound, bound, generator=generator)
                low, high = max(start, top), min(start + len(values), top + height)
                part[low - top : high - top] = values[
                    low - start : high - start, left : left + breadth
                ]


@torch.no_grad()
def first_bias(model: Any, rate: float) -> None:
    """Sets the last bias to the rate of positive labels, so that the first steps need not learn it."""
    rate = min(max(rate, 1e-4), 1 - 1e-4)
    last = [
        p
        for name, p in model.named_parameters()
        if ".tower.over." in f".{name}" and name.endswith("bias")
    ][-1]
    last.fill_(math.log(rate / (1 - rate)))
