"""`RowCounts`: how many rows of an input parse, are rejected or are kept, and what its columns lack.

Only `RowCounts.batch` writes these counts among those of values, and only `RowCounts.of` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

COUNTS = pa.schema([("key", pa.int32()), ("value", pa.string()), ("count", pa.int64())])
"""Counts of values. The key is the number of a fitted operator, or `_ROWS`."""
_ROWS = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """The counts of a batch, or of one pass over the input."""

    parsed: int = 0
    """The number of rows that parse."""
    rows: int = 0
    """The number of rows that filters and samples leave, including those that are drawn."""
    training: int = 0
    """The number of rows of the training split among those that fitting read, without drawn ones."""
    rejected: Mapping[str, int] = field(default_factory=dict)
    """The number of rejected rows by reason."""
    inspected: int = 0
    """The number of rows that were inspected for `missing` and `unreadable` values: those that parsed at first."""
    missing: Mapping[str, int] = field(default_factory=dict)
    """The number of missing values in each input column."""
    unreadable: Mapping[str, int] = field(default_factory=dict)
    """The number of present values that cannot be read, in each column with operators that read values."""
    unmatched: Mapping[str, int] = field(default_factory=dict)
    """The number of rows without any value of a side table, by the number of its join."""
    examples: Mapping[str, str] = field(default_factory=dict)
    """An unreadable value of each column that has any."""

    @property
    def nulls(self) -> dict[str, float]:
        """The share of missing values in each input column."""
        return self._shares(self.missing)

    @property
    def unread(self) -> dict[str, float]:
        """The share of unreadable values in each column with operators that read values."""
        return self._shares(self.unreadable)

    def _shares(self, counts: Mapping[str, int]) -> dict[str, float]:
        return {name: round(count / max(1, self.inspected), 6) for name, count in counts.items()}

    def batch(self) -> pa.RecordBatch:
        """Returns the counts as a row of `COUNTS`."""
        return pa.record_batch([[_ROWS], [json.dumps(asdict(self))], [1]], schema=COUNTS)

    @classmethod
    def of(cls, counts: pa.Table) -> RowCounts:
        """Returns the sum of the counts of rows in `COUNTS`. Other counts are skipped."""
        total = cls()
        for row in counts.filter(pc.equal(counts["key"], _ROWS)).to_pylist():
            total = total._plus(cls(**json.loads(row["value"])), row["count"])
        return total

    def _plus(self, more: RowCounts, times: int) -> RowCounts:
        def add(ours: Mapping[str, int], theirs: Mapping[str, int]) -> dict[str, int]:
            names = sorted({*ours, *theirs})
            return {name: ours.get(name, 0) + times * theirs.get(name, 0) for name in names}

        both = self.examples.keys() & more.examples.keys()
        least = {name: min(self.examples[name], more.examples[name]) for name in both}
        return RowCounts(
            parsed=self.parsed + times * more.parsed,
            rows=self.rows + times * more.rows,
            training=self.training + times * more.training,
            rejected=add(self.rejected, more.rejected),
            inspected=self.inspected + times * more.inspected,
            missing=add(self.missing, more.missing),
            unreadable=add(self.unreadable, more.unreadable),
            unmatched=add(self.unmatched, more.unmatched),
            examples={**self.examples, **more.examples, **least},
        )
