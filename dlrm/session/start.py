"""Finds where a run starts, from its command line, table and checkpoint, and checks the run before it trains."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sluice.agent.report import run_folder
from sluice.agent.report.run_folder import RunError
from sluice.agent.runtime.knob_memory import KnobMemory
from sluice.common.settings import Given, make
from sluice.dlrm.checkpoint.meta import LATEST, CheckpointError, CheckpointMeta, latest
from sluice.dlrm.follow import versions
from sluice.dlrm.follow.versions import StartPoint
from sluice.dlrm.foreign_table import ForeignTable, open_table
from sluice.dlrm.model.item_history import with_item_table
from sluice.dlrm.options import ConfigError, profile_of, spread_out, tables_of
from sluice.dlrm.session.defaults import defaults, describe_defaults
from sluice.dlrm.session.early_warnings import early_warnings, left_out
from sluice.dlrm.start_options import StartOptions, fresh, resumed
from sluice.dlrm.training.input_checks import check_files
from sluice.etl.spec.code_options import CodeOptions
from sluice.etl.spec.permission import Permission
from sluice.ingest.read.petastorm.request import PetastormRequest
from sluice.ingest.row_order import STREAMS


def start_point(given: Given, version: int | None = None) -> StartPoint:
    """Returns where the run starts: at its beginning, or at its newest checkpoint. `version`: on this version of the
    table, which another rank has chosen."""
    options = make(StartOptions, given)
    # torchrun restarts all ranks after one of them died. They continue from the newest checkpoint.
    go_on = options.resume or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
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
    if go_on and saved:
        return _resume(given, options, permission, version)
    if "data" not in given:
        raise ConfigError("--data is missing: which feature table to train on")
    if version is not None:
        given = {**given, "version": version}
    return _start_new(given, options, request, permission, go_on=go_on)


def _resume(
    given: Given, options: StartOptions, permission: Permission, version: int | None
) -> StartPoint:
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
        start = versions.start_on(
            options.run,
            path,
            meta,
            version,
            split_moved=options.split_moved,
            allow_code=permission,
        )
        return replace(start, pause=options.pause, preempt_s=options.preempt_s)
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
    return StartPoint(
        run=options.run,
        config=config,
        table=versions.view(table, config.follow),
        meta=meta,
        resume=path,
        go_on=True,
        pause=options.pause,
        preempt_s=options.preempt_s,
        split_moved=options.split_moved,
        seen=versions.seen_in(table, meta, options.split_moved),
    )


def _start_new(
    given: Given,
    options: StartOptions,
    request: PetastormRequest,
    permission: Permission,
    *,
    go_on: bool,
) -> StartPoint:
    """Starts at the beginning of the table's newest version. A run over all parts starts with the oldest version."""
    first_version = 0 if given.get("follow") == "parts" else None
    table = request.changed_table(
        open_table(
            given["data"],
            given.get("version", first_version),
            spec=_own_spec(given),
            allow_code=permission,
            transforms=given.get("transforms", ()),
        )
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
    columns = tables_of(table.fields, config.model, profile_of(table))
    config = replace(config, model=with_item_table(spread_out(config.model, columns), table))
    return StartPoint(
        run=options.run,
        config=config,
        table=versions.view(table, config.follow),
        meta=CheckpointMeta.of(table, config.to_dict()),
        resume=None,
        go_on=go_on,
        pause=options.pause,
        preempt_s=options.preempt_s,
        split_moved=options.split_moved,
        chosen=describe_defaults(rows, given),
    )


def _own_spec(given: Given) -> str:
    return Path(given["own_spec"]).read_text("utf-8") if "own_spec" in given else ""


def _ranks(options: StartOptions) -> int:
    return options.ranks or int(os.environ.get("WORLD_SIZE", "1"))


def check(
    start: StartPoint,
    *,
    resume: bool,
    say: Callable[[str], None],
    ranks_per_host: int | None = None,
) -> dict[str, Any]:
    """Checks everything that can be known before training, as on a host of `ranks_per_host` ranks. Raises the first
    error."""
    from sluice.dlrm import run_plan
    from sluice.dlrm.checkpoint.save_memory import planned_save
    from sluice.dlrm.ranks import machine
    from sluice.dlrm.training import loaders

    config, table = start.config, start.table
    local_ranks = ranks_per_host or config.ranks
    if config.ranks % local_ranks:
        raise ConfigError(
            f"--ranks-per-host {local_ranks} does not divide {config.ranks} ranks: each host has as many"
        )
    planned = run_plan.plan_run(config, table, machine(config.ranks, local_ranks))
    check_files(table)
    conditions = loaders.conditions(config, start.run, 0)
    with loaders.training(
        config, table, rank=0, local_ranks=local_ranks, conditions=conditions
    ) as loader:
        KnobMemory(loader, config, say=say, ranks=local_ranks).start()
        plan = loader.plan
        if start.meta.loader:
            loader.load_state_dict(start.meta.loader)
    run_folder.check(start.run)
    if not resume and run_folder.has_run(start.run):
        raise RunError(
            f"{start.run}: already holds a run; choose another folder, or go on with it by --resume"
        )
    share = plan.share_of(0, config.ranks)
    say(planned.text)
    rows_read = share.rows * share.parts
    say(f"a rank reads {rows_read:,} rows a step and trains on {share.rows:,}")
    for line in (start.chosen, left_out(plan), planned_save(planned, local_ranks).text):
        if line:
            say(line)
    warnings = early_warnings(config, table, plan)
    for text in warnings:
        say(f"warning: {text}")
    return {
        "ok": True,
        "rows": plan.used,
        "steps": plan.steps,
        "rows_read_per_step": rows_read,
        "epochs": config.epochs,
        "warnings": warnings,
        **planned.to_dict(),
        "settings": config.to_dict(),
    }
