"""Embedding tables as they are served: `NarrowTables`, all of a model in one array of float32, float16 or int8.

int8 is symmetric: a row is whole numbers from -127 to 127 times one float16, its largest value / 127, so a row of width
16 takes 18 bytes instead of 64. A lookup is one gather over all tables at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from sluice.dlrm.options import ConfigError, Table

KINDS = ("fp32", "fp16", "int8")
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}
_LEAST_SCALE = 2.0**-24  # float16's smallest; below it a row is as good as zero
_BLOCK = 2**16


class NarrowTables(nn.Module):
    """Takes the place of a Ranker's `tables`: takes ids and gives the sum of each bag's rows, by feature."""

    def __init__(self, tables: Sequence[Table], keys: Mapping[str, Sequence[str]], kind: str) -> None:
        """`keys` are the features that are looked up in each table."""
        super().__init__()
        if kind not in KINDS:
            raise ConfigError(f"tables: {kind!r} is none of {', '.join(KINDS)}")
        self.kind = kind
        self._tables = {t.name: t for t in tables}
        self._groups = [_Group([t for t in tables if t.width == width], keys, kind)
                        for width in dict.fromkeys(t.width for t in tables)]
        self._features = [key for t in tables for key in keys[t.name]]

    def fill(self, name: str, rows: Iterable[Tensor]) -> None:
        """Sets a table's weights from its float32 rows, given in order, some at a time."""
        group = next(g for g in self._groups if name in g.first)
        at = group.first[name]
        for some in rows:
            for block in torch.split(some, _BLOCK):
                group.put(at, block)
                at += len(block)
        if at != group.first[name] + self._tables[name].rows:
            raise ValueError(f"table {name!r}: {at - group.first[name]} rows for {self._tables[name].rows}")

    @property
    def bytes(self) -> int:
        return sum(g.weights.nbytes + (0 if g.scales is None else g.scales.nbytes) for g in self._groups)

    @property
    def wide_bytes(self) -> int:
        """The bytes that the tables would take in float32."""
        return sum(t.bytes for t in self._tables.values())

    def forward(self, sparse: KeyedJaggedTensor) -> dict[str, Tensor]:
        lengths = sparse.lengths().view(len(self._features), -1)
        values, weights = sparse.values(), sparse.weights_or_none()
        single = len(values) == lengths.numel() and bool((lengths == 1).all())
        if len(self._groups) == 1:
            return self._groups[0].pooled(values, lengths, weights, single)
        ends = lengths.sum(1, dtype=torch.int64).tolist()
        bags = dict(zip(self._features, torch.split(values, ends), strict=True))
        each = dict(zip(self._features, torch.split(weights, ends), strict=True)) if weights is not None else {}
        rows = dict(zip(self._features, lengths, strict=True))
        found: dict[str, Tensor] = {}
        for group in self._groups:
            found |= group.pooled(torch.cat([bags[f] for f in group.features]),
                                  torch.stack([rows[f] for f in group.features]),
                                  torch.cat([each[f] for f in group.features]) if each else None, single)
        return found


class _Group:
    """Tables of one width, stacked in one array."""

    def __init__(self, tables: Sequence[Table], keys: Mapping[str, Sequence[str]], kind: str) -> None:
        self.first: dict[str, int] = {}
        rows = 0
        for table in tables:
            self.first[table.name] = rows
            rows += table.rows
        self.width = tables[0].width
        self.weights = torch.zeros(rows, self.width, dtype=_DTYPES[kind])
        self.scales = torch.zeros(rows, 1, dtype=torch.float16) if kind == "int8" else None
        self.features = [key for t in tables for key in keys[t.name]]
        self._starts = torch.tensor([self.first[t.name] for t in tables for _ in keys[t.name]]).unsqueeze(1)

    def put(self, at: int, block: Tensor) -> None:
        stop = at + len(block)
        if self.scales is None:
            self.weights[at:stop] = block
            return
        scale = (block.abs().amax(1, keepdim=True) / 127).clamp(min=_LEAST_SCALE).half()
        self.scales[at:stop] = scale
        # Divides by the scale as it is stored, so that its rounding does not count twice.
        self.weights[at:stop] = (block / scale.float()).round().clamp(-127, 127).to(torch.int8)

    def pooled(self, values: Tensor, lengths: Tensor, weights: Tensor | None, single: bool) -> dict[str, Tensor]:
        batch = lengths.shape[1]
        if single:
            places = (values.view(len(self.features), batch) + self._starts).flatten()
        else:
            places = values + torch.repeat_interleave(self._starts.flatten(), lengths.sum(1, dtype=torch.int64))
        rows = self.weights.index_select(0, places).float()
        if self.scales is not None:
            rows *= self.scales.index_select(0, places).float()
        if weights is not None:
            rows *= weights.unsqueeze(1)
        if not single:
            bags = torch.repeat_interleave(torch.arange(lengths.numel()), lengths.flatten().long())
            rows = torch.zeros(lengths.numel(), self.width).index_add_(0, bags, rows)
        return dict(zip(self.features, rows.view(len(self.features), batch, self.width).unbind(), strict=True))
