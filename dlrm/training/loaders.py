"""The trainer's loaders, made from its settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sluice.agent.runtime.knob_memory import KnobMemory
from sluice.dlrm.options import Config, ConfigError
from sluice.etl.table.table import FeatureTable
from sluice.ingest.loader import BatchLoader, LoaderError
from sluice.ingest.machine import Machine
from sluice.ingest.read.petastorm.options import PetastormOptions
from sluice.ingest.read.petastorm.request import ON_EVERY_SPLIT
from sluice.ingest.run_conditions import RunConditions
from sluice.ingest.stages.quarantine import Errors

# The loaders' share of a machine's memory; the rest is for tables, dense layers and their gradients.
LOADERS_PART = 0.5


def conditions(config: Config, run: Path, rank: int, local_ranks: int = 1) -> RunConditions:
    """How a rank's training treats bad rows, remote stores and injected faults. All ranks of a host are children of
    torchrun's agent there."""
    return RunConditions(
        config.data,
        config.conditions,
        run / f"quarantine.rank{rank}.jsonl",
        launcher=os.getppid() if local_ranks > 1 else None,
    )


def training(
    config: Config, table: FeatureTable, *, rank: int, local_ranks: int, conditions: RunConditions
) -> BatchLoader:
    """The loader of a rank's batches of the train split."""
    return _loader(
        config,
        table,
        rank,
        local_ranks,
        split="train",
        epochs=config.epochs,
        seed=config.seed,
        last=config.last,
        sample=config.sample or None,
        petastorm=config.petastorm_options(table.permission),
        **conditions.for_loader(),
    )


def knob_memory(
    config: Config, loader: BatchLoader, local_ranks: int, say: Callable[[str], None]
) -> KnobMemory:
    """Remembers the loader's knobs: where they start and where they are kept, as the settings say."""
    return KnobMemory(loader, config, say=say, ranks=local_ranks)


def evaluation(
    config: Config, table: FeatureTable, split: str, *, rank: int, local_ranks: int
) -> BatchLoader:
    """The loader of a rank's part of a split, which passes every row once; the last batch is padded with rows of weight
    0."""
    return _loader(
        config,
        table,
        rank,
        local_ranks,
        split=split,
        shuffle=False,
        last="pad",
        petastorm=config.petastorm_options(table.permission, ON_EVERY_SPLIT),
    )


def _loader(
    config: Config,
    table: FeatureTable,
    rank: int,
    local_ranks: int,
    petastorm: PetastormOptions,
    **how: Any,
) -> BatchLoader:
    # A machine's memory is shared by its ranks.
    limit = config.memory_limit
    if limit is None:
        limit = int(Machine().memory_limit() * LOADERS_PART) // local_ranks
    errors = replace(
        how.pop("errors", Errors()), finite=False
    )  # the trainer looks itself, as --missing says
    spec = petastorm.transform_spec
    try:
        return BatchLoader(
            table,
            batch_size=config.batch_size,
            rank=rank,
            ranks=config.ranks,
            memory_limit=limit,
            reader=config.reader,
            transforms=[] if spec is None else [spec],
            petastorm=replace(petastorm, transform_spec=None),
            streams=config.streams,
            window_rows=config.window_rows,
            errors=errors,
            **how,
        )
    except LoaderError as error:
        raise ConfigError(str(error)) from None
