"""Finds the next version of a run's table, and the `StartPoint` from which the run continues on it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from sluice.dlrm.checkpoint.meta import CheckpointMeta
from sluice.dlrm.follow.table_diff import TableDiff, between
from sluice.dlrm.options import (
    Config,
    ConfigError,
    ModelConfig,
)
from sluice.etl.spec.permission import NOTHING, Permission
from sluice.etl.spec.row_identity import ACCEPT, SplitMoved
from sluice.etl.table.data_files import job_of
from sluice.etl.table.split_rows import SplitRows, trained_on
from sluice.etl.table.table import FeatureTable


def view(table: FeatureTable, follow: str) -> FeatureTable:
    """Returns the table with the rows to train on: all rows, or with --follow parts only those that the version
    added."""
    if follow != "parts":
        return table
    new_jobs = {job for job, record in table.records.items() if record.version == table.version}
    return replace(
        table,
        files=tuple(
            f for f in table.files if job_of(os.path.relpath(f.path, table.uri)) in new_jobs
        ),
    )


def epochs_of(config: Config, meta: CheckpointMeta) -> int:
    """Returns the epoch at which training on one version ends. With --follow parts, each part is trained on once."""
    if config.follow != "parts":
        return config.epochs
    finished = bool(meta.loader) and not meta.loader["step"]
    return meta.epoch + (not finished)


def next_version(config: Config, meta: CheckpointMeta) -> int | None:
    """Returns the version to train on next. None: the run is within an epoch, or there is no newer version."""
    if not config.follow or not meta.loader or meta.loader["step"]:
        return None
    if config.follow == "epochs" and meta.epoch >= config.epochs:
        return None
    newest = FeatureTable.open(config.data).version
    if newest <= meta.version:
        return None
    return newest if config.follow == "epochs" else meta.version + 1


def seen_in(
    table: FeatureTable, meta: CheckpointMeta, split_moved: str, *, split: str | None = None
) -> str:
    """Returns a warning if a run has trained on rows of a table's test splits, or of `split`. Raises `SplitMoved`
    unless `split_moved` is `accept`."""
    where = f"version {table.version} of {table.uri}"
    try:
        seen = trained_on(meta.seen(), SplitRows.of(table.records.values()))
        rows = (seen.of(split) if split else seen).text
        warning = (
            f"{where}: {rows} were trained on, so that what is measured there means nothing"
            if rows
            else ""
        )
    except SplitMoved as unknown:
        warning = f"{where}: {unknown}"
    if warning and split_moved != "accept":
        raise SplitMoved(
            f"{warning}; begin another run on it, go on with a version before, or accept it with {ACCEPT}"
        )
    return warning


def start_on(
    run: Path,
    checkpoint: Path,
    meta: CheckpointMeta,
    version: int,
    *,
    split_moved: str = "refuse",
    allow_code: Permission = NOTHING,
) -> StartPoint:
    """Returns the start for continuing from a checkpoint on another version of its table."""
    config = Config.from_dict(meta.config)
    before, after = (
        config.changed_table(
            FeatureTable.open(
                config.data, number, allow_code=allow_code, transforms=config.transforms
            )
        )
        for number in (meta.version, version)
    )
    seen = seen_in(after, meta, split_moved)
    changes = between(before, after)
    new_config = replace(
        config,
        version=version,
        model=_model(config.model, changes),
        slices=tuple(name for name in config.slices if name not in changes.dropped),
    )
    return StartPoint(
        run=run,
        config=new_config,
        table=view(after, new_config.follow),
        meta=meta.following(after, new_config.to_dict()),
        resume=checkpoint,
        go_on=True,
        before=meta,
        changes=changes,
        split_moved=split_moved,
        seen=seen,
    )


def _model(model: ModelConfig, changes: TableDiff) -> ModelConfig:
    """Returns the model's settings without those of dropped columns."""
    for name in (model.history, model.target):
        if name and name in changes.dropped:
            raise ConfigError(
                f"version {changes.after} of the table has no column {name!r}, which {model.kind} reads; "
                "train another model on it, or go on without --follow"
            )
    return replace(
        model,
        compress={
            column: kind for column, kind in model.compress.items() if column not in changes.dropped
        },
        bags={column: kind for column, kind in model.bags.items() if column not in changes.dropped},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPoint:
    """Where and how a run starts. It is known before a process joins the other ranks."""

    run: Path
    config: Config
    table: FeatureTable
    meta: CheckpointMeta
    """The progress of the run: none, or that of the checkpoint in `resume`."""
    resume: Path | None
    go_on: bool
    """Whether the run continues in an existing run folder."""
    pause: int | None = None
    """The number of evaluations after which the run saves and ends."""
    preempt_s: float = 20.0
    """The time that the run has after SIGTERM to save."""
    before: CheckpointMeta | None = None
    """The checkpoint's meta, if `meta` is on a newer version of the table."""
    changes: TableDiff | None = None
    """The differences between the table of `before` and that of `meta`."""
    split_moved: str = "refuse"
    """Whether the run may go on with a version whose tests it has trained on."""
    seen: str = ""
    """A warning about test rows that were trained on, if that was accepted."""
    chosen: str = ""
    """A text about the settings that followed from the number of rows. Empty in a resumed run."""
