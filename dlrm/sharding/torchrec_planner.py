"""The placement that TorchRec's own planner would choose, as a `ModelPlacement`, so that the two can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sluice.dlrm.sharding.machine import TrainingMachine
from sluice.dlrm.sharding.shard_sizes import (
    ModelPlacement,
    PlacementError,
    Storage,
    TableLike,
    TablePlacement,
    part,
)

_STATES = ("rowwise_adagrad",)  # the optimisers that its arithmetic can take into account here


def propose(
    tables: Sequence[TableLike],
    machine: TrainingMachine,
    *,
    batch_size: int,
    storage: Storage | None = None,
) -> ModelPlacement:
    """TorchRec's plan for these tables on this machine, each with its mean number of lookups. Float32 weights only."""
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import (
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.planner.types import PlannerError
    from torchrec.optim import RowWiseAdagrad
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    storage = storage or Storage()
    if storage.dtype != "fp32" or storage.optimiser not in _STATES:
        raise PlacementError(
            f"TorchRec's planner is asked for fp32 and {_STATES[0]} only, not {storage.dtype} and "
            f"{storage.optimiser}"
        )

    class Sharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
        """Offers the kinds that this trainer can apply, on a CPU too."""

        def sharding_types(self, compute_device_type: str) -> list[str]:
            return ["table_wise", "row_wise", "column_wise"]

        def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
            return ["fused"]

    collection = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=t.name, feature_names=[t.name], num_embeddings=t.rows, embedding_dim=t.width
            )
            for t in tables
        ],
    )
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.01})
    device, a_ms = machine.device, 1000  # its bandwidths are bytes a millisecond
    topology = Topology(
        world_size=machine.ranks,
        local_world_size=min(machine.ranks, machine.ranks_per_host),
        compute_device=device,
        hbm_cap=machine.memory_bytes if device == "cuda" else 0,
        ddr_cap=machine.host_memory_bytes if device == "cuda" else machine.memory_bytes,
        hbm_mem_bw=machine.memory_bandwidth / a_ms,
        ddr_mem_bw=machine.memory_bandwidth / a_ms,
        intra_host_bw=machine.host_bandwidth / a_ms,
        inter_host_bw=machine.network_bandwidth / a_ms,
    )
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=-(-batch_size // machine.ranks),
        storage_reservation=FixedPercentageStorageReservation(machine.reserve),
        constraints={t.name: ParameterConstraints(pooling_factors=[t.lookups]) for t in tables},
    )
    try:
        plan = planner.plan(collection, [Sharder()])
    except PlannerError as error:
        raise PlacementError(
            f"TorchRec's planner found no plan: {str(error).strip().splitlines()[0]}"
        ) from None
    module: Any = next(iter(plan.plan.values()))
    return ModelPlacement(
        places=tuple(_place(t, module[t.name], storage) for t in tables), ranks=machine.ranks
    )


def _place(t: TableLike, found: Any, storage: Storage) -> TablePlacement:
    parts = []
    for shard in found.sharding_spec.shards:
        rows, width = shard.shard_sizes
        parts.append(
            part(storage, shard.placement.rank(), rows, width, lookups=t.lookups * rows / t.rows)
        )
    return TablePlacement(
        name=t.name,
        kind=found.sharding_type.removesuffix("_wise"),
        ranks=tuple(p.rank for p in parts),
        parts=tuple(parts),
        why="TorchRec's planner",
    )
