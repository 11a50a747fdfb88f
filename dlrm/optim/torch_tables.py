"""Trains 16-bit tables and large tables on a CPU: `TorchTables` looks them up, and updates them in the backward pass.

FBGEMM's CPU kernels (1.8) cannot train these tables:

- fp16: they round each updated weight to the nearest, whatever `stochastic_rounding` says. So steps below half a unit
  in the last place are always lost.
- bf16: they have no forward pass.
- float32 with 2³¹ − 1 rows or more: they refuse them. From the 2³⁰th weight on, row-wise Adagrad silently updates a
  wrong row, because its byte offsets have 32 bits.

Weights and states stay in FBGEMM's memory. An update of a 16-bit table is made in float32 and rounded at random: up
with a probability that is its distance from the lower neighbour. So small steps count on average. The random numbers
depend on the run's seed, the step, the table's name and the weight's row and column. They are the same on any number of
ranks and after a resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

# Large odd numbers, below 2⁶³.
_FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
_LARGEST_INT64 = 2**63 - 1
_DROPPED_BITS = {torch.float16: 13, torch.bfloat16: 16}
"""How many bits of a float32's fraction each type drops."""
_MOST_WEIGHTS = 2**30
"""The most weights of a float32 table that FBGEMM updates correctly with each optimiser."""
_SMALL = 2.0**-14
_UNIT = 2.0**-24
"""Below `_SMALL`, neighbouring float16 numbers differ by `_UNIT`."""


def round_at_random(values: Tensor, dtype: torch.dtype, chance: Tensor) -> Tensor:
    """Rounds float32 values at random to one of the two neighbours in `dtype`. `chance` has as many random bits as are
    dropped."""
    bits = _DROPPED_BITS[dtype]
    rounded = ((values.view(torch.int32) + chance) & -(1 << bits)).view(torch.float32)
    if dtype == torch.float16:
        small = values.abs() < _SMALL
        if small.any():
            rounded = torch.where(
                small, ((values / _UNIT) + chance / (1 << bits)).floor() * _UNIT, rounded
            )
    return rounded.to(dtype)


class TorchTables(SplitTableBatchedEmbeddingBagsCodegen):  # type: ignore[misc]
    """Replaces FBGEMM's module. `replace_tables` turns FBGEMM's object into one of these."""

    _parts: list[tuple[Tensor, Tensor | None, list[int], Tensor]]

    def start(self, seed: int, first_rows: Sequence[int], first_columns: Sequence[int]) -> None:
        """Prepares the object. Called once. `first_rows` and `first_columns` say where this rank's part of each table
        starts."""
        states = [state[0] for state in self.split_optimizer_states()] or [None] * len(
            self.embedding_specs
        )
        self._parts = []
        for number, weights in enumerate(self.split_embedding_weights()):
            name = self.table_names[number]
            key = int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:7], "little")
            columns = (torch.arange(weights.shape[1]) + first_columns[number]) * 2 + 1
            features = [f for f, table in enumerate(self.feature_table_map) if table == number]
            self._parts.append(
                (
                    weights,
                    states[number],
                    features,
                    torch.cat([torch.tensor([key + first_rows[number]]), columns * _FACTORS[0]]),
                )
            )
        self.step = 0

    def forward(self, indices: Tensor, offsets: Tensor, *_: Any, **__: Any) -> Tensor:
        sums: Tensor = _Lookup.apply(  # type: ignore[no-untyped-call]
            self.placeholder_autograd_tensor, self, indices.long(), offsets
        )
        return sums

    def lookups(
        self, indices: Tensor, offsets: Tensor
    ) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Yields for each table its number, the ids of all its features' bags, and the bag of each id (None: each bag
        has one id)."""
        batch = (len(offsets) - 1) // len(self.feature_table_map)
        lengths = offsets.diff().view(-1, batch)
        ends = offsets[::batch].tolist()
        for number, (_, _, features, _) in enumerate(self._parts):
            at = [slice(ends[f], ends[f + 1]) for f in features]
            lengths_here = lengths[features].flatten()
            bags = (
                None
                if bool((lengths_here == 1).all())
                else torch.repeat_interleave(torch.arange(len(lengths_here)), lengths_here)
            )
            yield number, torch.cat([indices[place] for place in at]), bags

    @torch.no_grad()
    def update(self, number: int, ids: Tensor, gradients: Tensor) -> None:
        """Updates the rows of these ids, each by the sum of its gradients."""
        weights, state, _, keys = self._parts[number]
        rows, inverse = torch.unique(ids, return_inverse=True)
        total = gradients.new_zeros(len(rows), weights.shape[1]).index_add_(0, inverse, gradients)
        step = total * self.get_learning_rate()
        if state is not None:
            state = state.view(len(weights), -1)  # one number a row, or one a weight
            squares = total.square()
            seen = state[rows] + (
                squares
                if self.optimizer == EmbOptimType.EXACT_ADAGRAD
                else squares.mean(1, keepdim=True)
            )
            state[rows] = seen
            step /= seen.sqrt() + self.optimizer_args.eps
        moved = weights[rows].float() - step
        if weights.dtype == torch.float32:
            weights[rows] = moved
            return
        # Mixes the bits of row and step.
        base = (rows + keys[0]) * _FACTORS[0] + (self.step * _FACTORS[1] & _LARGEST_INT64)
        for factor in _FACTORS[1:]:
            base = (base ^ (base >> 29 & 0x7FFFFFFFF)) * factor
        base ^= base >> 32 & 0xFFFFFFFF
        mask = (1 << _DROPPED_BITS[weights.dtype]) - 1
        chance = ((base.unsqueeze(1) * keys[1:]) >> 40 & mask).int()
        weights[rows] = round_at_random(moved, weights.dtype, chance)


class _Lookup(torch.autograd.Function):
    """Sums the rows of each bag, in float32. Its backward pass updates the tables."""

    @staticmethod
    def forward(
        ctx: Any, _: Tensor, tables: TorchTables, indices: Tensor, offsets: Tensor
    ) -> Tensor:
        ctx.tables = tables
        ctx.save_for_backward(indices, offsets)
        batch = (len(offsets) - 1) // len(tables.feature_table_map)
        by_feature: dict[int, Tensor] = {}
        for number, ids, bags in tables.lookups(indices, offsets):
            rows, features = tables._parts[number][0], tables._parts[number][2]
            vectors = rows[ids].float()
            sums = (
                vectors
                if bags is None
                else vectors.new_zeros(len(features) * batch, rows.shape[1]).index_add_(
                    0, bags, vectors
                )
            )
            by_feature |= dict(zip(features, sums.view(len(features), batch, -1), strict=True))
        return torch.cat([by_feature[feature] for feature in sorted(by_feature)], 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        indices, offsets = ctx.saved_tensors
        tables: TorchTables = ctx.tables
        widths = [tables._parts[table][0].shape[1] for table in tables.feature_table_map]
        columns = torch.split(gradient, widths, 1)
        for number, ids, bags in tables.lookups(indices, offsets):
            of_ids = torch.cat([columns[feature] for feature in tables._parts[number][2]])
            tables.update(number, ids, of_ids if bags is None else of_ids[bags])
        return (None,) * 4


def needs_torch(tables: SplitTableBatchedEmbeddingBagsCodegen) -> bool:
    """Whether FBGEMM cannot train these tables on a CPU, because they have 16 bits or one is too large."""
    return tables.weights_precision in (SparseType.FP16, SparseType.BF16) or any(
        rows * width > _MOST_WEIGHTS for rows, width, *_ in tables.embedding_specs
    )


def replace_tables(model: torch.nn.Module, seed: int) -> list[TorchTables]:
    """Turns the tables of a sharded model that FBGEMM cannot train into `TorchTables`. Returns these."""
    replaced = []
    # TorchRec keeps these modules in lists, so `modules` does not find them.
    lookups = [lookup for module in model.modules() for lookup in getattr(module, "_lookups", ())]
    for owner in (module for lookup in lookups for module in lookup.modules()):
        tables: Any = getattr(owner, "_emb_module", None)
        if isinstance(tables, SplitTableBatchedEmbeddingBagsCodegen) and (
            tables.current_device.type == "cpu" and needs_torch(tables)
        ):
            tables.__class__ = TorchTables
            tables.start(seed, owner._row_offset, owner._col_offset)
            replaced.append(tables)
    return replaced
