"""Checks a run before it trains: `check`. `early_warnings` finds settings that are probably mistakes."""

from __future__ import annotations

from typing import Any

from sluice.agent.report import run_folder
from sluice.agent.report.run_folder import RunError
from sluice.agent.runtime.knob_memory import KnobMemory
from sluice.common.lines import say
from sluice.dlrm.checkpoint.save_memory import planned_save
from sluice.dlrm.evaluation.diagnosis import FEW_STEPS
from sluice.dlrm.footprint import Footprint
from sluice.dlrm.options import Config, ConfigError
from sluice.dlrm.ranks import machine
from sluice.dlrm.session.run import TrainingRun
from sluice.dlrm.training import loaders
from sluice.etl.spec.table_section import empty_splits
from sluice.etl.table.table import FeatureTable
from sluice.ingest.row_order import RowsPlan


def check(run: TrainingRun) -> dict[str, Any]:
    """Checks everything that can be known before training, as on a host of `--ranks-per-host` ranks. Raises the first
    error."""
    config, table = run.config, run.table
    local_ranks = run.options.ranks_per_host or config.ranks
    if config.ranks % local_ranks:
        raise ConfigError(
            f"--ranks-per-host {local_ranks} does not divide {config.ranks} ranks: each host has as many"
        )
    planned = Footprint.of(config, table, machine(config.ranks, local_ranks))
    conditions = loaders.conditions(config, run.folder, 0)
    with loaders.training(
        config, table, rank=0, local_ranks=local_ranks, conditions=conditions
    ) as loader:
        KnobMemory(loader, config, say=say, ranks=local_ranks).start()
        plan, huge_group = loader.plan, loader.huge_group
        if run.meta.loader:
            loader.load_state_dict(run.meta.loader)
    run_folder.check(run.folder)
    if not run.options.resume and run_folder.has_run(run.folder):
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
    warnings = early_warnings(config, table, plan, huge_group)
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


def early_warnings(
    config: Config, table: FeatureTable, plan: RowsPlan, huge_group: int = 0
) -> list[str]:
    """Returns one line for each probable mistake, with what to do. `plan` is the order of the training rows, of which
    a row group of `huge_group` rows is read whole."""
    rows = {split: table.rows_of(split) for split in table.splits}
    spec = table.record.spec if table.records else ""
    warnings = empty_splits(table.spec().table, rows) if spec else []
    if config.why_not_served:
        warnings.append(f"`sluice serve` will refuse this run, because it {config.why_not_served}")
    if not rows.keys() & {"validation", "test"}:
        warnings.append(
            "the table has neither a split 'validation' nor 'test', so nothing will say how good the model "
            "is: give it some in table.split of the feature spec"
        )
    if huge_group:
        warnings.append(plan.describe_huge_group())
    if plan.steps * config.epochs < min(FEW_STEPS, plan.rows // (4 * plan.streams)):
        warnings.append(
            f"{plan.steps * config.epochs} steps in all: batches of {config.batch_size:,} rows are large "
            f"for {plan.rows:,}; without --batch-size there are {FEW_STEPS} steps an epoch"
        )
    return warnings


def left_out(plan: RowsPlan) -> str | None:
    """Returns a text about the rows that each epoch skips. None: it skips none."""
    if not plan.dropped:
        return None
    return (
        f"--last drop: {plan.dropped:,} of {plan.rows:,} rows fill no batch and are left out of each epoch; --last "
        "pad trains on all"
    )
