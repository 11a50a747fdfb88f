"""Stores embedding tables for serving: `NarrowTables`, in float32, float16 or int8.

int8 is symmetric: a row has integers from -127 to 127, times one float16, which is the row's largest value / 127. So a
row of width 16 takes 18 bytes instead of 64. A lookup is one gather over all tables of one width.
"""

from __future__ import annotations

from collections import Counter
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
        self._first: dict[str, int] = {}
        """The number of each table's first row among all rows of its width."""
        rows: Counter[int] = Counter()
        for table in tables:
            self._first[table.name] = rows[table.width]
            rows[table.width] += table.rows
        self._weights = {w: torch.zeros(n, w, dtype=_DTYPES[kind]) for w, n in rows.items()}
        self._scales = {
            w: torch.zeros(n if kind == "int8" else 0, 1, dtype=torch.float16)
            for w, n in rows.items()
        }
        table_of = {key: table for table in tables for key in keys[table.name]}
        self._features = list(names or table_of)
        looked_up = [table_of[name] for name in self._features]
        self._numbers = {
            w: [number for number, table in enumerate(looked_up) if table.width == w] for w in rows
        }
        """The numbers of the features that are looked up in the tables of each width."""
        self._starts = {
            w: torch.tensor([self._first[looked_up[number].name] for number in numbers])
            for w, numbers in self._numbers.items()
        }

    def fill(self, name: str, rows: Tensor) -> None:
        """Sets a table's weights."""
        table = self._tables[name]
        if len(rows) != table.rows:
            raise ValueError(f"table {name!r}: {len(rows)} rows were given for its {table.rows}")
        first = self._first[name]
        for stored in torch.split(rows, _BLOCK_ROWS):
            place, block = slice(first, first + len(stored)), stored.float()
            if self.kind == "int8":
                scale = (block.abs().amax(1, keepdim=True) / 127).clamp(min=_LEAST_SCALE).half()
                self._scales[table.width][place] = scale
                # Divides by the rounded scale that is stored, so that its rounding adds no error.
                block = (block / scale.float()).round().clamp(-127, 127)
            self._weights[table.width][place] = block
            first += len(block)

    @property
    def bytes(self) -> int:
        """The bytes that the tables take."""
        return sum(one.nbytes for one in (*self._weights.values(), *self._scales.values()))

    @property
    def wide_bytes(self) -> int:
        """The bytes that the tables would take in float32."""
        return sum(table.bytes for table in self._tables.values())

    def forward(self, sparse: KeyedJaggedTensor) -> dict[str, Tensor]:
        lengths = sparse.lengths().view(len(self._features), -1)
        counts = lengths.sum(1, dtype=torch.int64)
        ids = torch.split(sparse.values(), counts.tolist())
        pooled: dict[str, Tensor] = {}
        for width, numbers in self._numbers.items():
            bags = lengths[numbers]
            row_numbers = torch.cat([ids[n] for n in numbers])
            row_numbers = row_numbers + torch.repeat_interleave(
                self._starts[width], counts[numbers]
            )
            rows = self._weights[width].index_select(0, row_numbers).float()
            if self.kind == "int8":
                rows *= self._scales[width].index_select(0, row_numbers).float()
            if not (len(rows) == bags.numel() and bool((bags == 1).all())):
                rows = torch.segment_reduce(rows, "sum", lengths=bags.flatten().long(), initial=0)
            sums = rows.view(*bags.shape, -1)
            pooled |= zip((self._features[n] for n in numbers), sums.unbind(), strict=True)
        return pooled
