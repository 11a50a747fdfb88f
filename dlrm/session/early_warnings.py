"""Warns before the first step about settings that are probably mistakes: `early_warnings`."""

from __future__ import annotations

from sluice.dlrm.evaluation.diagnosis import FEW_STEPS
from sluice.dlrm.options import Config
from sluice.etl.spec.table_section import empty_splits
from sluice.etl.table.table import FeatureTable
from sluice.ingest.row_order import RowsPlan


def early_warnings(config: Config, table: FeatureTable, plan: RowsPlan) -> list[str]:
    """Returns one line for each probable mistake, with what to do. `plan` is the order of the training rows."""
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
    if plan.huge_group:
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
