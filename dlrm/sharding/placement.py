"""Places tables, or parts of them, on ranks. It computes with sizes and use alone, without torch.

A table is placed whole (`table`), cut by rows over all ranks (`row`), or cut by columns over some (`column`). Each rank
has two loads: the bytes that it holds, and the bytes that it reads for one sample. Tables that cannot be whole are cut
first. The others follow, the heaviest first, each on the rank where it adds least to the largest load. While the ranks
are out of balance, the next heaviest table is cut too. A copy on each rank (`data`) must be asked for. If the
accelerators' memory is too small, the largest tables move to the hosts' memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sluice.dlrm.lookup_frequencies import share
from sluice.dlrm.options import COPIED, Table
from sluice.dlrm.sharding import shard_sizes
from sluice.dlrm.sharding.machine import TrainingMachine
from sluice.dlrm.sharding.shard_sizes import (
    DoesNotFit,
    ModelPlacement,
    PlacementError,
    Storage,
    TablePlacement,
    TableShard,
    gb,
)

TARGET = 1.1  # largest over mean load of a rank that a placement should reach
MIN_COLUMNS = 4  # the fused kernels take widths in fours
_WHOLE = "whole: on the least loaded rank"
_ALL_TRIED = 64
"""Up to this number of tables each number of cuts is tried; beyond it, numbers that double."""


def place(
    tables: Sequence[Table],
    machine: TrainingMachine,
    storage: Storage | None = None,
    asked: Mapping[str, str] | None = None,
) -> ModelPlacement:
    """Places every table. `asked` gives KIND or KIND:KERNEL for tables whose kind is not chosen here."""
    storage, asked = storage or Storage(), asked or {}
    if not tables:
        raise PlacementError("no tables to place")
    fixed: dict[str, tuple[str, str]] = {}
    kernel_of: dict[str, str] = {}
    for t in tables:
        if t.name not in asked:
            continue
        kind, _, kernel = asked[t.name].partition(":")
        if problem := _find_problem(t, kind, kernel, machine, storage):
            raise PlacementError(f"table {t.name!r}: {problem}")
        fixed[t.name] = (kind, "asked for")
        if kernel:
            kernel_of[t.name] = kernel
    load = _Loads(tables, machine, storage, {**kernel_of})
    free = [t for t in tables if t.name not in fixed]
    placement, missing = _fitted(load, machine, fixed, free)
    if not missing:
        return placement
    largest = sorted(
        (t for t in tables if t.name not in kernel_of), key=lambda t: (-load.size(t), t.name)
    )
    if machine.device == "cuda" and machine.host_memory_bytes:
        for t in largest:
            load.kernels[t.name] = "uvm_caching"  # this moves its bytes to the hosts' memory
            spilled, left = _fitted(load, machine, fixed, free)
            if max(spilled.loads("host_bytes")) > machine.host_memory_bytes:
                break
            if not left:
                return spilled
    total, usable = load.bytes, machine.usable_bytes * machine.ranks
    if total > usable:
        missing = total - usable
        where = f"in all; it takes {-(-total // machine.usable_bytes)} such ranks or more"
    elif fixed:
        where = "on the fullest rank; cut otherwise they may fit"
    else:
        where = "on the fullest rank; cutting them does not help"
    raise DoesNotFit(
        f"{gb(total)} of tables and their state do not fit {machine.ranks} ranks of "
        f"{gb(machine.usable_bytes)} each ({gb(machine.memory_bytes)} less {machine.reserve:.0%} kept back): "
        f"{gb(missing)} missing {where}",
        missing,
    )


def _find_problem(
    t: Table, kind: str, kernel: str, machine: TrainingMachine, storage: Storage
) -> str | None:
    """Returns why a table cannot be placed in this way, or None."""
    ranks = machine.ranks
    if kernel and kind == COPIED:
        return f"{kind} has no choice of kernels; leave out {kernel!r}"
    if machine.device == "cpu" and (kernel or "fused") not in shard_sizes.ANYWHERE:
        return f"kernel {kernel!r} is for GPUs: a CPU has no other memory"
    if kind == COPIED and (storage.dtype != "fp32" or storage.optimiser == "adam"):
        return (
            "copies on all ranks are trained in fp32 by rowwise_adagrad, adagrad or sgd alone, not in "
            f"{storage.dtype} by {storage.optimiser}; use table"
        )
    if kind in ("row", "column") and kind not in cuts(t, ranks):
        return (
            f"{t.rows} rows × {t.width} cannot be cut by {kind} over {ranks} ranks; use "
            f"{' or '.join(['table', *cuts(t, ranks)])}"
        )
    return None


def _fitted(
    load: _Loads,
    machine: TrainingMachine,
    fixed: Mapping[str, tuple[str, str]],
    free: Sequence[Table],
) -> tuple[ModelPlacement, int]:
    """Returns the best balanced placement that fits, and 0; or the one that lacks the least memory, and the missing
    bytes."""
    # A table whose load exceeds one rank's share cannot be balanced whole. One beyond its memory cannot be held.
    heavy = sorted(
        (t for t in free if cuts(t, machine.ranks)), key=lambda t: (-load.share(t), t.name)
    )
    must = sum(
        load.share(t) * machine.ranks > TARGET or load.size(t) > machine.usable_bytes for t in heavy
    )
    best: tuple[tuple[float, float], ModelPlacement] | None = None
    for count in _counts(must, len(heavy)):  # The last ones, below `must`, only save memory.
        cut = {t.name: (cuts(t, machine.ranks)[0], load.why(t)) for t in heavy[:count]}
        placement = load.spread({**fixed, **cut})
        missing = max(0, placement.most_bytes - machine.usable_bytes)
        score = (float(missing), max(placement.balance))
        if best is None or score < best[0]:
            best = score, placement
        if not missing and (score[1] <= TARGET or count < must):
            break
    assert best is not None
    return best[1], int(best[0][0])


def cuts(t: Table, ranks: int) -> list[str]:
    """Returns the kinds by which a table can be cut over the ranks, the better one first."""
    if ranks == 1:
        return []
    return ["row"] * (t.rows >= ranks) + ["column"] * (_pieces(t, ranks) > 1)


def _counts(least: int, most: int) -> list[int]:
    """Returns the numbers of tables to cut, in the order in which to try them: from `least` up, because whole tables
    need the least exchange; then those below `least`."""
    steps, step = [least], 1
    while steps[-1] < most:
        steps.append(min(most, steps[-1] + step))
        step *= 2 if most > _ALL_TRIED else 1
    return [*steps, *range(least - 1, -1, -1)]


@dataclass(eq=False)
class _Loads:
    """Computes the loads of one set of tables on one machine."""

    tables: Sequence[Table]
    machine: TrainingMachine
    storage: Storage
    kernels: dict[str, str]
    """Table → its kernel, if that is not the fused one."""

    def __post_init__(self) -> None:
        self.bytes = sum(self.storage.total(t.rows, t.width) for t in self.tables)
        self._reads = sum(self._read(t.lookups, t.width) for t in self.tables)

    def kernel(self, t: Table) -> str:
        return self.kernels.get(t.name, "fused")

    def size(self, t: Table) -> int:
        """Returns the bytes of a table in the ranks' own memory."""
        return shard_sizes.split(self.storage.total(t.rows, t.width), self.kernel(t))[0]

    def part(self, t: Table, rank: int, rows: int, width: int, lookups: float) -> TableShard:
        """Returns a part with what it costs; `lookups` are those that fall on its rows."""
        total = self.storage.total(rows, width)
        device, host = shard_sizes.split(total, self.kernel(t))
        return TableShard(
            rank=rank,
            rows=rows,
            width=width,
            bytes=device,
            host_bytes=host,
            reads=self._read(lookups, width),
        )

    def _read(self, lookups: float, width: int) -> float:
        return lookups * self.storage.weights(1, width)

    def share(self, t: Table) -> float:
        """Returns a table's share of all bytes, or of all reads if that is larger."""
        reads = self._read(t.lookups, t.width) / self._reads if self._reads else 0.0
        return max(self.size(t) / self.bytes, reads)

    def why(self, t: Table) -> str:
        if self.kernel(t) == "uvm_caching":
            return "spilled to the hosts' memory"
        if self.size(t) > self.machine.usable_bytes:
            return f"larger than a rank's {gb(self.machine.usable_bytes)}"
        fair = self.share(t) * self.machine.ranks
        return f"{fair:.0%} of a rank's share" if fair > TARGET else "cut to balance the ranks"

    def spread(self, cut: Mapping[str, tuple[str, str]]) -> ModelPlacement:
        """Places the tables in `cut` as it says, and all others whole. Heavy tables come first. Each goes where it adds
        least to the largest load."""
        kinds = {
            t.name: cut.get(t.name, ("table", self.why(t) if t.name in self.kernels else _WHOLE))
            for t in self.tables
        }
        # The ranks of the other tables depend on the loads of these.
        on_all_ranks = [t for t in self.tables if kinds[t.name][0] in ("row", COPIED)]
        by_share = sorted(self.tables, key=lambda t: (-self.share(t), t.name))
        ranks = self.machine.ranks
        held, read = [0.0] * ranks, [0.0] * ranks
        places = {}
        for t in (*on_all_ranks, *by_share):
            if t.name in places:
                continue
            kind, why = kinds[t.name]
            parts = self._cut(t, kind, held, read)
            for p in parts:
                held[p.rank] += p.bytes
                read[p.rank] += p.reads
            places[t.name] = TablePlacement(
                name=t.name,
                kind=kind,
                ranks=tuple(p.rank for p in parts),
                parts=tuple(parts),
                why=why,
                kernel=self.kernel(t),
            )
        return ModelPlacement(places=tuple(places[t.name] for t in self.tables), ranks=ranks)

    def _cut(
        self, t: Table, kind: str, held: Sequence[float], read: Sequence[float]
    ) -> list[TableShard]:
        """Returns a table's parts. `held` and `read` are the ranks' loads so far."""
        ranks = len(held)
        if kind == "row":
            # As TorchRec cuts: into equal blocks, the last one shorter.
            block = -(-t.rows // ranks)
            ends = [min(t.rows, n * block) for n in range(ranks + 1)]
            return [
                self.part(t, r, high - low, t.width, t.lookups * share(t.use, t.rows, low, high))
                for r, (low, high) in enumerate(pairwise(ends))
            ]
        if kind == COPIED:
            copy = self.part(t, 0, t.rows, t.width, t.lookups / ranks)
            return [replace(copy, rank=r) for r in range(ranks)]
        pieces = _pieces(t, ranks) if kind == "column" else 1
        piece = self.part(t, 0, t.rows, t.width // pieces, t.lookups)

        def load_with_piece(r: int) -> tuple[bool, float, float, int]:
            b = (held[r] + piece.bytes) / self.bytes
            q = (read[r] + piece.reads) / self._reads if self._reads else 0.0
            return held[r] + piece.bytes > self.machine.usable_bytes, max(b, q), b + q, r

        least_loaded = sorted(range(ranks), key=load_with_piece)[:pieces]
        return [replace(piece, rank=r) for r in sorted(least_loaded)]


def _pieces(t: Table, ranks: int) -> int:
    """Returns the largest number of equal parts by columns, at most one a rank."""
    return max(
        (n for n in range(1, ranks + 1) if not t.width % n and not t.width // n % MIN_COLUMNS),
        default=1,
    )
