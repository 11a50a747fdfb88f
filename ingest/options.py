"""What a command line says about a loader: the table, the order of rows, and the options of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice.common.settings import check, setting
from sluice.etl.spec.code_options import CodeOptions
from sluice.ingest.choices import ON_ERROR, WINDOW_ROWS, Errors
from sluice.ingest.faults.faults import KINDS, Fault, parse

if TYPE_CHECKING:
    from sluice.etl.table.table import FeatureTable
    from sluice.ingest.read.parquet_files import ParquetFiles


def table_named(
    names: Sequence[str], roles: str | None, code: CodeOptions, transforms: Sequence[str] = ()
) -> FeatureTable | ParquetFiles:
    """Returns the table that a command line names, or plain Parquet, also as several files: with its --roles, with the
    columns of its own --spec, or with what is guessed."""
    from sluice.ingest.read.parquet_files import table_of
    from sluice.ingest.read.source_files import is_table

    spec = code.own_spec if code.own_spec and (len(names) > 1 or not is_table(names[0])) else None
    return table_of(
        names if len(names) > 1 else names[0], roles, code.permission_with(transforms), spec=spec
    )


@dataclass(frozen=True, kw_only=True)
class OrderOptions:
    """How rows are mixed. Another value is another order of rows (docs/shuffle.md tells what each costs)."""

    title = "order of rows"
    streams: int | None = setting(
        None,
        "parts of an epoch of which every batch has rows; they must divide the batch "
        "(default: the largest power of two up to 8 that does). More: better mixed, more "
        "memory, a later first batch",
        least=1,
    )
    window_rows: int = setting(
        WINDOW_ROWS,
        "rows of a part that are mixed with each other. More: better mixed where "
        "row groups are smaller, more memory, slower beyond a core's cache",
        metavar="ROWS",
        least=1,
    )


_DEFAULT = Errors()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What is done about rows that fail, who reads them, and which faults are injected."""

    title = "errors, stores and faults"
    on_error: str = setting(
        _DEFAULT.on_error,
        "rows that fail: stop, or quarantine them with weight 0",
        choices=ON_ERROR,
    )
    max_quarantined: int = setting(
        _DEFAULT.max_rows,
        "with quarantine: the most rows of a rank that may be quarantined",
        metavar="ROWS",
        least=0,
    )
    max_quarantined_rate: float = setting(
        _DEFAULT.max_rate,
        f"and the largest share of its rows, judged after the first {_DEFAULT.probation_rows:,}",
        metavar="SHARE",
        least=0,
        most=1,
    )
    workers: str = setting(
        "",
        "let others read and shuffle row groups: local:N starts N processes here (for each "
        "rank), ray://HOST:PORT has a Ray cluster place them, HOST:PORT,…?token=FILE asks "
        "`sluice worker`s (default: none)",
        metavar="WORKERS",
    )
    inject: str = setting(
        "",
        "faults on purpose, for instance kill-worker@30s,stall-store=5s@10s,corrupt@part-0: "
        + "; ".join(f"{n} {k.what}" for n, k in KINDS.items()),
        metavar="FAULT@TIME,…",
    )

    def __post_init__(self) -> None:
        check(self)
        parse(self.inject)  # a fault that cannot be parsed is an error at the start

    def errors(self, quarantine: str | os.PathLike[str]) -> Errors:
        """What the loader does with rows that fail. `quarantine` is the file that lists them."""
        return Errors(
            on_error=self.on_error,
            quarantine=quarantine,
            max_rows=self.max_quarantined,
            max_rate=self.max_quarantined_rate,
        )

    @property
    def faults(self) -> tuple[Fault, ...]:
        return parse(self.inject)
