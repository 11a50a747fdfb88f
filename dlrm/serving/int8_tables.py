"""Stores embedding tables for serving: `NarrowTables`, in float32, float16 or int8.

int8 is symmetric: a row has integers from -127 to 127, times one float16, which is the row's largest value / 127. So a
row of width 16 takes 18 bytes instead of 64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from sluice.dlrm.options import Table

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}
_LEAST_SCALE = 2.0**-24  # the smallest float16; rows with a smaller scale become 0
_BLOCK_ROWS = 2**16


class NarrowTables(nn.Module):
    """Replaces a Ranker's `tables`. It takes ids and returns the sum of each bag's rows, by feature."""

    def __init__(
        self, tables: Sequence[Table], keys: Mapping[str, Sequence[str]], kind: str
    ) -> None:
        """`kind`: of SERVED_DTYPES. `keys` has the features that are looked up in each table."""
        super().__init__()
        self.kind = kind
        self.wide_bytes = sum(table.bytes for table in tables)
        """The bytes that the tables would take in float32."""
        self._weights = {t.name: torch.zeros(t.rows, t.width, dtype=_DTYPES[kind]) for t in tables}
        self._scales = {
            t.name: torch.zeros(t.rows if kind == "int8" else 0, 1, dtype=torch.float16)
            for t in tables
        }
        self.bytes = sum(
            array.nbytes for array in (*self._weights.values(), *self._scales.values())
        )
        """The bytes that the tables take."""
        self._table_of = {key: table.name for table in tables for key in keys[table.name]}

    def fill(self, name: str, rows: Tensor) -> None:
        """Sets a table's weights."""
        weights, scales = self._weights[name], self._scales[name]
        if len(rows) != len(weights):
            raise ValueError(f"table {name!r}: {len(rows)} rows were given for its {len(weights)}")
        for first in range(0, len(rows), _BLOCK_ROWS):
            part = slice(first, first + _BLOCK_ROWS)
            block = rows[part].float()
            if self.kind == "int8":
                scale = (block.abs().amax(1, keepdim=True) / 127).clamp(min=_LEAST_SCALE).half()
                scales[part] = scale
                # Divides by the rounded scale that is stored, so that its rounding adds no error.
                block = (block / scale.float()).round().clamp(-127, 127)
            weights[part] = block

    def forward(self, sparse: KeyedJaggedTensor) -> dict[str, Tensor]:
        names = sparse.keys()
        lengths = sparse.lengths().view(len(names), -1)
        ids = torch.split(sparse.values(), lengths.sum(1, dtype=torch.int64).tolist())
        has_one_each = (lengths == 1).all(1).tolist()
        pooled: dict[str, Tensor] = {}
        for number, name in enumerate(names):
            table = self._table_of[name]
            rows = self._weights[table].index_select(0, ids[number]).float()
            if self.kind == "int8":
                rows *= self._scales[table].index_select(0, ids[number])
            if not has_one_each[number]:
                rows = torch.segment_reduce(rows, "sum", lengths=lengths[number].long(), initial=0)
            pooled[name] = rows
        return pooled
