"""Compares the values that operators could not read in the first pass with those of the version before.

A fill hides them in the table. A changed date format would look like any other column of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from sluice.etl.apply.row_counts import RowCounts
from sluice.etl.table.job_record import MORE, JobRecord
from sluice.etl.table.profile import DriftError

TIMES = 2.0
"""A share is refused if it is more than TIMES what it was, and at least MORE above it."""


def lost(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """Returns the columns of both versions in which the share of lost values has grown too much, worst first."""
    columns = [
        name
        for name, share in after.items()
        if name in before and share > TIMES * before[name] and share - before[name] >= MORE - 1e-9
    ]
    return sorted(columns, key=lambda name: (before[name] - after[name], name))


def refuse_lost(
    before: JobRecord | None, now: RowCounts, accepted: Container[str], say: Callable[[str], None]
) -> None:
    """Raises a DriftError if a column has lost many more of its values than in the version before. Lost values are
    missing, or cannot be read, even if a fill replaces them."""
    old_unread = before.unread if before else {}
    old_nulls = before.raw_nulls if before else {}
    for old, new, what, examples in (
        (old_unread, now.unread, "cannot be read", now.examples),
        (old_nulls, now.nulls, "are missing", {}),
    ):
        for name in lost(old, new):
            if name not in accepted:
                shown = f", for instance {examples[name]!r}" if name in examples else ""
                raise DriftError(
                    f"column {name!r}: {new[name]:.1%} of its values {what}{shown}; in the version before it was "
                    f"{old[name]:.1%}; nothing was published; correct the input, let the spec read it (it may list "
                    f"several formats), or accept it with --accept-nulls {name}"
                )
    for name, share in now.unread.items():
        if share >= MORE and name not in old_unread:
            say(
                f"warning: column {name!r}: {share:.1%} of its values cannot be read, for instance "
                f"{now.examples[name]!r}, and no version before says whether that is usual"
            )
