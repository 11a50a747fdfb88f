"""What a run takes of its machine, known before a model is made: `Footprint`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sluice.dlrm.model.item_history import with_item_table
from sluice.dlrm.model.ranker import TableLayout
from sluice.dlrm.model.towers import parameters_of
from sluice.dlrm.optim.schedule import RateSchedule
from sluice.dlrm.options import Config, ConfigError, profile_of, tables_of
from sluice.dlrm.sharding.apply import describe, placed, summary
from sluice.dlrm.sharding.machine import TrainingMachine
from sluice.dlrm.sharding.shard_sizes import ModelPlacement, Storage, step_traffic
from sluice.etl.table.table import FeatureTable
from sluice.ingest.knobs import format_bytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """The tables of a run, their places, and what they and a step cost."""

    layout: TableLayout
    placement: ModelPlacement
    parameters: int
    """The number of parameters of the dense layers."""
    state_bytes: int
    """The bytes of the tables' optimiser's state, on all ranks together."""
    gradient_bytes: int
    """The most bytes of gradients that a rank holds: of the dense layers, and three times of the vectors that its rows
    looked up, as the tower has them, by table and side by side (a test reads the real peak). A table's own gradient is
    used up within the backward pass. Only a table of which each rank has a copy has a gradient as large as itself."""
    bytes_per_step: int
    """The bytes that the busiest rank sends to others for a batch, forwards and backwards."""
    text: str
    """All this as a person reads it."""

    @classmethod
    def of(cls, config: Config, table: FeatureTable, machine: TrainingMachine) -> Footprint:
        """Places the tables, and counts. Raises what is wrong with the settings."""
        columns = tables_of(table.fields, config.model, profile_of(table))
        if config.optim.table_optimiser == "adam" and machine.device == "cpu":
            raise ConfigError(
                "table optimiser: 'adam' has no kernel for a CPU; use rowwise_adagrad, adagrad or sgd here"
            )
        dense = sum(f.role == "dense" for f in table.fields)
        for text in (config.optim.schedule, config.optim.dense_schedule):
            RateSchedule.read(text)
        layout = TableLayout(with_item_table(config.model, table), columns)
        placement = placed(config, layout.tables, machine)
        parameters = parameters_of(config.model, dense=dense, columns=len(layout.own))
        storage = Storage(optimiser=config.optim.table_optimiser)
        state = sum(storage.state(t.rows, t.width) for t in layout.tables)
        sent, sent_in_mean = step_traffic(
            placement,
            layout.tables,
            batch=config.batch_size,
            wire=config.wire,
            dense_parameters=parameters,
            vectors={name: len(keys) for name, keys in layout.keys.items()},
        )
        vectors = sum(t.width * len(layout.keys[t.name]) for t in layout.tables)
        copied = sum(
            t.bytes
            for t, p in zip(layout.tables, placement.places, strict=True)
            if p.kind == "data"
        )
        rows = config.batch_size // machine.ranks
        gradients = 4 * (parameters + 3 * rows * vectors) + copied
        of_copies = (
            f", {format_bytes(copied)} of it for the tables that every rank has a copy of"
            if copied
            else ""
        )
        held, read = placement.balance
        text = "\n".join(
            [
                describe(placement, layout.tables, machine),
                f"a rank holds at most {format_bytes(placement.most_bytes)} of tables and their state",
                (
                    f"largest over mean load of a rank: {held:.2f} in bytes, {read:.2f} in reads; a rank sends "
                    f"{format_bytes(sent)} a step, {format_bytes(sent_in_mean)} of it to average gradients"
                ),
                (
                    f"{config.model.kind}: {parameters:,} parameters in dense layers; "
                    f"{sum(t.rows * t.width for t in layout.tables):,} in tables, {format_bytes(state)} of "
                    f"{config.optim.table_optimiser} state"
                ),
                f"a rank needs at most {format_bytes(gradients)} for gradients{of_copies}",
            ]
        )
        return cls(layout, placement, parameters, state, gradients, sent, text)

    def to_dict(self) -> dict[str, Any]:
        return {
            "plan": summary(self.placement, self.layout.tables),
            "balance": list(self.placement.balance),
            "parameters": self.parameters,
            "state_bytes": self.state_bytes,
            "gradient_bytes": self.gradient_bytes,
            "bytes_per_step": self.bytes_per_step,
        }
