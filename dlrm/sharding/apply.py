"""Makes a placement of tables on the ranks from the settings, and TorchRec's sharded model from a placement.

`sluice.dlrm.sharding.placement` works out what goes where; `shard` alone hands its result to TorchRec.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.dlrm.options import (
    COPIED,
    SHARDING_KINDS,
    SHARDINGS,
    Config,
    ConfigError,
    Table,
)
from sluice.dlrm.sharding import shard_sizes
from sluice.dlrm.sharding.machine import TrainingMachine
from sluice.dlrm.sharding.placement import cuts, place
from sluice.dlrm.sharding.shard_sizes import ModelPlacement, Storage, TablePlacement, gb
from sluice.ingest.knobs import nearest

if TYPE_CHECKING:
    import torch
    from torchrec.distributed.model_parallel import DistributedModelParallel

    from sluice.dlrm.ranks import Ranks


def placed(config: Config, tables: Sequence[Table], machine: TrainingMachine) -> ModelPlacement:
    """Finds a place for every table of a run; PlacementError if they do not fit, or cannot be cut as the settings
    say."""
    storage = Storage(dtype=config.model.table_dtype, optimiser=config.optim.table_optimiser)
    return place(tables, machine, storage, asked(config.sharding, tables, machine.ranks))


def asked(how: str, tables: Sequence[Table], ranks: int) -> dict[str, str]:
    """Returns the kind that `--sharding` demands of each table: none (`auto`), one kind for all, or a JSON file of
    {table: kind} or {table: kind:kernel}. With one kind for all, tables too small to be cut stay whole."""
    if how == "auto":
        return {}
    if how in SHARDING_KINDS:
        return {t.name: how if how in cuts(t, ranks) else "table" for t in tables}
    try:
        kinds = json.loads(Path(how).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"sharding: {how!r} is none of {', '.join(SHARDINGS)} and not a readable JSON file of "
            f"{{table: kind}} ({error})"
        ) from None
    if not isinstance(kinds, dict):
        raise ConfigError(f"sharding file {how}: not an object of {{table: kind}}")
    names = [t.name for t in tables]
    for name, kind in kinds.items():
        if name not in names:
            raise ConfigError(f"sharding file {how}: no table {name!r}{nearest(name, names)}")
        bare, colon, kernel = str(kind).partition(":")
        for what, word, known in (
            ("kind", bare, (*SHARDING_KINDS, COPIED)),
            ("kernel", kernel if colon else "fused", tuple(shard_sizes.NAMES)),
        ):
            if word not in known:
                raise ConfigError(
                    f"sharding file {how}: table {name!r}: {what} {word!r}{nearest(word, known)}"
                )
    return {
        name: ":".join(["table", *kind.split(":")[1:]]) if ranks == 1 else kind
        for name, kind in kinds.items()
    }


def describe(placement: ModelPlacement, tables: Sequence[Table], machine: TrainingMachine) -> str:
    """Returns the plan as text."""
    rows = [("table", "rows", "width", "bytes", "rank", "kind", "why")]
    for p, t in zip(placement.places, tables, strict=True):
        where = "all" if len(p.ranks) == machine.ranks > 1 else ",".join(map(str, p.ranks))
        kind = p.kind if p.kernel == "fused" else f"{p.kind}:{p.kernel}"
        rows.append((p.name, f"{t.rows:,}", str(t.width), gb(p.bytes), where, kind, p.why))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    return "\n".join(
        "  ".join(
            [
                *(
                    cell.rjust(w) if i in (1, 2, 3) else cell.ljust(w)
                    for i, (cell, w) in enumerate(zip(row[:6], widths, strict=True))
                ),
                row[6],
            ]
        )
        for row in rows
    )


def summary(placement: ModelPlacement, tables: Sequence[Table]) -> list[dict[str, Any]]:
    """Returns the plan as a dict, for the run folder."""
    return [
        {
            "name": p.name,
            "rows": t.rows,
            "width": t.width,
            "lookups": t.lookups,
            "bytes": p.bytes,
            "kind": p.kind,
            "kernel": p.kernel,
            "ranks": list(p.ranks),
            "why": p.why,
        }
        for p, t in zip(placement.places, tables, strict=True)
    ]


def shard(
    model: torch.nn.Module,
    placement: ModelPlacement,
    world: Ranks,
    *,
    optimiser: Mapping[str, Any],
    wire: str = "fp32",
) -> DistributedModelParallel:
    """Returns the model with its tables distributed by the placement, and its dense layers copied to every rank.
    `optimiser` has TorchRec's settings for the tables that the backward pass updates."""
    from torchrec import EmbeddingBagCollection
    from torchrec.distributed.fbgemm_qcomm_codec import (
        CommType,
        QCommsConfig,
        get_qcomm_codecs_registry,
    )
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    codecs = None
    if wire == "fp16" and world.ranks > 1:
        half = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
        codecs = get_qcomm_codecs_registry(half, device=world.device)
    sharder = _sharder(codecs, optimiser)
    prefix, tables = next(
        (n, m) for n, m in model.named_modules() if isinstance(m, EmbeddingBagCollection)
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(world.group),
        device=world.device,
        plan=ShardingPlan(plan={prefix: torchrecs_plan(tables, placement, world, sharder)}),
        sharders=[sharder],
    )


def _sharder(codecs: Any = None, optimiser: Mapping[str, Any] | None = None) -> Any:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    class Sharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
        """TorchRec lists some kinds for GPUs alone; on a CPU they work, too (a test compares each with the unsharded
        model)."""

        def sharding_types(self, compute_device_type: str) -> list[str]:
            return ["table_wise", "row_wise", "column_wise", "data_parallel"]

    return Sharder(fused_params=optimiser, qcomm_codecs_registry=codecs)


def torchrecs_plan(
    tables: torch.nn.Module, placement: ModelPlacement, world: Ranks, sharder: Any = None
) -> Any:
    """Returns a placement as TorchRec's plan."""
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        data_parallel,
        row_wise,
        table_wise,
    )

    def generator(p: TablePlacement) -> Any:
        if p.kind == COPIED:
            return data_parallel()
        kernel = shard_sizes.NAMES[p.kernel]
        if p.kind == "table":
            return table_wise(rank=p.ranks[0], compute_kernel=kernel)
        return (
            row_wise(compute_kernel=kernel)
            if p.kind == "row"
            else column_wise(ranks=list(p.ranks), compute_kernel=kernel)
        )

    return construct_module_sharding_plan(
        tables,
        {p.name: generator(p) for p in placement.places},
        sharder=sharder or _sharder(),
        local_size=world.local_ranks,
        world_size=world.ranks,
        device_type=world.device.type,
    )
