"""`TrainingRun`: what is saved of a run, and resumed: settings, position, version of its table, and weights. `open_run`
finds it for a command line, at the run's beginning or at its newest checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from sluice.common.settings import Given, make
from sluice.dlrm.checkpoint.meta import (
    LATEST,
    CheckpointError,
    CheckpointMeta,
    best,
    is_evaluated,
    latest,
)
from sluice.dlrm.follow import versions
from sluice.dlrm.follow.table_diff import TableDiff, between
from sluice.dlrm.foreign_table import ForeignTable, open_table
from sluice.dlrm.model.item_history import with_item_table
from sluice.dlrm.options import (
    Config,
    ConfigError,
    ModelConfig,
    StartOptions,
    profile_of,
    resumed,
    spread_out,
    tables_of,
)
from sluice.dlrm.session.defaults import defaults, describe_defaults
from sluice.etl.spec.code_options import CodeOptions
from sluice.etl.spec.permission import Permission
from sluice.etl.table.table import FeatureTable
from sluice.ingest.row_order import STREAMS


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A run on one version of its table. It is known before a process joins the other ranks."""

    options: StartOptions
    config: Config
    table: FeatureTable
    meta: CheckpointMeta
    """The progress of the run: none, or that of `checkpoint`."""
    checkpoint: Path | None = None
    """The folder that holds its weights. None: it has not begun."""
    changes: TableDiff | None = None
    """The differences between the checkpoint's table and that of `meta`, if `meta` is on a newer version."""
    seen: str = ""
    """A warning about test rows that were trained on, if that was accepted."""
    chosen: str = ""
    """A text about the settings that followed from the number of rows. Empty in a resumed run."""

    @property
    def folder(self) -> Path:
        return self.options.run

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def on_version(self, version: int) -> TrainingRun:
        """Returns the run that continues from its newest checkpoint on another version of its table."""
        config, (path, meta) = self.config, latest(self.checkpoints)
        table = versions.open_version(config, version, self.table.permission)
        changes = between(self.table, table)
        config = replace(
            config,
            version=version,
            model=_model(config.model, changes),
        )
        return replace(
            self,
            config=config,
            table=versions.view(table, config.follow),
            checkpoint=path,
            meta=meta.following(table, config.to_dict()),
            changes=changes,
            seen=versions.seen_in(table, meta, self.options.split_moved),
        )


def _model(model: ModelConfig, changes: TableDiff) -> ModelConfig:
    """Returns the model's settings without those of dropped columns."""
    gone = changes.dropped
    for name in (model.history, model.target):
        if name and name in gone:
            raise ConfigError(
                f"version {changes.after} of the table has no column {name!r}, which {model.kind} reads; "
                "train another model on it, or go on without --follow"
            )
    return replace(model, spread=tuple(name for name in model.spread if name not in gone))


def open_run(given: Given, version: int | None = None) -> TrainingRun:
    """Returns the run of a command line. `version`: on this version of the table, which another rank has chosen."""
    options = make(StartOptions, given)
    saved = (options.run / "checkpoints" / LATEST).exists()
    if options.resume and not saved and "data" not in given:
        raise CheckpointError(
            f"{options.run}: holds no checkpoint to go on from; give --data, too, to begin a run there"
        )
    permission = make(CodeOptions, given).permission_with(given.get("transforms", ()))
    own_spec = Path(given["own_spec"]).read_text("utf-8") if "own_spec" in given else ""
    ranks = options.ranks or int(os.environ.get("WORLD_SIZE", "1"))
    if options.goes_on and saved:
        return _resume(given, options, permission, own_spec, ranks=ranks, version=version)
    if "data" not in given:
        raise ConfigError("--data is missing: which feature table to train on")
    # A run over all parts starts with the oldest version, and any other with the newest.
    first_version = 0 if given.get("follow") == "parts" else None
    table = open_table(
        given["data"],
        given.get("version", first_version) if version is None else version,
        spec=own_spec,
        allow_code=permission,
        transforms=given.get("transforms", ()),
    )
    rows = versions.view(table, given.get("follow", "")).rows_of("train")
    config = make(
        Config,
        {**defaults(rows, given.get("streams", STREAMS)), **given},
        data=table.uri,
        version=table.version,
        spec=own_spec if isinstance(table, ForeignTable) else "",
        ranks=ranks,
    )
    table = config.changed_table(table)
    columns = tables_of(table.fields, config.model, profile_of(table))
    config = replace(config, model=with_item_table(spread_out(config.model, columns), table))
    return TrainingRun(
        options=options,
        config=config,
        table=versions.view(table, config.follow),
        meta=CheckpointMeta.of(table, config.to_dict()),
        chosen=describe_defaults(rows, given),
    )


def _resume(
    given: Given,
    options: StartOptions,
    permission: Permission,
    own_spec: str,
    *,
    ranks: int,
    version: int | None,
) -> TrainingRun:
    """Returns the run at its newest checkpoint: on the next version of the table if there is one, else on the same
    one. A checkpoint that is not evaluated stays on its version, on which its evaluation is made up."""
    path, meta = latest(options.run / "checkpoints")
    best(path.parent)  # raises an error if BEST is damaged
    evaluated = is_evaluated(path)
    config = resumed(meta.config, given, ranks=ranks)
    if config.spec and own_spec not in ("", config.spec):
        raise ConfigError(
            f"{given['own_spec']}: the run has another spec, and its rows and columns stay; leave out --spec, or begin "
            "another run"
        )
    table = versions.open_version(config, config.version, permission)
    run = TrainingRun(
        options=options,
        config=config,
        table=versions.view(table, config.follow),
        meta=replace(meta, config=config.to_dict()),
        checkpoint=path,
    )
    if version is None and (evaluated or "validation" not in table.splits):
        version = versions.next_version(config, meta)
    if version not in (None, meta.version):
        return run.on_version(version)
    meta.check(table)
    return replace(run, seen=versions.seen_in(table, meta, options.split_moved))
