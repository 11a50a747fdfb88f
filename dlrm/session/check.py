"""Checks a run before it trains: `check`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sluice.agent.report import run_folder
from sluice.agent.report.run_folder import RunError
from sluice.agent.runtime.knob_memory import KnobMemory
from sluice.dlrm.options import ConfigError
from sluice.dlrm.session.early_warnings import early_warnings, left_out
from sluice.dlrm.session.run import TrainingRun
from sluice.dlrm.training.input_checks import check_files


def check(
    run: TrainingRun,
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

    config, table = run.config, run.table
    local_ranks = ranks_per_host or config.ranks
    if config.ranks % local_ranks:
        raise ConfigError(
            f"--ranks-per-host {local_ranks} does not divide {config.ranks} ranks: each host has as many"
        )
    planned = run_plan.plan_run(config, table, machine(config.ranks, local_ranks))
    check_files(table)
    conditions = loaders.conditions(config, run.folder, 0)
    with loaders.training(
        config, table, rank=0, local_ranks=local_ranks, conditions=conditions
    ) as loader:
        KnobMemory(loader, config, say=say, ranks=local_ranks).start()
        plan = loader.plan
        if run.meta.loader:
            loader.load_state_dict(run.meta.loader)
    run_folder.check(run.folder)
    if not resume and run_folder.has_run(run.folder):
        raise RunError(
            f"{run.folder}: already holds a run; choose another folder, or go on with it by --resume"
        )
    share = plan.share_of(0, config.ranks)
    say(planned.text)
    rows_read = share.rows * share.parts
    say(f"a rank reads {rows_read:,} rows a step and trains on {share.rows:,}")
    for line in (run.chosen, left_out(plan), planned_save(planned, local_ranks).text):
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
