"""Defines the model: `Ranker`, which has embedding tables and a tower. Its first weights do not depend on the
sharding."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.types import LazyAwaitable
from torchrec.types import DataType

from sluice.dlrm.model.item_history import items_by_position
from sluice.dlrm.model.local_parts import local_parts
from sluice.dlrm.model.spread_rows import spread_rows, table_name, table_of
from sluice.dlrm.model.towers import WIDE, build, tower_of
from sluice.dlrm.options import MODELS, ConfigError, ModelConfig, Table
from sluice.ingest.batch import Batch
from sluice.ingest.knobs import nearest

_BLOCK_ROWS = 65_536  # so many rows of a table get their first weights from one random generator


class TableLayout:
    """Decides which tables a model has for its columns, and turns a batch's ids into their rows."""

    def __init__(self, config: ModelConfig, columns: Sequence[Table]) -> None:
        self.columns = tuple(columns)
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
        self.kept = tuple(t for t in columns if t is not self.history)
        """All columns but the history."""
        self.target = (
            self.kept.index(_find_column(config.target, "target", self.kept))
            if config.target
            else None
        )
        self._is_spread = [t.name in config.spread for t in self.kept]
        self.own = tuple(
            table_of(t, spread=spread) for t, spread in zip(self.kept, self._is_spread, strict=True)
        )
        """The table of each kept column."""
        self.wide = (
            tuple(replace(t, name=f"{t.name}@wide", width=WIDE) for t in columns)
            if "wide" in inputs
            else ()
        )
        past = (replace(self.history, name=table_name(self.history.name)),) if self.history else ()
        tables = [*self.own, *self.wide, *past]
        if len({t.name for t in tables}) < len(tables):
            raise ConfigError(
                "two tables have one name: rename the columns that have an @ in theirs"
            )
        self.keys = {t.name: [t.name] for t in tables}
        """The features that are looked up in each table. Each position of a history is a feature."""
        self.names = [t.name for t in tables]
        """All features, in the order in which `features` gives them."""
        self.past: list[str] = []
        self._spread_items = False
        """Whether the items of the history are looked up in a spread table."""
        if self.history is not None:
            tables = self._with_history(config, tables)
        self.tables = tuple(tables)

    def features(self, batch: Batch) -> tuple[torch.Tensor, KeyedJaggedTensor]:
        """Makes the model's inputs from a batch. It copies nothing if no column is spread or wide."""
        values = batch.values
        lengths = batch.lengths
        past: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self.history is not None:
            # The other columns' ids and lengths remain. The history's ids and lengths are by position: all first items,
            # then all second items, and so on.
            number = self.columns.index(self.history)
            counts = lengths.view(len(self.columns), -1)
            bags = list(torch.split(values, counts.sum(1, dtype=torch.int64).tolist()))
            items, exists = items_by_position(
                bags.pop(number), counts[number], self.history.longest
            )
            past_rows = items[exists]
            if self._spread_items:
                past_rows = spread_rows(past_rows, self.history.rows)
            past = [(past_rows, exists.flatten().to(lengths.dtype))]
            values = torch.cat(bags)
            lengths = torch.cat([counts[:number], counts[number + 1 :]]).flatten()
        parts = [(self._rows(values, lengths), lengths)]
        if self.wide:
            parts.append((values, lengths))
        parts += past
        values, lengths = (
            torch.cat(tensors) if len(parts) > 1 else tensors[0]
            for tensors in zip(*parts, strict=True)
        )
        return batch.dense, KeyedJaggedTensor(keys=self.names, values=values, lengths=lengths)

    def _rows(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Returns the rows in which the ids of the kept columns are stored."""
        if not any(self._is_spread):
            return values
        counts = lengths.view(len(self.kept), -1).sum(1, dtype=torch.int64).tolist()
        bags = torch.split(values, counts)
        return torch.cat(
            [
                spread_rows(ids, t.rows) if spread else ids
                for ids, t, spread in zip(bags, self.kept, self._is_spread, strict=True)
            ]
        )

    def _with_history(self, config: ModelConfig, tables: list[Table]) -> list[Table]:
        """Returns the tables with that of the history, which is the last of them, or with the target's table for
        both."""
        history = tables[-1]
        target = self.kept[self.target or 0]
        self.past = [f"{history.name}@{n}" for n in range(history.longest)]
        self.names[-1:] = self.past
        if config.history_table != "target":
            self.keys[history.name] = self.past
            return tables
        self._spread_items = self._is_spread[self.target or 0]
        if history.rows != target.rows:
            raise ConfigError(
                f"history table: {history.name!r} ({history.rows} ids) cannot be looked up in the table of "
                f"{target.name!r} ({target.rows} ids): it needs a table with as many ids; write --history-table own"
            )
        del self.keys[history.name]
        shared = self.own[self.target or 0].name
        self.keys[shared] += self.past
        return [
            replace(t, lookups=t.lookups + history.lookups, longest=t.longest + history.longest)
            if t.name == shared
            else t
            for t in tables[:-1]
        ]


def _find_column(name: str, what: str, columns: Sequence[Table]) -> Table:
    column = next((t for t in columns if t.name == name), None)
    if column is None:
        raise ConfigError(
            f"{what}: no sparse column {name!r}{nearest(name, [t.name for t in columns])}"
        )
    return column


class Ranker(nn.Module):
    """The model. It takes a batch and returns one logit a row."""

    def __init__(
        self,
        config: ModelConfig,
        layout: TableLayout,
        dense: int,
        *,
        decay: float = 0.0,
    ) -> None:
        """`decay` is the weight decay of the vectors that a batch looks up (`OptimConfig.table_decay`)."""
        super().__init__()
        # Tables have no memory yet. When they are sharded, each rank makes only its part.
        kind = DataType[config.table_dtype.upper()]
        self.tables = EmbeddingBagCollection(
            device=torch.device("meta"),
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
        self._own = [t.name for t in layout.own]
        self.tower = build(config, dense=dense, columns=len(layout.own))
        self._wide = [t.name for t in layout.wide]
        self._past = layout.past
        self._target = layout.target
        self._bf16 = config.precision == "bf16"
        self._decay = decay

    def forward(
        self, dense: torch.Tensor, sparse: KeyedJaggedTensor, rows: float | None = None
    ) -> torch.Tensor:
        """Returns a logit for each row. `rows`: the number of rows without padding. None: there is no padding."""
        looked_up: Any = self.tables(sparse)
        if isinstance(looked_up, LazyAwaitable):
            looked_up = looked_up.wait()
        # One split makes each table's vectors. The gradient of a slice is as large as all vectors, so the backward pass
        # of a slice for each table takes ten times as long.
        pooled = looked_up.to_dict() if isinstance(looked_up, KeyedTensor) else looked_up
        vectors = torch.stack([pooled[name] for name in self._own], 1)
        if self._decay and vectors.requires_grad:
            # The gradient of rate/2 · ‖x‖². The fused kernels silently ignore weight decay on a CPU.
            rate, values = self._decay / (rows or len(dense)), vectors.detach()
            vectors.register_hook(lambda gradient: gradient + rate * values)  # type: ignore[no-untyped-call]
        inputs = [dense, vectors]
        if self._wide:
            inputs.append(torch.stack([pooled[name] for name in self._wide], 1))
        if self._past:
            lengths = sparse.lengths().view(-1, len(dense))[-len(self._past) :].sum(0)
            history = torch.stack([pooled[name] for name in self._past], 1)
            inputs += [history, lengths, vectors[:, self._target]]
        with torch.autocast(inputs[0].device.type, torch.bfloat16, enabled=self._bf16):
            logits: torch.Tensor = self.tower(*inputs)
        return logits.float()  # bfloat16 until here


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
def first_weights(model: nn.Module, seed: int) -> None:
    """Fills the sharded tables. Row i of a table gets the same values on any number of ranks and under any sharding.
    No value is larger than 1 / √rows."""
    for name, weight in model.state_dict().items():
        if ".embedding_bags." not in name:
            continue
        rows, width = weight.size()
        bound = 1 / math.sqrt(rows)
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
