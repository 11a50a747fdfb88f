"""From settings to parts: the sharded model with its optimisers, and a loader under its host's agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.optim.keyed import KeyedOptimizerWrapper

from agent import policies
from agent.controller import Controller
from agent.host import HostMember, HostTunable
from agent.keeping import Keeping
from dlrm.config import Config
from dlrm.model import Layout, Ranker, first_weights
from dlrm.optim import Rates, dense_optimiser, dense_parameters, fuse_tables
from dlrm.places import Placement
from dlrm.sharding import shard
from dlrm.world import World
from ingest.loader import Loader


@dataclass(frozen=True, slots=True)
class Parts:
    """A model on its ranks, and what trains it."""

    layout: Layout
    model: Any
    """TorchRec's DistributedModelParallel around a Ranker."""
    dense: KeyedOptimizerWrapper
    dense_parameters: Mapping[str, nn.Parameter]
    rates: Rates


def parts_of(config: Config, layout: Layout, dense_columns: int, placement: Placement, world: World, *,
             steps_per_epoch: int = 1) -> Parts:
    """The model with its first weights, spread over the ranks, and its optimisers."""
    torch.manual_seed(config.seed)  # the dense layers' weights, the same on every rank
    plain = Ranker(config.model, layout, dense_columns, decay=config.optim.table_decay)
    fuse_tables(plain.tables, config.optim)
    model = shard(plain, placement, world, wire=config.wire)
    first_weights(model, config.seed, layout.compressor.starts)
    dense = dense_optimiser(model, config.optim)
    return Parts(layout, model, dense, dense_parameters(model), Rates(model, dense, config.optim, steps_per_epoch))


@contextmanager
def tuned(config: Config, loader: Loader, world: World, kept: Keeping, *, record: Callable[[Mapping[str, Any]], None],
          observe: Callable[[Mapping[str, Any]], None], agent: Mapping[str, Any]) -> Iterator[Controller | None]:
    """The loader under its host's agent, for as long as the context lasts; what that came to is kept. `agent` is what
    a checkpoint has of it, which counts where the place is the same; elsewhere it is what the registry has. It runs
    beside local rank 0; other ranks get None."""
    hosts = world.gather_objects(str(world.host))
    host = str(world.host)
    member = HostMember(world.store.clone(), host, world.local_rank, loader)
    if world.local_rank:
        with member:
            yield None
        return
    member.step()  # the agent's first look finds something, and its last comes after the member's last word
    ranks = HostTunable(world.store.clone(), host, loader, ranks={h: hosts.count(h) for h in hosts})
    policy = policies.make(config.tuning)
    same = all(agent.get(name) == value for name, value in _place(kept).items())
    with (kept.sharing(ranks) as tunable,
          Controller(tunable, policy, record=kept.told(record), observe=kept.told(observe),
                     learned=agent["learned"] if same else kept.learned) as controller, member):
        yield controller
    kept.end(policy=policy.name, record=record, learned=controller.learned())


def agent_of(controller: Controller | None, kept: Keeping) -> dict[str, Any]:
    """For a checkpoint: what the agent has learned, and where."""
    return {} if controller is None else {**_place(kept), "learned": controller.learned()}


def _place(kept: Keeping) -> dict[str, str]:
    return {"machine": kept.here.machine, "schema": kept.here.schema}
