"""What is saved of a run, and resumed: `TrainingRun`. `open_run` finds it for a command line, at the run's beginning or
at its newest checkpoint, and `follow` moves it to another version of its table."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from sluice.common.settings import Given, make
from sluice.dlrm.checkpoint.meta import LATEST, CheckpointError, CheckpointMeta, latest
from sluice.dlrm.follow import versions
from sluice.dlrm.follow.table_diff import TableDiff, between
from sluice.dlrm.foreign_table import ForeignTable, open_table
from sluice.dlrm.model.item_history import with_item_table
from sluice.dlrm.options import (
    Config,
    ConfigError,
    ModelConfig,
    profile_of,
    spread_out,
    tables_of,
)
from sluice.dlrm.session.defaults import defaults, describe_defaults
from sluice.dlrm.start_options import StartOptions, fresh, resumed
from sluice.etl.spec.code_options import CodeOptions
from sluice.etl.spec.permission import Permission
from sluice.etl.table.table import FeatureTable
from sluice.ingest.read.petastorm.request import PetastormRequest
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


def open_run(given: Given, version: int | None = None) -> TrainingRun:
    """Returns where the run starts: at its beginning, or at its newest checkpoint. `version`: on this version of the
    table, which another rank has chosen."""
    options = make(StartOptions, given)
    saved = (options.run / "checkpoints" / LATEST).exists()
    if options.resume and not saved and "data" not in given:
        raise CheckpointError(
            f"{options.run}: holds no checkpoint to go on from; give --data, too, to begin a run "
            "there"
        )
    request = make(PetastormRequest, given)
    permission = make(CodeOptions, given).permission_with(
        given.get("transforms", ()), request.functions.values()
    )
    if options.goes_on and saved:
        return _resume(given, options, permission, version)
    if "data" not in given:
        raise ConfigError("--data is missing: which feature table to train on")
    if version is not None:
        given = {**given, "version": version}
    return _start_new(given, options, permission)


def _resume(
    given: Given, options: StartOptions, permission: Permission, version: int | None
) -> TrainingRun:
    """Starts at the newest checkpoint: with the next version of the table if there is one, else with the same one."""
    path, meta = latest(options.run / "checkpoints")
    config = resumed(meta.config, given, ranks=_ranks(options))
    meta = replace(meta, config=config.to_dict())
    if config.spec and _own_spec(given) not in ("", config.spec):
        raise ConfigError(
            f"{given['own_spec']}: the run has another spec, and its rows and columns stay; leave out --spec, or begin "
            "another run"
        )
    if version is None:
        version = versions.next_version(config, meta)
    if version is not None and version != meta.version:
        return follow(options, path, meta, version, permission)
    table = config.changed_table(
        open_table(
            config.data,
            config.version,
            spec=config.spec,
            allow_code=permission,
            transforms=config.transforms,
        )
    )
    meta.check(table)
    return TrainingRun(
        options=options,
        config=config,
        table=versions.view(table, config.follow),
        meta=meta,
        checkpoint=path,
        seen=versions.seen_in(table, meta, options.split_moved),
    )


def _start_new(given: Given, options: StartOptions, permission: Permission) -> TrainingRun:
    """Starts at the beginning of the table's newest version. A run over all parts starts with the oldest version."""
    first_version = 0 if given.get("follow") == "parts" else None
    table = open_table(
        given["data"],
        given.get("version", first_version),
        spec=_own_spec(given),
        allow_code=permission,
        transforms=given.get("transforms", ()),
    )
    rows = versions.view(table, given.get("follow", "")).rows_of("train")
    chosen = defaults(rows, given.get("streams", STREAMS))
    config = fresh(
        {**chosen, **given},
        data=table.uri,
        version=table.version,
        spec=_own_spec(given) if isinstance(table, ForeignTable) else "",
        ranks=_ranks(options),
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


def _own_spec(given: Given) -> str:
    return Path(given["own_spec"]).read_text("utf-8") if "own_spec" in given else ""


def _ranks(options: StartOptions) -> int:
    return options.ranks or int(os.environ.get("WORLD_SIZE", "1"))


def follow(
    options: StartOptions,
    checkpoint: Path,
    meta: CheckpointMeta,
    version: int,
    permission: Permission,
) -> TrainingRun:
    """Returns the run that continues from a checkpoint on another version of its table."""
    config = Config.from_dict(meta.config)
    before, after = (
        config.changed_table(
            FeatureTable.open(
                config.data, number, allow_code=permission, transforms=config.transforms
            )
        )
        for number in (meta.version, version)
    )
    seen = versions.seen_in(after, meta, options.split_moved)
    changes = between(before, after)
    new_config = replace(
        config,
        version=version,
        model=_model(config.model, changes),
        slices=tuple(name for name in config.slices if name not in changes.dropped),
    )
    return TrainingRun(
        options=options,
        config=new_config,
        table=versions.view(after, new_config.follow),
        meta=meta.following(after, new_config.to_dict()),
        checkpoint=checkpoint,
        changes=changes,
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
