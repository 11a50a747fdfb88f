"""Holds embedding tables for serving, in the type that they were trained in: `ServedTables`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor


class ServedTables(nn.Module):
    """Replaces a Ranker's `tables`. It takes ids and returns the sum of each bag's rows, by feature."""

    def __init__(self, weights: Mapping[str, Tensor], keys: Mapping[str, Sequence[str]]) -> None:
        """`weights` has the rows of each table, and `keys` the features that are looked up in it."""
        super().__init__()
        self._weights = weights
        self.bytes = sum(rows.nbytes for rows in weights.values())
        """The bytes that the tables take."""
        self._table_of = {key: name for name in weights for key in keys[name]}

    def forward(self, sparse: KeyedJaggedTensor) -> dict[str, Tensor]:
        names = sparse.keys()
        lengths = sparse.lengths().view(len(names), -1)
        ids = torch.split(sparse.values(), lengths.sum(1, dtype=torch.int64).tolist())
        has_one_each = (lengths == 1).all(1).tolist()
        pooled: dict[str, Tensor] = {}
        for number, name in enumerate(names):
            rows = self._weights[self._table_of[name]].index_select(0, ids[number]).float()
            if not has_one_each[number]:
                rows = torch.segment_reduce(rows, "sum", lengths=lengths[number].long(), initial=0)
            pooled[name] = rows
        return pooled
