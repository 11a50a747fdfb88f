"""From settings to parts: the sharded model with its optimisers, loaders, and the agent over one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper

from agent import policies
from agent.controller import Controller
from agent.host import HostMember, HostTunable
from dlrm.config import Config, ConfigError, Table
from dlrm.model import Ranker, first_weights
from dlrm.optim import dense_optimiser, fuse_tables
from dlrm.sharding import Placement, shard
from dlrm.world import World
from etl.table import FeatureTable
from ingest.loader import Loader, LoaderError
from ingest.machine import Machine


def model_of(config: Config, tables: Sequence[Table], dense_columns: int, placements: Sequence[Placement],
             world: World) -> tuple[Any, KeyedOptimizerWrapper]:
    """The model with its first weights, spread over the ranks, and the optimiser of its dense layers."""
    torch.manual_seed(config.seed)  # the dense layers' weights, the same on every rank
    plain = Ranker(config.model, tables, dense_columns)
    fuse_tables(plain.dlrm.sparse_arch, config.optim)
    model = shard(plain, placements, world)
    first_weights(model, config.seed)
    return model, dense_optimiser(model, config.optim)


def training_loader(config: Config, table: FeatureTable, world: World) -> Loader:
    """This rank's batches of the train split, with the knobs that were asked for."""
    loader = _loader(config, table, world, split="train", epochs=config.epochs, seed=config.seed)
    try:
        loader.apply(loader.knobs.parse(config.knobs))
    except BaseException:
        loader.close()
        raise
    return loader


def evaluation_loader(config: Config, table: FeatureTable, split: str, world: World) -> Loader:
    """This rank's part of every row of a split; its last batch is filled up with rows of weight 0."""
    return _loader(config, table, world, split=split, shuffle=False, last="pad")


def _loader(config: Config, table: FeatureTable, world: World, **how: Any) -> Loader:
    # A machine's memory is shared by its ranks.
    limit = Machine().memory_limit() // world.local_ranks if config.memory_limit is None else config.memory_limit
    try:
        return Loader(table, batch_size=config.batch_size, rank=world.rank, ranks=world.ranks, memory_limit=limit,
                      reader=config.reader, **how)
    except LoaderError as error:
        raise ConfigError(str(error)) from None


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
