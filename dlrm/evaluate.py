"""Evaluates a run's newest checkpoint over a whole split of a feature table: AUC, NE, logloss, calibration.

    sluice evaluate --run-dir DIR --data TABLE --by day --predictions FILE.parquet
    torchrun --nproc-per-node=2 -m sluice.dlrm.evaluate --run-dir DIR --data TABLE

The table may be another version than the run was trained on. Its columns and vocabulary must be the same. The last
line of standard output is one JSON object: auc, ne, logloss, calibration, rows, what was evaluated, and the same
figures `by` the values of columns.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sluice.common.errors import UsageError
from sluice.common.lines import say
from sluice.common.program import run
from sluice.common.settings import parse, setting
from sluice.dlrm.rank_exit import RankExit, tell_torchrun
from sluice.dlrm.watchdog import Watchdog
from sluice.etl.spec.code_options import CodeOptions

if TYPE_CHECKING:
    from sluice.dlrm.evaluation.split import Findings
    from sluice.dlrm.options import Config
    from sluice.etl.table.table import FeatureTable


_SAID_VALUES = 20
"""Figures by value are also printed as lines if a column has at most so many values."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """Which checkpoint is evaluated, and on which rows."""

    title = "what"
    run: Path = setting(
        help="run folder of dlrm.train", flags=("--run-dir", "--run"), metavar="DIR"
    )
    best: bool = setting(
        False, "evaluate the checkpoint with the best validation AUC, not the newest"
    )
    data: str = setting("", "feature table (default: the run's)", metavar="TABLE")
    version: int | None = setting(
        None, "version of the table (default: the newest; without --data, the run's)"
    )
    split: str = setting("test", "split of the table", metavar="NAME")
    batch_size: int = setting(16384, "rows of a global batch", least=1)
    split_moved: str = setting(
        "refuse",
        "what to do if the split holds rows that the run has trained on",
        choices=("refuse", "accept"),
    )
    by: tuple[str, ...] = setting(
        (),
        "a column of the table's files: the figures are also given for each of its values, at most 1,000. May be given "
        "several times",
        metavar="COLUMN",
        again=True,
    )
    predictions: Path | None = setting(
        None,
        "write a row for each row of the split, with label, prediction, weight and the columns of --by, to this "
        "Parquet file",
        metavar="FILE",
    )
    code: CodeOptions = field(default_factory=CodeOptions)

    def answer(self) -> dict[str, Any] | None:
        """Returns the figures on the first rank, and None on the others."""
        from sluice.dlrm.checkpoint.meta import find_checkpoint
        from sluice.dlrm.evaluation.metrics import Quality
        from sluice.dlrm.follow.versions import open_version, seen_in
        from sluice.dlrm.options import Config
        from sluice.etl.table.split_rows import TRAIN

        path, meta = find_checkpoint(self.run / "checkpoints", take_best=self.best)
        trained = Config.from_dict(meta.config)
        version = self.version if self.data or self.version is not None else trained.version
        evaluated_on = replace(trained, data=self.data or trained.data)
        table = open_version(evaluated_on, version, self.code.permission)
        meta.check(table, same_version=False)
        # Raises an error with the table's splits if this one is unknown.
        table.files_of(self.split)
        if self.split != TRAIN and (
            seen := seen_in(table, meta, self.split_moved, split=self.split)
        ):
            say(f"warning: {seen}")
        config = replace(
            trained,
            data=table.uri,
            version=table.version,
            ranks=int(os.environ.get("WORLD_SIZE", "1")),
            batch_size=self.batch_size,
            sharding="auto",
        )
        evaluated = self._evaluate(config, table, path)
        if evaluated is None:
            return None
        findings, by = evaluated
        if findings.undefined is not None:
            say(f"warning: {findings.undefined}")
        say(f"{self.split}: {findings.quality}")
        for column, values in by.items():
            for value, figures in values.items() if len(values) <= _SAID_VALUES else ():
                say(f"{column} {value}: {Quality(**figures)}")
        return {
            **findings.quality.to_dict(),
            **({"by": by} if by else {}),
            "split": self.split,
            "step": meta.step,
            "version": table.version,
            "checkpoint": str(path),
        }

    def _evaluate(
        self, config: Config, table: FeatureTable, checkpoint: Path
    ) -> tuple[Findings, dict[str, Any]] | None:
        """Evaluates on all ranks. Returns the findings on the first one, and the figures by column and value."""
        from sluice.dlrm.telemetry.silence_warnings import quiet

        quiet()
        from sluice.dlrm.checkpoint.checkpoint import Checkpoint
        from sluice.dlrm.evaluation.predictions import RowPredictions
        from sluice.dlrm.evaluation.split import evaluate
        from sluice.dlrm.footprint import Footprint
        from sluice.dlrm.ranks import machine, world
        from sluice.dlrm.training import assemble, loaders

        with (
            world() as members,
            loaders.evaluation(
                config, table, self.split, rank=members.rank, local_ranks=members.local_ranks
            ) as batches,
        ):
            planned = Footprint.of(config, table, machine(members.ranks, members.local_ranks))
            parts = assemble.parts_of(
                config, planned.layout, len(batches.dense_names), planned.placement, members
            )
            Checkpoint(checkpoint).load(parts, members, optimisers=False)
            by: dict[str, Any] = {}
            if not self.by and self.predictions is None:
                findings = evaluate(parts, batches, self.split, members)
            else:
                rows = RowPredictions(batches, members, by=self.by, path=self.predictions)
                findings = evaluate(parts, batches, self.split, members, receive=rows.add)
                by = rows.finish()
            return (findings, by) if members.first else None


def main(argv: list[str]) -> dict[str, Any] | None:
    request = parse(EvaluationRequest, argv, "sluice evaluate", description=__doc__)
    with Watchdog(RankExit(first=os.environ.get("RANK", "0") == "0")):
        try:
            return request.answer()
        except UsageError as error:
            tell_torchrun(str(error))
            raise


def program() -> NoReturn:
    """The whole program, as its command runs it."""
    run(main, at_once=True)  # as dlrm.train


if __name__ == "__main__":
    program()
