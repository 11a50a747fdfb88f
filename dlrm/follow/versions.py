"""Opens a version of a run's table. Also finds the next one, its rows to train on, and whether the run has trained on
its test rows."""

from __future__ import annotations

import os
from dataclasses import replace

from sluice.dlrm.checkpoint.meta import CheckpointMeta
from sluice.dlrm.foreign_table import open_table
from sluice.dlrm.options import Config
from sluice.etl.spec.permission import Permission
from sluice.etl.spec.row_identity import ACCEPT, SplitMoved
from sluice.etl.table.split_rows import SplitRows, trained_on
from sluice.etl.table.store import job_of
from sluice.etl.table.table import FeatureTable


def open_version(config: Config, version: int | None, permission: Permission) -> FeatureTable:
    """Opens a version of a run's table, with the columns that the run adds. None: the newest."""
    return config.changed_table(
        open_table(
            config.data,
            version,
            spec=config.spec,
            allow_code=permission,
            transforms=config.transforms,
        )
    )


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
