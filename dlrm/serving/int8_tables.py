"""Stores embedding tables for serving: `NarrowTables`, in float32, float16 or int8.

int8 is symmetric: a row has integers from -127 to 127, times one float16, which is the row's largest value / 127. So a
row of width 16 takes 18 bytes instead of 64. A lookup is one gather over all tables of one width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
        self._tables = {t.name: t for t in tables}
        self._features = list(names or [key for t in tables for key in keys[t.name]])
        tables_by_feature = {key: t for t in tables for key in keys[t.name]}
        owners = [(name, tables_by_feature[name]) for name in self._features]
        self._groups = [
            _Group(
                [t for t in tables if t.width == width],
                [(name, t.name) for name, t in owners if t.width == width],
                kind,
            )
            for width in dict.fromkeys(t.width for t in tables)
        ]

    def fill(self, name: str, rows: Iterable[Tensor]) -> None:
        """Sets a table's weights from its rows, which come in order and in parts."""
        group = next(g for g in self._groups if name in g.first)
        row = group.first[name]
        for part in rows:
            for block in torch.split(part, _BLOCK_ROWS):
                group.put(row, block.float())
                row += len(block)
        if row != group.first[name] + self._tables[name].rows:
            raise ValueError(
                f"table {name!r}: {row - group.first[name]} rows were given for its "
                f"{self._tables[name].rows}"
            )

    @property
    def bytes(self) -> int:
        """The bytes that the tables take."""
        return sum(
            g.weights.nbytes + (0 if g.scales is None else g.scales.nbytes) for g in self._groups
        )

    @property
    def wide_bytes(self) -> int:
        """The bytes that the tables would take in float32."""
        return sum(t.bytes for t in self._tables.values())

    def forward(self, sparse: KeyedJaggedTensor) -> dict[str, Tensor]:
        lengths = sparse.lengths().view(len(self._features), -1)
        values, weights = sparse.values(), sparse.weights_or_none()
        one_id_each = len(values) == lengths.numel() and bool((lengths == 1).all())
        if len(self._groups) == 1:
            return self._groups[0].pooled(values, lengths, weights, one_id_each)
        counts = lengths.sum(1, dtype=torch.int64).tolist()
        ids = dict(zip(self._features, torch.split(values, counts), strict=True))
        id_weights = (
            dict(zip(self._features, torch.split(weights, counts), strict=True))
            if weights is not None
            else {}
        )
        bag_lengths = dict(zip(self._features, lengths, strict=True))
        pooled: dict[str, Tensor] = {}
        for group in self._groups:
            pooled |= group.pooled(
                torch.cat([ids[f] for f in group.features]),
                torch.stack([bag_lengths[f] for f in group.features]),
                torch.cat([id_weights[f] for f in group.features]) if id_weights else None,
                one_id_each,
            )
        return pooled


class _Group:
    """Tables of one width, stacked in one array."""

    def __init__(
        self, tables: Sequence[Table], features: Sequence[tuple[str, str]], kind: str
    ) -> None:
        """`features` has the features that are looked up here, each with its table."""
        self.first: dict[str, int] = {}
        rows = 0
        for table in tables:
            self.first[table.name] = rows
            rows += table.rows
        self.width = tables[0].width
        self.weights = torch.zeros(rows, self.width, dtype=_DTYPES[kind])
        self.scales = torch.zeros(rows, 1, dtype=torch.float16) if kind == "int8" else None
        self.features = [name for name, _ in features]
        self._starts = torch.tensor([self.first[table] for _, table in features]).unsqueeze(1)

    def put(self, first: int, block: Tensor) -> None:
        end = first + len(block)
        if self.scales is None:
            self.weights[first:end] = block
            return
        scale = (block.abs().amax(1, keepdim=True) / 127).clamp(min=_LEAST_SCALE).half()
        self.scales[first:end] = scale
        # Divides by the rounded scale that is stored, so that its rounding adds no error.
        self.weights[first:end] = (block / scale.float()).round().clamp(-127, 127).to(torch.int8)

    def pooled(
        self, values: Tensor, lengths: Tensor, weights: Tensor | None, one_id_each: bool
    ) -> dict[str, Tensor]:
        batch = lengths.shape[1]
        if one_id_each:
            row_numbers = (values.view(len(self.features), batch) + self._starts).flatten()
        else:
            row_numbers = values + torch.repeat_interleave(
                self._starts.flatten(), lengths.sum(1, dtype=torch.int64)
            )
        rows = self.weights.index_select(0, row_numbers).float()
        if self.scales is not None:
            rows *= self.scales.index_select(0, row_numbers).float()
        if weights is not None:
            rows *= weights.unsqueeze(1)
        if not one_id_each:
            bags = torch.repeat_interleave(torch.arange(lengths.numel()), lengths.flatten().long())
            rows = torch.zeros(lengths.numel(), self.width).index_add_(0, bags, rows)
        return dict(
            zip(
                self.features,
                rows.view(len(self.features), batch, self.width).unbind(),
                strict=True,
            )
        )
