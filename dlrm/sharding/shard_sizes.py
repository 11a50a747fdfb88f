"""The parts of a placement and their sizes. A table's bytes lie in an accelerator's memory, or in its host's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.common.errors import UsageError
from sluice.dlrm.options import Table

# Kernel → share of a table that lies in the accelerator's memory. The rest lies in the host's. `uvm_caching` keeps a
# fifth of the rows, those in use, in the memory of the processor that reads them: FBGEMM's usual share.
DEVICE_PART = {"fused": 1.0, "uvm": 0.0, "uvm_caching": 0.2}
# The kernels' names are TorchRec's.
NAMES = {"fused": "fused", "uvm": "fused_uvm", "uvm_caching": "fused_uvm_caching"}
# The kernels that a CPU has, too: it has no other memory to spill to.
ANYWHERE = ("fused",)


def split(bytes_: int, kernel: str) -> tuple[int, int]:
    """Splits a table's bytes: (those in the accelerator's memory, those in the host's)."""
    device = round(bytes_ * DEVICE_PART[kernel])
    return device, bytes_ - device


# The state that an optimiser keeps for a table, in bytes a row and in bytes an element.
STATES = {"rowwise_adagrad": (4, 0), "adagrad": (0, 4), "adam": (0, 8), "sgd": (0, 0)}
DTYPES = {"fp32": 4, "fp16": 2, "bf16": 2}  # the same as TABLE_DTYPES of sluice.dlrm.options


class PlacementError(UsageError):
    """Tables cannot be placed as asked. The message names the table and what to do."""


class DoesNotFit(PlacementError):
    """Too little memory: `missing` bytes in all, or on the fullest rank if all together would do."""

    def __init__(self, message: str, missing: int) -> None:
        super().__init__(message)
        self.missing = missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How many bytes a weight takes, and how many the optimiser keeps for it."""

    dtype: str = "fp32"
    optimiser: str = "rowwise_adagrad"

    def weights(self, rows: int, width: int) -> int:
        return rows * width * DTYPES[self.dtype]

    def state(self, rows: int, width: int) -> int:
        a_row, an_element = STATES[self.optimiser]
        return rows * (a_row + width * an_element)

    def total(self, rows: int, width: int) -> int:
        return self.weights(rows, width) + self.state(rows, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShard:
    """The part of one table that one rank holds."""

    rank: int
    rows: int
    width: int
    bytes: int
    """Weights and the optimiser's state in the rank's own memory."""
    host_bytes: int
    """The same in its host's memory, read through the accelerator."""
    reads: float
    """Bytes read for one sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlacement:
    """The ranks on which one table lies, and its part on each."""

    name: str
    kind: str
    ranks: tuple[int, ...]
    parts: tuple[TableShard, ...]
    why: str
    kernel: str = "fused"

    @property
    def bytes(self) -> int:
        return sum(p.bytes + p.host_bytes for p in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlacement:
    """A place for every table, in their order."""

    places: tuple[TablePlacement, ...]
    ranks: int

    def loads(self, figure: str) -> list[Any]:
        """Returns for each rank the sum over its parts of `bytes`, `host_bytes` or `reads`."""
        sums: list[Any] = [0] * self.ranks
        for place in self.places:
            for part in place.parts:
                sums[part.rank] += getattr(part, figure)
        return sums

    @property
    def most_bytes(self) -> int:
        """The bytes on the fullest rank, in its own memory."""
        return int(max(self.loads("bytes")))

    @property
    def balance(self) -> tuple[float, float]:
        """The largest over the mean, of bytes and of reads. 1: all ranks are alike; the number of ranks: one holds
        everything."""
        return _uneven(self.loads("bytes")), _uneven(self.loads("reads"))


def _uneven(loads: Sequence[float]) -> float:
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def gb(count: float) -> str:
    """Bytes as text, in the decimal units in which accelerators' memory is sold."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def step_traffic(
    placement: ModelPlacement,
    tables: Sequence[Table],
    *,
    batch: int,
    wire: str = "fp32",
    dense_parameters: int = 0,
    vectors: Mapping[str, int] | None = None,
) -> tuple[int, int]:
    """Returns the bytes that the busiest rank sends for a batch, forwards and backwards, and its part of these in the
    mean of gradients: of dense layers, and of tables with a copy on each rank. The others are ids to where their tables
    are, pooled vectors back, and their gradients. `vectors` is the number of pooled vectors that a sample takes from
    each table, if it is not 1."""
    ranks = placement.ranks
    if ranks == 1:
        return 0, 0
    mine, away = batch / ranks, batch * (ranks - 1) / ranks
    element = 2 if wire == "fp16" else 4
    pooled = [0.0] * ranks
    gradients = 0.0
    ids = 0.0
    for place, table in zip(placement.places, tables, strict=True):
        if place.kind == "data":  # only its gradients travel, as those of the dense layers do
            dense_parameters += table.rows * table.width
            continue
        holders = [part for part in place.parts if part.rows]
        count = vectors[place.name] if vectors else 1
        for part in holders:
            pooled[part.rank] += away * count * part.width * element
        # Each id and each length has four bytes; by columns, each holder gets all of them.
        copies = len(holders) if place.kind == "column" else 1
        ids += mine * (ranks - 1) / ranks * 4 * (table.lookups * copies + count * len(holders))
        gradients += (
            sum(mine * count * part.width * element for part in holders) * (ranks - 1) / ranks
        )
    mean = 2 * dense_parameters * 4 * (ranks - 1) / ranks
    return round(max(pooled) + gradients + ids + mean), round(mean)
