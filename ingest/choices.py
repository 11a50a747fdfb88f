"""What a user may choose about a loader, in a program or on a command line: `Errors`, `History` and the names of
choices.

Standard library only, so that a command line can be read without numpy and Arrow."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from sluice.common.errors import UsageError
from sluice.common.number_checks import is_whole
from sluice.common.suggest import NamedFields, nearest

READERS = ("petastorm", "arrow")
AUTO = "auto"
"""Petastorm if it is installed, otherwise Arrow."""
WINDOW_ROWS = 32768
LAST = ("drop", "pad")
ON_ERROR = ("raise", "quarantine")
# These errors are not caused by a row. The next row would fail too.
PROGRAM_ERRORS = frozenset(
    {
        "NameError",
        "ImportError",
        "SyntaxError",
        "AttributeError",
        "NotImplementedError",
        "MemoryError",
        "SystemExit",
        "KeyboardInterrupt",
        "GeneratorExit",
        "SystemError",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class History(NamedFields):
    """Gives each row the last events of its user before its own time, oldest first. An event is another row of the
    table, which must be sorted by `by` and, within it, by `time`."""

    by: str
    """The stored column that says whose event a row is: whole numbers or texts."""
    time: str
    """The stored column of times: numbers, dates or timestamps. Events of the row's own moment are not in its
    history."""
    columns: tuple[str, ...]
    """The loaded columns with one value a row, of which a batch also has the history: `item` as `item_history`."""
    last: int
    """The most events of a row's history."""

    def __post_init__(self) -> None:
        if isinstance(self.columns, str):
            raise UsageError(
                f"history: columns={self.columns!r} is one text; write columns=[{self.columns!r}]"
            )
        object.__setattr__(self, "columns", tuple(self.columns))
        if not self.columns or len(set(self.columns)) < len(self.columns):
            raise UsageError(
                f"history: columns={list(self.columns)}; name at least one column, each once"
            )
        if self.by == self.time:
            raise UsageError(f"history: by and time both name the column {self.by!r}")
        if not is_whole(self.last, 1):
            raise UsageError(f"history: last={self.last!r} is not a positive whole number")


def history_name(column: str) -> str:
    return f"{column}_history"


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors(NamedFields):
    """What happens to rows that cannot be loaded, or on which a transform fails."""

    on_error: str = "raise"
    """`raise` ends the run. `quarantine` gives such rows weight 0 and lists them."""
    quarantine: str | os.PathLike[str] = "quarantine.jsonl"
    """The file that lists quarantined rows. It is created with the first one."""
    max_rows: int = 10_000
    """The most rows of a run that may be quarantined."""
    max_rate: float = 0.01
    """The largest share of rows that may be quarantined. It is checked after `probation_rows` rows, because one bad row
    among the first ten is no rate."""
    probation_rows: int = 100_000
    finite: bool = True
    """Whether NaN and infinity count as errors. If False, batches keep such numbers."""

    def __post_init__(self) -> None:
        if self.on_error not in ON_ERROR:
            raise UsageError(f"on_error: {self.on_error!r}{nearest(self.on_error, ON_ERROR)}")
        if self.max_rows < 0 or self.probation_rows < 0:
            raise UsageError(
                f"max_rows={self.max_rows}, probation_rows={self.probation_rows}: neither may be below 0"
            )
        if not 0 <= self.max_rate <= 1:
            raise UsageError(f"max_rate: {self.max_rate} is not a share from 0 to 1")

    def objection(
        self, *, rows_seen: int, rows_aside: int, kinds: Iterable[str] = ()
    ) -> str | None:
        """Returns why the run must stop if `rows_aside` of `rows_seen` rows are quarantined. None: it continues."""
        program = PROGRAM_ERRORS.intersection(kinds)
        if program:
            return (
                f"{min(program)} is an error of the program, not of a row: on_error does not apply"
            )
        if rows_aside and self.on_error == "raise":
            return "on_error=raise; on_error=quarantine would skip such rows"
        if rows_aside > self.max_rows:
            return f"{rows_aside} quarantined rows are more than max_rows={self.max_rows}"
        if rows_seen >= self.probation_rows and rows_aside > self.max_rate * rows_seen:
            return f"{rows_aside} of {rows_seen} rows are quarantined, more than max_rate={self.max_rate:g}"
        return None
