"""From settings to parts: the sharded model with its optimisers, and a loader under its host's agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper

from agent import policies
from agent.controller import Controller
from agent.host import HostMember, HostTunable
from dlrm.config import Config, Table
from dlrm.model import Ranker, first_weights
from dlrm.optim import dense_optimiser, fuse_tables
from dlrm.sharding import Placement, shard
from dlrm.world import World
from ingest.loader import Loader


def model_of(config: Config, tables: Sequence[Table], dense_columns: int, placements: Sequence[Placement],
             world: World) -> tuple[Any, KeyedOptimizerWrapper]:
    """The model with its first weights, spread over the ranks, and the optimiser of its dense layers."""
    torch.manual_seed(config.seed)  # the dense layers' weights, the same on every rank
    plain = Ranker(config.model, tables, dense_columns)
    fuse_tables(plain.dlrm.sparse_arch, config.optim)
    model = shard(plain, placements, world)
    first_weights(model, config.seed)
    return model, dense_optimiser(model, config.optim)


@contextmanager
def tuned(config: Config, loader: Loader, world: World, record: Callable[[Mapping[str, Any]], None],
          observe: Callable[[Mapping[str, Any]], None]) -> Iterator[Controller | None]:
    """The loader under its host's agent, for as long as the context lasts. The agent itself runs beside local rank 0;
    other ranks get None."""
    hosts = world.gather_objects(str(world.host))
    host = str(world.host)
    with HostMember(world.store.clone(), host, world.local_rank, loader):
        if world.local_rank:
            yield None
            return
        tunable = HostTunable(world.store.clone(), host, loader, ranks={h: hosts.count(h) for h in hosts})
        with Controller(tunable, policies.make(config.tuning), record=record, observe=observe) as controller:
            yield controller
