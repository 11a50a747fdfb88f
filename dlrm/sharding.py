"""Which rank holds which table, or which part of it: chosen by plain arithmetic, printed, stored, and applied.

Choosing (`place`) knows nothing of TorchRec; `shard` alone hands the result to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.config import SHARDINGS, ConfigError, Table
from ingest.knobs import format_bytes, nearest

if TYPE_CHECKING:
    import torch
    from torchrec.distributed.model_parallel import DistributedModelParallel

    from dlrm.world import World

KINDS = ("row", "table", "column")
# A table above this part of a rank's fair share is cut by rows: placed whole, it alone would unbalance the ranks.
BIG = 0.125
MIN_COLUMNS = 4  # the fused kernels want widths in fours


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one table lives."""

    table: Table
    kind: str
    """`row`: cut by rows; `table`: whole on one rank; `column`: cut by columns."""
    ranks: tuple[int, ...]
    why: str

    def bytes_on(self, rank: int) -> float:
        return self.table.bytes * self.ranks.count(rank) / len(self.ranks)

    def lookups_on(self, rank: int) -> float:
        """Row-wise, each id is looked up on one rank; column-wise, on all of them."""
        share = self.ranks.count(rank)
        return self.table.lookups * (share / len(self.ranks) if self.kind == "row" else share)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self.table), "bytes": self.table.bytes, "kind": self.kind, "ranks": list(self.ranks),
                "why": self.why}


def place(tables: Sequence[Table], ranks: int, how: str) -> tuple[Placement, ...]:
    """A place for every table: `how` is `auto`, `row`, `table`, `column`, or a JSON file of {column: kind}."""
    asked: Mapping[str, str] = {} if how in SHARDINGS else _read(how, tables)
    fair = sum(t.bytes for t in tables) / ranks
    total_bytes, total_lookups = sum(t.bytes for t in tables), sum(t.lookups for t in tables)
    everywhere = tuple(range(ranks))
    placed: dict[str, Placement] = {}
    whole: list[tuple[Table, str]] = []
    for t in tables:
        kind = how if how in KINDS else asked.get(t.name)
        why = "asked for"
        if kind is None:
            big = ranks > 1 and t.bytes > BIG * fair and t.rows >= ranks
            kind = "row" if big else "table"
            why = f"{t.bytes / fair:.0%} of a rank's share of bytes"
        if kind == "column" and (t.width % ranks or t.width // ranks < MIN_COLUMNS):
            raise ConfigError(f"column {t.name!r}: width {t.width} cannot be cut into {ranks} parts of {MIN_COLUMNS} "
                              "columns or more; use row or table")
        if kind == "row" and t.rows < ranks:
            raise ConfigError(f"column {t.name!r}: {t.rows} rows cannot be cut over {ranks} ranks; use table")
        if kind == "table":
            whole.append((t, why))
        else:
            placed[t.name] = Placement(table=t, kind=kind, ranks=everywhere, why=why)
    # The heaviest first, each to the rank with the least so far: bytes and lookups count the same.
    load = [sum(p.bytes_on(r) / total_bytes + p.lookups_on(r) / total_lookups for p in placed.values())
            for r in everywhere]
    for t, why in sorted(whole, key=lambda pair: (-pair[0].bytes, pair[0].name)):
        rank = min(everywhere, key=lambda r: (load[r], r))
        load[rank] += t.bytes / total_bytes + t.lookups / total_lookups
        placed[t.name] = Placement(table=t, kind="table", ranks=(rank,), why=f"{why}; least loaded rank")
    return tuple(placed[t.name] for t in tables)


def _read(path: str, tables: Sequence[Table]) -> dict[str, str]:
    try:
        asked = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"sharding: {path!r} is none of {', '.join(SHARDINGS)} and not a readable JSON file of "
                          f"{{column: kind}} ({error})") from None
    if not isinstance(asked, dict):
        raise ConfigError(f"sharding file {path}: not an object of {{column: kind}}")
    names = [t.name for t in tables]
    for name, kind in asked.items():
        if name not in names:
            raise ConfigError(f"sharding file {path}: no column {name!r}{nearest(name, names)}")
        if kind not in KINDS:
            raise ConfigError(f"sharding file {path}: column {name!r}: kind {kind!r}{nearest(str(kind), KINDS)}")
    return asked


def describe(placements: Sequence[Placement], ranks: int) -> str:
    """The plan as a person reads it."""
    rows = [("table", "rows", "width", "bytes", "kind", "ranks", "why")]
    for p in placements:
        where = str(p.ranks[0]) if len(p.ranks) == 1 else "all"
        rows.append((p.table.name, f"{p.table.rows:,}", str(p.table.width), format_bytes(p.table.bytes), p.kind, where,
                     p.why))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    left = (0, 4, 5)
    lines = ["  ".join([*(cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in
                          enumerate(zip(row, widths, strict=False))), row[6]]).rstrip() for row in rows]
    for r in range(ranks):
        lines.append(f"rank {r}: {format_bytes(sum(p.bytes_on(r) for p in placements))}, "
                     f"{sum(p.lookups_on(r) for p in placements):.3g} lookups a row")
    return "\n".join(lines)


def shard(model: torch.nn.Module, placements: Sequence[Placement], world: World) -> DistributedModelParallel:
    """The model with its tables distributed as placed, and its dense layers copied to every rank."""
    from torchrec import EmbeddingBagCollection
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    class Sharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
        """TorchRec lists row-wise for GPUs only; on a CPU it works too (a test holds it to the unsharded model)."""

        def sharding_types(self, compute_device_type: str) -> list[str]:
            return ["table_wise", "row_wise", "column_wise"]

    def generator(p: Placement) -> Any:
        if p.kind == "table":
            return table_wise(rank=p.ranks[0])
        return row_wise() if p.kind == "row" else column_wise(ranks=list(p.ranks))

    prefix, tables = next((n, m) for n, m in model.named_modules() if isinstance(m, EmbeddingBagCollection))
    plan = construct_module_sharding_plan(
        tables, {p.table.name: generator(p) for p in placements}, sharder=Sharder(),
        local_size=world.local_ranks, world_size=world.ranks, device_type=world.device.type)
    return DistributedModelParallel(
        model, env=ShardingEnv.from_process_group(world.group), device=world.device,
        plan=ShardingPlan(plan={prefix: plan}), sharders=[Sharder()])


def read_back(model: DistributedModelParallel) -> dict[str, str]:
    """Table → kind, as the sharded module itself has it."""
    found = {}
    for _, module_plan in model.plan.plan.items():
        for name, parameter in module_plan.items():
            found[name] = parameter.sharding_type.removesuffix("_wise")
    return found
