"""Makes the trainer's parts from the settings: the sharded model, its optimisers, and a loader tuned by the agent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from sluice.agent import policies
from sluice.agent.controller import Controller
from sluice.agent.runtime.host_ranks import HostMember, HostTunable
from sluice.agent.runtime.knob_memory import KnobMemory
from sluice.agent.tunable import Tunable
from sluice.common.lines import say
from sluice.dlrm.model.ranker import Ranker, TableLayout, first_weights
from sluice.dlrm.optim.build import (
    copied_tables,
    dense_optimiser,
    dense_parameters,
    fused_optimiser,
)
from sluice.dlrm.optim.copied_tables import CopiedTables
from sluice.dlrm.optim.schedule import LearningRates, RateSchedule
from sluice.dlrm.optim.torch_tables import replace_tables
from sluice.dlrm.options import Config
from sluice.dlrm.ranks import Ranks
from sluice.dlrm.sharding.apply import shard
from sluice.dlrm.sharding.shard_sizes import ModelPlacement
from sluice.dlrm.telemetry.journal import Journal
from sluice.ingest.loader import BatchLoader


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """A model on its ranks, with its optimisers and learning rates."""

    layout: TableLayout
    model: Any
    """TorchRec's DistributedModelParallel around a Ranker."""
    copied: CopiedTables
    """The optimiser of the tables that every rank has a copy of."""
    dense: KeyedOptimizerWrapper
    dense_parameters: Mapping[str, nn.Parameter]
    rates: LearningRates

    @property
    def table_states(self) -> CombinedOptimizer:
        """The optimiser states of all tables, by name."""
        return CombinedOptimizer([self.model.fused_optimizer, self.copied])

    def update(self) -> None:
        """Updates the weights that the backward pass itself does not update."""
        self.copied.step()
        self.dense.step()


def parts_of(
    config: Config,
    layout: TableLayout,
    dense_columns: int,
    placement: ModelPlacement,
    world: Ranks,
) -> TrainingParts:
    """Makes the model with its first weights, sharded over the ranks, and its optimisers."""
    torch.manual_seed(config.seed)  # the dense layers' weights, the same on every rank
    plain = Ranker(
        config.model,
        layout,
        dense_columns,
        decay=config.optim.table_decay,
    )
    model = shard(
        plain, placement, world, optimiser=fused_optimiser(config.optim), wire=config.wire
    )
    first_weights(model, config.seed)
    in_torch = replace_tables(model, config.seed)
    copied, dense = copied_tables(model, config.optim), dense_optimiser(model, config.optim)
    rates, dense_rates = (
        RateSchedule.read(text) for text in (config.optim.schedule, config.optim.dense_schedule)
    )
    return TrainingParts(
        layout,
        model,
        copied,
        dense,
        dense_parameters(model),
        LearningRates(
            [(model.fused_optimizer, rates), (copied, rates), (dense, dense_rates)], in_torch
        ),
    )


@contextmanager
def tuned(
    config: Config,
    loader: BatchLoader,
    world: Ranks,
    knob_memory: KnobMemory,
    journal: Journal,
    *,
    agent: Mapping[str, Any],
) -> Iterator[Controller | None]:
    """Returns a context in which the host's agent tunes the loader. At its end it stores what the agent has learned.

    The agent runs in local rank 0 and tunes the loaders of all ranks of the host. Other ranks get None. `agent` is what
    a checkpoint stores of an earlier agent. It is used only on the same machine. If the schema is the same, it takes
    precedence over the registry. Otherwise it is used if the registry has nothing. Stages that no longer exist are left
    out."""
    loading: Tunable = loader.tunable
    member: AbstractContextManager[Any] = nullcontext()
    if world.ranks > 1:
        hosts, host = world.gather_objects(str(world.host)), str(world.host)
        member = HostMember(
            world.store.clone(),
            host,
            world.local_rank,
            loader.tunable,
            tell=lambda text: say(f"rank {world.rank}: {text}"),
        )
        if world.local_rank:
            with member:
                yield None
            return
        member.step()  # reports once, so that the agent finds this rank's counters at its start
        loading = HostTunable(
            world.store.clone(), host, loader.tunable, ranks={h: hosts.count(h) for h in hosts}
        )
    policy = policies.make(config.tuning)
    origin = _origin(knob_memory)
    earlier = agent["learned"] if agent.get("machine") == origin["machine"] else None
    if earlier is None or (agent["schema"] != origin["schema"] and knob_memory.learned is not None):
        earlier = knob_memory.learned
    elif agent["schema"] != origin["schema"]:
        earlier = {**earlier, "settled": False}  # its final knobs were for another schema
    with (
        Controller(
            loading,
            policy,
            record=knob_memory.observing(journal.event),
            observe=knob_memory.observing(journal.metric),
            looks=journal.looks,
            learned=earlier,
        ) as controller,
        member,
    ):
        yield controller
    knob_memory.finish(policy=policy.name, learned=controller.learned())


def agent_of(controller: Controller | None, knob_memory: KnobMemory) -> dict[str, Any]:
    """Returns what the agent has learned, with the machine and the schema, for a checkpoint."""
    return {} if controller is None else {**_origin(knob_memory), "learned": controller.learned()}


def _origin(knob_memory: KnobMemory) -> dict[str, str]:
    return {"machine": knob_memory.context.machine, "schema": knob_memory.context.schema}
