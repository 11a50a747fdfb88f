"""The options and the work of `sluice synth`, `show` and `check`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.common.errors import UsageError, printable
from sluice.common.settings import setting
from sluice.etl.spec.code_options import CodeOptions

if TYPE_CHECKING:
    from sluice.etl.table.table import FeatureTable


Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class SynthRequest:
    """Writes Criteo-shaped clicks whose best reachable AUC is known.

    A line has a label, 13 counts and 26 categories, with tabs between them, as in Criteo's logs. The rows are drawn
    from a known model, so the last line gives the best AUC that any model can reach (bayes_auc). The same seed and days
    give the same bytes."""

    rows: int = setting(help="number of rows to write", least=1)
    seed: int = setting(0, "seed of all random choices")
    out: Path = setting(
        help="file to write; with --days above 1 a folder for day_0, day_1, …",
        metavar="PATH",
    )
    days: int = setting(
        1, "files to spread the rows over; each later day brings values never seen before", least=1
    )

    def answer(self, _say: Say) -> dict[str, Any]:
        from sluice.etl.synth.raw_logs import synthesize

        try:
            return synthesize(
                self.out,
                rows=self.rows,
                seed=self.seed,
                days=self.days,
                progress=sys.stderr,
            )
        except OSError as error:
            raise UsageError(
                f"{error.filename or self.out}: cannot be written ({error.strerror})"
            ) from None


@dataclass(frozen=True, kw_only=True)
class TableChoice:
    """A version of a table."""

    title = "what"
    table: str = setting(help="the table's folder or URI", metavar="TABLE", positional=True)
    version: int | None = setting(None, "an older version (default: the newest)")
    code: CodeOptions = field(default_factory=CodeOptions)

    def open(self) -> FeatureTable:
        from sluice.etl.table.table import FeatureTable

        return FeatureTable.open(self.table, self.version, allow_code=self.code.permission)


@dataclass(frozen=True, kw_only=True)
class ShowRequest(TableChoice):
    """Shows a table's versions, splits and columns. A pipe or a file gets a JSON object as the last line."""

    def answer(self, _say: Say) -> dict[str, Any] | None:
        from sluice.etl.show import describe_table

        table = self.open()
        print(printable(describe_table(table)))
        if sys.stdout.isatty():
            return None
        fields = [
            {"name": f.name, "role": f.role, "type": f.type, "cardinality": f.cardinality}
            for f in table.fields
        ]
        return {
            "version": table.version,
            "rows": table.rows,
            "splits": {s: table.rows_of(s) for s in table.splits},
            "fitted_on": table.fitted_on if table.records else None,
            "drift": dict(table.record.drift) if table.records else {},
            "fingerprint": {
                "layout": table.fingerprint.layout,
                "vocabulary": table.fingerprint.vocabulary,
            },
            "fields": fields,
        }


@dataclass(frozen=True, kw_only=True)
class CheckRequest(TableChoice):
    """Looks for missing, damaged and orphaned files and for ids out of range. Exits with 1 if it finds any."""

    def answer(self, say: Say) -> dict[str, Any]:
        table = self.open()
        problems = table.check()
        for problem in problems:
            say(problem)
        say(
            f"version {table.version}: {len(table.files)} files, {len(problems) or 'no'} "
            f"{'problem' if len(problems) == 1 else 'problems'}"
        )
        return {"version": table.version, "rows": table.rows, "problems": problems}
