"""Makes the trainer's loaders from its settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sluice.dlrm.foreign_table import ForeignTable
from sluice.dlrm.options import Config, ConfigError
from sluice.etl.table.table import FeatureTable
from sluice.ingest.cache.made_rows import CachePlace, place_of
from sluice.ingest.choices import Errors
from sluice.ingest.errors import LoaderError
from sluice.ingest.loader import BatchLoader
from sluice.ingest.machine import Machine
from sluice.ingest.read.sources import Reading
from sluice.ingest.row_order import Order
from sluice.ingest.run_conditions import RunConditions


def conditions(config: Config, run: Path, rank: int) -> RunConditions:
    """Returns how a rank's training treats bad rows, remote stores and injected faults."""
    return RunConditions(config.data, config.conditions, run / f"quarantine.rank{rank}.jsonl")


def training(
    config: Config, table: FeatureTable, *, rank: int, local_ranks: int, conditions: RunConditions
) -> BatchLoader:
    """Returns the loader of a rank's batches of the train split."""
    return _loader(
        config,
        table,
        rank,
        local_ranks,
        split="train",
        order=Order(last=config.last),
        read_ahead_epochs=config.epochs,
        seed=config.seed,
        cache=_cache(config, tells=rank == 0),
        **conditions.settings(config.reader),
    )


def evaluation(
    config: Config,
    table: FeatureTable,
    split: str,
    *,
    rank: int,
    local_ranks: int,
    in_training: bool = False,
) -> BatchLoader:
    """Returns the loader of a rank's part of a split, for evaluation. Every row comes once. The last batch is padded
    with rows of weight 0. Only evaluations of a training use its cache."""
    return _loader(
        config,
        table,
        rank,
        local_ranks,
        split=split,
        order=Order(shuffle=False, last="pad"),
        reading=Reading(reader=config.reader),
        cache=_cache(config, tells=False) if in_training else None,
    )


def _cache(config: Config, *, tells: bool) -> CachePlace | None:
    place = place_of(config.cache, config.cache_limit, config.epochs)
    return place and replace(place, tells=tells)


def _loader(
    config: Config,
    table: FeatureTable,
    rank: int,
    local_ranks: int,
    *,
    order: Order,
    reading: Reading,
    errors: Errors = Errors(),
    **options: Any,
) -> BatchLoader:
    limit = config.memory_limit
    if limit is None:
        # A machine's ranks share half of its memory. The rest is for tables, dense layers and their gradients.
        limit = Machine().memory_limit() // 2 // local_ranks
    if config.model.events:  # the loader itself adds this column
        stored = tuple(f for f in table.fields if f.name != config.model.history_column)
        table = replace(table, fields=stored)
    try:
        return BatchLoader(
            table.source if isinstance(table, ForeignTable) else table,
            batch_size=config.batch_size,
            rank=rank,
            ranks=config.ranks,
            memory_limit=limit,
            cores=config.cores,
            order=replace(order, streams=config.streams, window_rows=config.window_rows),
            reading=reading,
            history=config.model.events,
            errors=replace(errors, finite=False),  # the trainer checks this itself (`BatchChecker`)
            **options,
        )
    except LoaderError as error:
        raise ConfigError(str(error)) from None
