"""Stores embedding tables for serving: `NarrowTables`, in float32, float16 or int8.

int8 is symmetric: a row has integers from -127 to 127, times one float16, which is the row's largest value / 127. So a
row of width 16 takes 18 bytes instead of 64. A lookup is one gather over all tables of one width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

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
        self,
        tables: Sequence[Table],
        keys: Mapping[str, Sequence[str]],
        kind: str,
        names: Sequence[str] = (),
    ) -> None:
        """`kind`: of SERVED_DTYPES. `keys` has the features that are looked up in each table. `names` has all features
        in the order of the input. Empty: the order of the tables."""
        super().__init__()
        self.kind = kind
        self._tables = {table.name: table for table in tables}
        table_of = {key: table for table in tables for key in keys[table.name]}
        self._features = list(names or table_of)
        self._stacks = {}
        for width in {table.width for table in tables}:
            stacked = [table for table in tables if table.width == width]
            looked_up = {
                number: table_of[name].name
                for number, name in enumerate(self._features)
                if table_of[name] in stacked
            }
            self._stacks[width] = _Stack(stacked, looked_up, kind)

    def fill(self, name: str, rows: Tensor) -> None:
        """Sets a table's weights."""
        table = self._tables[name]
        if len(rows) != table.rows:
            raise ValueError(f"table {name!r}: {len(rows)} rows were given for its {table.rows}")
        stack = self._stacks[table.width]
        first = stack.first[name]
        for block in torch.split(rows, _BLOCK_ROWS):
            stack.put(first, block.float())
            first += len(block)

    @property
    def bytes(self) -> int:
        """The bytes that the tables take."""
        return sum(stack.weights.nbytes + stack.scales.nbytes for stack in self._stacks.values())

    @property
    def wide_bytes(self) -> int:
        """The bytes that the tables would take in float32."""
        return sum(table.bytes for table in self._tables.values())

    def forward(self, sparse: KeyedJaggedTensor) -> dict[str, Tensor]:
        lengths = sparse.lengths().view(len(self._features), -1)
        counts = lengths.sum(1, dtype=torch.int64).tolist()
        given = sparse.weights_or_none()
        ids = torch.split(sparse.values(), counts)
        weights = None if given is None else torch.split(given, counts)
        pooled: dict[str, Tensor] = {}
        for stack in self._stacks.values():
            numbers = list(stack.looked_up)
            sums = stack.sums(
                torch.cat([ids[n] for n in numbers]),
                lengths[numbers],
                None if weights is None else torch.cat([weights[n] for n in numbers]),
            )
            pooled |= zip((self._features[n] for n in numbers), sums.unbind(), strict=True)
        return pooled


class _Stack:
    """Tables of one width in one array."""

    def __init__(self, tables: Sequence[Table], looked_up: Mapping[int, str], kind: str) -> None:
        """`looked_up` has the table of each feature, by the feature's number."""
        rows = [table.rows for table in tables]
        self.first = dict(
            zip((table.name for table in tables), accumulate(rows, initial=0), strict=False)
        )
        self.looked_up = looked_up
        self.weights = torch.zeros(sum(rows), tables[0].width, dtype=_DTYPES[kind])
        self.scales = torch.zeros(sum(rows) if kind == "int8" else 0, 1, dtype=torch.float16)
        self._starts = torch.tensor([self.first[name] for name in looked_up.values()])

    def put(self, first: int, block: Tensor) -> None:
        end = first + len(block)
        if len(self.scales):
            scale = (block.abs().amax(1, keepdim=True) / 127).clamp(min=_LEAST_SCALE).half()
            self.scales[first:end] = scale
            # Divides by the rounded scale that is stored, so that its rounding adds no error.
            block = (block / scale.float()).round().clamp(-127, 127)
        self.weights[first:end] = block

    def sums(self, ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        """Returns [features, batch, width]. `lengths` is [features, batch]."""
        row_numbers = ids + torch.repeat_interleave(self._starts, lengths.sum(1, dtype=torch.int64))
        rows = self.weights.index_select(0, row_numbers).float()
        if len(self.scales):
            rows *= self.scales.index_select(0, row_numbers).float()
        if weights is not None:
            rows *= weights.unsqueeze(1)
        if not (len(rows) == lengths.numel() and bool((lengths == 1).all())):
            rows = torch.segment_reduce(rows, "sum", lengths=lengths.flatten().long(), initial=0)
        return rows.view(*lengths.shape, -1)
