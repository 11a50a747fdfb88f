"""Which rank holds which table, or which part of it: plain arithmetic over sizes and use. Standard library only.

A table is placed whole (`table`), cut by rows over all ranks (`row`), or cut by columns over some (`column`). Two loads
count on each rank: the bytes that it holds, and the bytes that it reads for one sample. First, tables that cannot be
whole are cut; the rest go, heaviest first, each to the rank where it hurts least; while the ranks are out of balance,
the next heaviest table is cut too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dlrm.machines import Machine

KINDS = ("row", "table", "column")
TARGET = 1.1  # largest over mean load of a rank: what a placement is asked for
MIN_COLUMNS = 4  # the fused kernels take widths in fours
_ALL_TRIED = 64  # up to so many tables each number of cuts is tried; beyond, numbers that double
# What an optimiser keeps for a table, in bytes a row and in bytes an element.
STATES = {"rowwise_adagrad": (4, 0), "adagrad": (0, 4), "adam": (0, 8), "sgd": (0, 0)}
DTYPES = {"fp32": 4, "fp16": 2, "bf16": 2}


class PlacementError(ValueError):
    """Tables that cannot be placed as asked: its message names the table and what would do."""


class DoesNotFit(PlacementError):
    """Too little memory: `missing` bytes in all, or on the fullest rank if all together would do."""

    def __init__(self, message: str, missing: int) -> None:
        super().__init__(message)
        self.missing = missing


class TableLike(Protocol):
    """What must be known of a table; `dlrm.config.Table` has it."""

    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def lookups(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How many bytes a weight takes, and what the optimiser keeps beside it."""

    dtype: str = "fp32"
    optimiser: str = "rowwise_adagrad"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise PlacementError(f"dtype: {self.dtype!r} is none of {', '.join(DTYPES)}")
        if self.optimiser not in STATES:
            raise PlacementError(f"optimiser: {self.optimiser!r} is none of {', '.join(STATES)}")

    def weights(self, rows: int, width: int) -> int:
        return rows * width * DTYPES[self.dtype]

    def state(self, rows: int, width: int) -> int:
        a_row, an_element = STATES[self.optimiser]
        return rows * (a_row + width * an_element)

    def total(self, rows: int, width: int) -> int:
        return self.weights(rows, width) + self.state(rows, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank holds of one table."""

    rank: int
    rows: int
    width: int
    bytes: int
    """Weights and optimiser's state."""
    reads: float
    """Bytes read for one sample, if all rows are used alike."""
    sends: int
    """Bytes of its pooled vector: whole or a run of columns, or, of some rows, a partial sum of full width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one table lives."""

    name: str
    kind: str
    ranks: tuple[int, ...]
    parts: tuple[Part, ...]
    why: str

    @property
    def bytes(self) -> int:
        return sum(p.bytes for p in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A place for every table, in their order."""

    places: tuple[Place, ...]
    ranks: int

    def bytes_on(self, rank: int) -> int:
        return sum(p.bytes for place in self.places for p in place.parts if p.rank == rank)

    def reads_on(self, rank: int) -> float:
        return sum(p.reads for place in self.places for p in place.parts if p.rank == rank)

    @property
    def balance(self) -> tuple[float, float]:
        """Largest over mean, of bytes and of reads. 1: all ranks alike; the number of ranks: one holds everything."""
        return (_uneven([self.bytes_on(r) for r in range(self.ranks)]),
                _uneven([self.reads_on(r) for r in range(self.ranks)]))

    def step_time(self, machine: Machine, batch: int) -> dict[str, float]:
        """Seconds of the slowest rank for one global batch, forwards: reading its rows, sending what it pooled."""
        sent = [sum(p.sends for place in self.places for p in place.parts if p.rank == r) for r in range(self.ranks)]
        away = batch * (self.ranks - 1) / self.ranks
        return {"read_s": max(self.reads_on(r) for r in range(self.ranks)) * batch / machine.memory_bandwidth,
                "exchange_s": machine.send_seconds(max(sent) * away)}


def _uneven(loads: Sequence[float]) -> float:
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def place(tables: Sequence[TableLike], machine: Machine, storage: Storage | None = None,
          asked: Mapping[str, str] | None = None) -> Placement:
    """A place for every table. `asked` has the kind of those that must not be decided here."""
    storage, asked = storage or Storage(), asked or {}
    if not tables:
        raise PlacementError("no tables to place")
    load = _Loads(tables, machine, storage)
    fixed: dict[str, tuple[str, str]] = {}
    free: list[TableLike] = []
    for t in tables:
        kind = asked.get(t.name)
        if kind is None:
            free.append(t)
            continue
        if kind not in KINDS:
            raise PlacementError(f"table {t.name!r}: kind {kind!r} is none of {', '.join(KINDS)}")
        if kind != "table" and kind not in cuts(t, machine.ranks):
            raise PlacementError(f"table {t.name!r}: {t.rows} rows × {t.width} cannot be cut by {kind} over "
                                 f"{machine.ranks} ranks; use {' or '.join(['table', *cuts(t, machine.ranks)])}")
        fixed[t.name] = (kind, "asked for")
    # A load above the target's share of one rank can never be balanced whole; above its memory it cannot even be held.
    heavy = sorted((t for t in free if cuts(t, machine.ranks)), key=lambda t: (-load.share(t), t.name))
    must = sum(load.share(t) * machine.ranks > TARGET or load.size(t) > machine.usable_bytes for t in heavy)
    best: tuple[tuple[float, float], Placement] | None = None
    for count in _counts(must, len(heavy)):  # the last ones, below `must`, are for memory's sake alone
        cut = {t.name: (cuts(t, machine.ranks)[0], load.why(t)) for t in heavy[:count]}
        found = load.spread(fixed | cut)
        missing = max(0, max(found.bytes_on(r) for r in range(machine.ranks)) - machine.usable_bytes)
        score = (float(missing), max(found.balance))
        if best is None or score < best[0]:
            best = score, found
        if not missing and (score[1] <= TARGET or count < must):
            break
    assert best is not None
    missing = int(best[0][0])
    if missing:
        total, room = sum(load.size(t) for t in tables), machine.usable_bytes * machine.ranks
        if total > room:
            missing, where = total - room, f"in all; it takes {-(-total // machine.usable_bytes)} such ranks or more"
        else:
            where = "on the fullest rank; " + ("cut otherwise they may fit" if fixed else "cutting them does not help")
        raise DoesNotFit(
            f"{gb(total)} of tables and their state do not fit {machine.ranks} ranks of "
            f"{gb(machine.usable_bytes)} each ({gb(machine.memory_bytes)} less {machine.reserve:.0%} kept back): "
            f"{gb(missing)} missing {where}", missing)
    return best[1]


def cuts(t: TableLike, ranks: int) -> list[str]:
    """Ways in which a table can be cut over so many ranks, the better first."""
    if ranks == 1:
        return []
    return ["row"] * (t.rows >= ranks) + ["column"] * (_pieces(t, ranks) > 1)


def gb(count: float) -> str:
    """Bytes as accelerators' memories are sold."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def _counts(least: int, most: int) -> list[int]:
    """Numbers of tables to cut, fewest first, as a whole table needs the least exchange; then those below `least`."""
    steps, step = [least], 1
    while steps[-1] < most:
        steps.append(min(most, steps[-1] + step))
        step *= 2 if most > _ALL_TRIED else 1
    return [*steps, *range(least - 1, -1, -1)]


def part(storage: Storage, rank: int, rows: int, width: int, lookups: float) -> Part:
    """A part with what it costs; `lookups` are those that fall on its rows."""
    vector = storage.weights(1, width)
    return Part(rank=rank, rows=rows, width=width, bytes=storage.total(rows, width), reads=lookups * vector,
                sends=vector if rows else 0)


class _Loads:
    """The arithmetic for one set of tables on one machine."""

    def __init__(self, tables: Sequence[TableLike], machine: Machine, storage: Storage) -> None:
        self._tables, self._machine, self._storage = tables, machine, storage
        self._bytes = sum(self.size(t) for t in tables)
        self._reads = sum(self._read(t.lookups, t.width) for t in tables)

    def size(self, t: TableLike) -> int:
        return self._storage.total(t.rows, t.width)

    def _read(self, lookups: float, width: int) -> float:
        return lookups * self._storage.weights(1, width)

    def share(self, t: TableLike) -> float:
        """The larger of its parts of all bytes and of all reads."""
        reads = self._read(t.lookups, t.width) / self._reads if self._reads else 0.0
        return max(self.size(t) / self._bytes, reads)

    def why(self, t: TableLike) -> str:
        if self.size(t) > self._machine.usable_bytes:
            return f"larger than a rank's {gb(self._machine.usable_bytes)}"
        fair = self.share(t) * self._machine.ranks
        return f"{fair:.0%} of a rank's share" if fair > TARGET else "cut to balance the ranks"

    def spread(self, cut: Mapping[str, tuple[str, str]]) -> Placement:
        """The tables in `cut` as it says; all others whole, heaviest first, each where it hurts least."""
        ranks = range(self._machine.ranks)
        held, read = [0.0 for _ in ranks], [0.0 for _ in ranks]
        found: dict[str, Place] = {}

        def put(t: TableLike, kind: str, parts: Sequence[Part], why: str) -> None:
            for p in parts:
                held[p.rank] += p.bytes
                read[p.rank] += p.reads
            found[t.name] = Place(name=t.name, kind=kind, ranks=tuple(p.rank for p in parts), parts=tuple(parts),
                                  why=why)

        def rest(wanted: int, size: int, reads: float) -> list[int]:
            """The ranks where a part of this size and use leaves the smallest load; those with room first."""
            def after(r: int) -> tuple[bool, float, float, int]:
                b = (held[r] + size) / self._bytes
                q = (read[r] + reads) / self._reads if self._reads else 0.0
                return held[r] + size > self._machine.usable_bytes, max(b, q), b + q, r
            return sorted(sorted(ranks, key=after)[:wanted])

        for t in self._tables:
            if cut.get(t.name, ("", ""))[0] == "row":
                # As TorchRec cuts: equal blocks, the last one shorter.
                block = -(-t.rows // len(ranks))
                sizes = [max(0, min(block, t.rows - r * block)) for r in ranks]
                put(t, "row", [part(self._storage, r, n, t.width, t.lookups * n / t.rows) for r, n in enumerate(sizes)],
                    cut[t.name][1])
        for t in sorted(self._tables, key=lambda t: (-self.share(t), t.name)):
            kind, why = cut.get(t.name, ("table", "whole: on the least loaded rank"))
            if kind == "row":
                continue
            pieces = _pieces(t, len(ranks)) if kind == "column" else 1
            model = part(self._storage, 0, t.rows, t.width // pieces, t.lookups)
            put(t, kind, [part(self._storage, r, t.rows, t.width // pieces, t.lookups)
                          for r in rest(pieces, model.bytes, model.reads)], why)
        return Placement(places=tuple(found[t.name] for t in self._tables), ranks=len(ranks))

def _pieces(t: TableLike, ranks: int) -> int:
    """Into how many equal runs of columns a table can be cut, at most one a rank."""
    return max((n for n in range(1, ranks + 1) if not t.width % n and not t.width // n % MIN_COLUMNS), default=1)
