"""Which rank holds which table, or which part of it: plain arithmetic over sizes and use, without torch.

A table is placed whole (`table`), cut by rows over all ranks (`row`), or cut by columns over some (`column`). Two loads
count on each rank: the bytes that it holds, and the bytes that it reads for one sample. First, tables that cannot be
whole are cut; the rest go, heaviest first, each to the rank where it hurts least; while the ranks are out of balance,
the next heaviest table is cut too. Two more kinds are placed if they are asked for: by rows over one host's ranks
(`table_row`), and a copy on each rank (`data`). What does not fit the accelerators' memory spills to their hosts',
the largest tables first, if the machine has any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sluice.dlrm.lookup_frequencies import share
from sluice.dlrm.options import ASKED_SHARDING_KINDS, SHARDING_KINDS, ModelConfig, Table
from sluice.dlrm.sharding import shard_sizes
from sluice.dlrm.sharding.machine import TrainingMachine
from sluice.dlrm.sharding.shard_sizes import (
    DoesNotFit,
    ModelPlacement,
    PlacementError,
    Storage,
    TableLike,
    TablePlacement,
    TableShard,
    gb,
    part,
)

TARGET = 1.1  # largest over mean load of a rank that a placement should reach
_SPREAD_ROWS = 10_000  # a smaller table is seldom cut
MIN_COLUMNS = 4  # the fused kernels take widths in fours
_WHOLE = "whole: on the least loaded rank"
_ALL_TRIED = 64  # up to so many tables each number of cuts is tried; beyond, numbers that double


def place(
    tables: Sequence[TableLike],
    machine: TrainingMachine,
    storage: Storage | None = None,
    asked: Mapping[str, str] | None = None,
) -> ModelPlacement:
    """Finds a place for every table. `asked` has KIND or KIND:KERNEL for those that are not to be decided here."""
    storage, asked = storage or Storage(), dict(asked or {})
    if not tables:
        raise PlacementError("no tables to place")
    fixed, kernel_of = _asked(tables, machine, storage, asked)
    load = _Loads(tables, machine, storage, kernel_of)
    free = [t for t in tables if t.name not in fixed]
    found, missing = _fitted(load, machine, fixed, free)
    if not missing:
        return found
    largest = sorted(
        (t for t in tables if t.name not in kernel_of), key=lambda t: (-load.size(t), t.name)
    )
    if machine.device == "cuda" and machine.host_memory_bytes:
        for t in largest:
            load.spill(t.name)
            spilled, left = _fitted(load, machine, fixed, free)
            if (
                max(spilled.host_bytes_on(r) for r in range(machine.ranks))
                > machine.host_memory_bytes
            ):
                break
            if not left:
                return spilled
    raise _does_not_fit(load, machine, missing, bool(fixed))


def _asked(
    tables: Sequence[TableLike],
    machine: TrainingMachine,
    storage: Storage,
    asked: Mapping[str, str],
) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """Table → (kind, why), and table → kernel, for the tables in `asked`."""
    kinds, chosen = {}, {}
    for t in tables:
        if t.name not in asked:
            continue
        kind, _, kernel = asked[t.name].partition(":")
        if kind not in (*SHARDING_KINDS, *ASKED_SHARDING_KINDS):
            raise PlacementError(
                f"table {t.name!r}: kind {kind!r} is none of "
                f"{', '.join((*SHARDING_KINDS, *ASKED_SHARDING_KINDS))}"
            )
        if kernel and kernel not in shard_sizes.DEVICE_PART:
            raise PlacementError(
                f"table {t.name!r}: kernel {kernel!r} is none of {', '.join(shard_sizes.DEVICE_PART)}"
            )
        if kernel and kind in ASKED_SHARDING_KINDS:
            raise PlacementError(
                f"table {t.name!r}: {kind} has no choice of kernels; leave out {kernel!r}"
            )
        if machine.device == "cpu" and (kernel or "fused") not in shard_sizes.ANYWHERE:
            raise PlacementError(
                f"table {t.name!r}: kernel {kernel!r} is for GPUs: a CPU has no other memory"
            )
        if kind == "data" and (storage.dtype != "fp32" or storage.optimiser == "adam"):
            raise PlacementError(
                f"table {t.name!r}: copies on all ranks are trained in fp32 by rowwise_adagrad, "
                f"adagrad or sgd alone, not in {storage.dtype} by {storage.optimiser}; use table"
            )
        if kind in ("row", "column") and kind not in cuts(t, machine.ranks):
            raise PlacementError(
                f"table {t.name!r}: {t.rows} rows × {t.width} cannot be cut by {kind} over "
                f"{machine.ranks} ranks; use {' or '.join(['table', *cuts(t, machine.ranks)])}"
            )
        if kind == "table_row" and (
            machine.ranks % machine.ranks_per_host or t.rows < machine.ranks_per_host
        ):
            raise PlacementError(
                f"table {t.name!r}: {t.rows} rows cannot be cut over the {machine.ranks_per_host} "
                f"ranks of a host, of {machine.ranks} in all"
            )
        kinds[t.name] = (kind, "asked for")
        if kernel:
            chosen[t.name] = kernel
    return kinds, chosen


def _fitted(
    load: _Loads,
    machine: TrainingMachine,
    fixed: Mapping[str, tuple[str, str]],
    free: Sequence[TableLike],
) -> tuple[ModelPlacement, int]:
    """The best balanced placement that fits, or else the one that lacks the least memory; and the bytes that it
    lacks."""
    # A load above the target's share of one rank can never be balanced whole; above its memory it cannot even be held.
    heavy = sorted(
        (t for t in free if cuts(t, machine.ranks)), key=lambda t: (-load.share(t), t.name)
    )
    must = sum(
        load.share(t) * machine.ranks > TARGET or load.size(t) > machine.usable_bytes for t in heavy
    )
    best: tuple[tuple[float, float], ModelPlacement] | None = None
    for count in _counts(
        must, len(heavy)
    ):  # the last ones, below `must`, are for memory's sake alone
        cut = {t.name: (cuts(t, machine.ranks)[0], load.why(t)) for t in heavy[:count]}
        found = load.spread({**fixed, **cut})
        missing = max(
            0, max(found.bytes_on(r) for r in range(machine.ranks)) - machine.usable_bytes
        )
        score = (float(missing), max(found.balance))
        if best is None or score < best[0]:
            best = score, found
        if not missing and (score[1] <= TARGET or count < must):
            break
    assert best is not None
    return best[1], int(best[0][0])


def _does_not_fit(load: _Loads, machine: TrainingMachine, missing: int, fixed: bool) -> DoesNotFit:
    total, room = load.bytes, machine.usable_bytes * machine.ranks
    if total > room:
        missing, where = (
            total - room,
            f"in all; it takes {-(-total // machine.usable_bytes)} such ranks or more",
        )
    else:
        where = "on the fullest rank; " + (
            "cut otherwise they may fit" if fixed else "cutting them does not help"
        )
    return DoesNotFit(
        f"{gb(total)} of tables and their state do not fit {machine.ranks} ranks of "
        f"{gb(machine.usable_bytes)} each ({gb(machine.memory_bytes)} less {machine.reserve:.0%} kept back): "
        f"{gb(missing)} missing {where}",
        missing,
    )


def cuts(t: TableLike, ranks: int) -> list[str]:
    """The ways in which a table can be cut over so many ranks, the better one first."""
    if ranks == 1:
        return []
    return ["row"] * (t.rows >= ranks) + ["column"] * (_pieces(t, ranks) > 1)


def _counts(least: int, most: int) -> list[int]:
    """Numbers of tables to cut that are to be tried: from `least` up, as whole tables need the least exchange; then
    those below `least`."""
    steps, step = [least], 1
    while steps[-1] < most:
        steps.append(min(most, steps[-1] + step))
        step *= 2 if most > _ALL_TRIED else 1
    return [*steps, *range(least - 1, -1, -1)]


class _Loads:
    """The arithmetic for one set of tables on one machine."""

    def __init__(
        self,
        tables: Sequence[TableLike],
        machine: TrainingMachine,
        storage: Storage,
        kernel_of: Mapping[str, str],
    ) -> None:
        self._tables = tables
        self._machine = machine
        self._storage = storage
        self._kernels = dict(kernel_of)
        self.bytes = sum(storage.total(t.rows, t.width) for t in tables)
        self._reads = sum(self._read(t.lookups, t.width) for t in tables)

    def kernel(self, t: TableLike) -> str:
        return self._kernels.get(t.name, "fused")

    def spill(self, name: str) -> None:
        """Moves this table's bytes to the hosts' memory."""
        self._kernels[name] = "uvm_caching"

    def size(self, t: TableLike) -> int:
        """The bytes that a table takes of the ranks' own memory."""
        return shard_sizes.split(self._storage.total(t.rows, t.width), self.kernel(t))[0]

    def part(self, t: TableLike, rank: int, rows: int, width: int, lookups: float) -> TableShard:
        return part(self._storage, rank, rows, width, lookups=lookups, kernel=self.kernel(t))

    def _read(self, lookups: float, width: int) -> float:
        return lookups * self._storage.weights(1, width)

    def share(self, t: TableLike) -> float:
        """A table's share of all bytes, or of all reads if that is larger."""
        reads = self._read(t.lookups, t.width) / self._reads if self._reads else 0.0
        return max(self.size(t) / self.bytes, reads)

    def why(self, t: TableLike) -> str:
        if self.kernel(t) == "uvm_caching":
            return "spilled to the hosts' memory"
        if self.size(t) > self._machine.usable_bytes:
            return f"larger than a rank's {gb(self._machine.usable_bytes)}"
        fair = self.share(t) * self._machine.ranks
        return f"{fair:.0%} of a rank's share" if fair > TARGET else "cut to balance the ranks"

    def spread(self, cut: Mapping[str, tuple[str, str]]) -> ModelPlacement:
        """Places the tables in `cut` as it says, and all others whole, the heaviest first, each where it adds least to
        the largest load."""
        ranks = range(self._machine.ranks)
        held, read = [0.0 for _ in ranks], [0.0 for _ in ranks]
        found: dict[str, TablePlacement] = {}

        def put(t: TableLike, kind: str, parts: Sequence[TableShard], why: str) -> None:
            for p in parts:
                held[p.rank] += p.bytes
                read[p.rank] += p.reads
            found[t.name] = TablePlacement(
                name=t.name,
                kind=kind,
                ranks=tuple(p.rank for p in parts),
                parts=tuple(parts),
                why=why,
                kernel=self.kernel(t),
            )

        def rest(wanted: int, size: int, reads: float) -> list[int]:
            """The ranks where a part of this size and use leaves the smallest load; those with room first."""

            def after(r: int) -> tuple[bool, float, float, int]:
                b = (held[r] + size) / self.bytes
                q = (read[r] + reads) / self._reads if self._reads else 0.0
                return held[r] + size > self._machine.usable_bytes, max(b, q), b + q, r

            return sorted(sorted(ranks, key=after)[:wanted])

        def by_rows(t: TableLike, over: Sequence[int]) -> list[TableShard]:
            # Cuts as TorchRec does: into equal blocks, the last one shorter.
            block = -(-t.rows // len(over))
            ends = [min(t.rows, n * block) for n in range(len(over) + 1)]
            return [
                self.part(t, r, high - low, t.width, t.lookups * share(t.use, t.rows, low, high))
                for r, low, high in zip(over, ends[:-1], ends[1:], strict=True)
            ]

        for t in self._tables:
            kind, why = cut.get(t.name, ("", ""))
            if kind == "row":
                put(t, kind, by_rows(t, ranks), why)
            elif kind == "data":
                put(
                    t,
                    kind,
                    [
                        replace(self.part(t, r, t.rows, t.width, t.lookups / len(ranks)), sends=0)
                        for r in ranks
                    ],
                    why,
                )
        for t in sorted(self._tables, key=lambda t: (-self.share(t), t.name)):
            kind, why = cut.get(
                t.name, ("table", self.why(t) if t.name in self._kernels else _WHOLE)
            )
            if kind in ("row", "data"):
                continue
            if kind == "table_row":
                each = self._machine.ranks_per_host
                first = min(range(0, len(ranks), each), key=lambda h: sum(held[h : h + each]))
                put(t, kind, by_rows(t, range(first, first + each)), why)
                continue
            pieces = _pieces(t, len(ranks)) if kind == "column" else 1
            model = self.part(t, 0, t.rows, t.width // pieces, t.lookups)
            put(
                t,
                kind,
                [
                    self.part(t, r, t.rows, t.width // pieces, t.lookups)
                    for r in rest(pieces, model.bytes, model.reads)
                ],
                why,
            )
        return ModelPlacement(places=tuple(found[t.name] for t in self._tables), ranks=len(ranks))


def _pieces(t: TableLike, ranks: int) -> int:
    """The largest number of equal runs of columns that a table can be cut into, at most one a rank."""
    return max(
        (n for n in range(1, ranks + 1) if not t.width % n and not t.width // n % MIN_COLUMNS),
        default=1,
    )


def spread_out(model: ModelConfig, tables: Sequence[Table]) -> ModelConfig:
    """Returns the model with `spread` for each large table whose first eighth gets more than a quarter of the lookups,
    unless something else was chosen. A run decides this when it begins and keeps it, as it says where a row lies."""
    decided = (*model.compress, model.history)
    chosen = {
        table.name: "spread"
        for table in tables
        if table.rows >= _SPREAD_ROWS
        and table.name not in decided
        and share(table.use, table.rows, 0, table.rows // 8) > 0.25
    }
    return replace(model, compress={**model.compress, **chosen}) if chosen else model
