"""Counts values that an operator cannot read in the first pass, and compares them with the version before.

A fill hides them in the table. A changed date format would look like any other column of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.apply.features import Features
from sluice.etl.ops.chain import lacks, reading
from sluice.etl.table.job_record import MORE, JobRecord
from sluice.etl.table.profile import DriftError

TIMES = 2.0
"""A share is refused if it is more than TIMES what it was, and at least MORE above it."""
_SHOWN = 100
"""The most characters of a value in a message."""


class LostValues(Protocol):
    """The shares of values that a version lacks, by column."""

    @property
    def unread(self) -> Mapping[str, float]: ...

    @property
    def nulls(self) -> Mapping[str, float]: ...

    @property
    def examples(self) -> Mapping[str, str]:
        """Returns a value that could not be read."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A column that has lost more of its values than the version before."""

    column: str
    before: float
    now: float
    unread: bool
    """Whether the values are there but cannot be read; otherwise they are missing."""

    def text(self, example: str | None) -> str:
        what = "cannot be read" if self.unread else "are missing"
        shown = "" if example is None else f", for instance {example!r}"
        return (
            f"column {self.column!r}: {self.now:.1%} of its values {what}{shown}; in the version before it was "
            f"{self.before:.1%}"
        )


def lost(before: Mapping[str, float], after: Mapping[str, float], *, unread: bool) -> list[Lost]:
    """Returns the columns of both versions in which the share of lost values has grown too much, worst first."""
    found = [
        Lost(column=name, before=before[name], now=share, unread=unread)
        for name, share in after.items()
        if name in before and share > TIMES * before[name] and share - before[name] >= MORE - 1e-9
    ]
    return sorted(found, key=lambda one: (one.before - one.now, one.column))


def refuse_lost(
    before: JobRecord | None, now: LostValues, accepted: Container[str], say: Callable[[str], None]
) -> None:
    """Raises a DriftError if a column has lost many more of its values than in the version before. Lost values are
    missing, or cannot be read, even if a fill replaces them."""
    missing: Mapping[str, float] = {}
    unread: Mapping[str, float] = {}
    if before is not None:
        missing, unread = before.raw_nulls, before.unread
    for one in [*lost(unread, now.unread, unread=True), *lost(missing, now.nulls, unread=False)]:
        if one.column not in accepted:
            example = now.examples.get(one.column) if one.unread else None
            raise DriftError(
                f"{one.text(example)}; nothing was published; correct the input, let the spec read it (it "
                f"may list several formats), or accept it with --accept-nulls {one.column}"
            )
    for name, share in now.unread.items():
        if share >= MORE and name not in unread:
            say(
                f"warning: column {name!r}: {share:.1%} of its values cannot be read, for instance "
                f"{now.examples[name]!r}, and no version before says whether that is usual"
            )


def unread(
    features: Features, columns: Mapping[str, pa.Array]
) -> Iterator[tuple[str, int, str | None]]:
    """Yields for each column of a batch whose operators read values the number of rows with an unreadable value, and
    such a value."""
    for column in features.spec.columns:
        if not (upto := reading(column.left_to_spark)):
            continue
        given = columns[column.sources[0]]
        bad = pc.and_(
            pc.invert(lacks(given)), lacks(features.run(column, column.ops[:upto], columns, {}))
        )
        count = pc.sum(bad).as_py() or 0
        example = str(given.filter(bad)[0].as_py())[:_SHOWN] if count else None
        yield column.name, count, example
