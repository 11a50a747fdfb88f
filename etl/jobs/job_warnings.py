"""What a job warns of: `INPUT_CHECKS` after its rows are counted, and `VERSION_CHECKS` before it publishes them.

A check is a pure function. It yields a sentence for each thing that it finds, and refuses nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from sluice.etl.apply.row_counts import RowCounts
from sluice.etl.jobs.job import Job
from sluice.etl.schema import DataFile
from sluice.etl.spec.table_section import empty_splits
from sluice.etl.table.job_record import FileRecord, JobRecord
from sluice.etl.table.new_files import NewFile
from sluice.etl.table.profile import Profile
from sluice.etl.table.split_rows import SplitRows, count_repeated_rows
from sluice.etl.table.table import FeatureTable

MATCHED_SHARE = 0.01
"""A side table that gives at most this share of rows a value is named."""
MOVED_PSI, MOVED_ROWS, MOVED_TIMES = 5.0, 30, 10
"""At this drift, about 70 % of the numbers lie where none lay before. Fewer rows say nothing. A column in the unit of
its input is named only if its mean is this many times as large or as small."""


@dataclass(frozen=True)
class CountedInput:
    """A job whose rows are counted."""

    job: Job
    counted: RowCounts
    late: int
    """The number of an append's rows that are older than rows of the table from which their histories continue."""


@dataclass(frozen=True)
class NewVersion:
    """A job whose files are written."""

    job: Job
    record: JobRecord
    files: Sequence[NewFile]
    base: FeatureTable | None
    """The version before."""

    @cached_property
    def split_rows(self) -> tuple[SplitRows, SplitRows] | None:
        """The rows of the version before by split, and those that are new."""
        if self.job.parent is None or self.base is None:
            return None
        return SplitRows.of(self.base.records.values()), SplitRows.of([self.record])


def find_unmatched_joins(of: CountedInput) -> Iterator[str]:
    """Names each side table from which next to no row has got a value."""
    parsed = of.counted.parsed
    for number, join in enumerate(of.job.spec.rows.joins):
        matched = parsed - of.counted.unmatched.get(str(number), 0)
        if matched <= MATCHED_SHARE * parsed:
            unit = ", and the times in one unit" if join.time else ""
            yield (
                f"join.path = {join.path!r}: {matched:,} of {parsed:,} rows have got a value from "
                f"it; see that both tables write the values of {', '.join(join.on)} alike{unit}"
            )


def find_late_rows(of: CountedInput) -> Iterator[str]:
    job, histories = of.job, of.job.spec.rows.histories
    if not of.late:
        return
    by = ", ".join(dict.fromkeys(repr(history.by) for history in histories))
    names = ", ".join(history.name for history in histories)
    what = f"their {names} may lack values, and rows of the table do not know theirs; --late reject rejects such rows"
    if job.late == "reject":
        what = "they are rejected"
    yield (
        f"{of.late:,} rows are late: older than rows of the table with the same {by}; {what}; for whole "
        f"histories, {job.advise_rebuild(job.spec)}"
    )


def find_empty_columns(of: CountedInput) -> Iterator[str]:
    if empty := [name for name, share in of.counted.nulls.items() if share == 1]:
        yield (
            f"the input columns {', '.join(empty)} have no value in any row; see that the input names or "
            "places them as the spec does"
        )


def find_repeated_rows(of: NewVersion) -> Iterator[str]:
    """Finds rows that are appended twice."""
    if of.job.mode != "append" or of.split_rows is None:
        return
    rows = of.record.rows
    repeated = count_repeated_rows(*of.split_rows, rows)
    if repeated and repeated[0]:
        yield (
            f"{'' if repeated[1] else 'about '}{repeated[0]:,} of the {rows:,} rows that are "
            f"appended are in the table already (recognised by {of.job.spec.rule.text})"
        )


def find_empty_splits(of: NewVersion) -> Iterator[str]:
    """Finds splits without rows, and whether no new row is a training row. An append's splits may have rows of earlier
    jobs."""
    rows = count_by_split(of.record.files)
    before = count_by_split(of.base.files) if of.base else {}
    if of.job.mode == "append":
        rows = {name: rows.get(name, 0) + before.get(name, 0) for name in {**before, **rows}}
    table = of.job.spec.table
    yield from empty_splits(table, rows)
    # The split of rows without a label has no bound. It comes last.
    bounds = dict(zip(table.split, table.split_from, strict=False))
    more = sum(rows.get(name, 0) - before.get(name, 0) for name in bounds)
    train = table.training
    if before and more > 0 and rows.get(train) == before.get(train):
        begins = ", ".join(f"{name} from {bound:.15g}" for name, bound in bounds.items())
        yield (
            f"this version has {more:,} rows more, and no new training row: their {table.split_time!r} "
            f"is outside of split {train!r} ({begins}). To train on newer rows, raise the bounds in table.split, "
            "and pass --mode overwrite --update-state with all of the input"
        )


def find_single_label(of: NewVersion) -> Iterator[str]:
    """Finds whether all new training rows have the same label. A few appended rows may have."""
    train = of.job.spec.table.training
    seen = Profile.joined(f.profile for f in of.files if f.record.split == train)
    counts = seen.columns.get(of.job.spec.label_column.name)
    if of.job.mode != "append" and counts and counts["least"] == counts["largest"]:
        yield (
            f"all {counts['rows']:,} rows of split {train!r} have the label {counts['least']:g}, "
            "so a model learns nothing from them; look at the values and the ops of the label"
        )


def find_moved_columns(of: NewVersion) -> Iterator[str]:
    """Names dense columns whose numbers have moved away. A spec that limits `drift.psi` decides by itself."""
    parent, spec = of.job.parent, of.job.spec
    if parent is None or "psi" in spec.drift:
        return
    for column in spec.columns:
        moved = of.record.drift.get(column.name, {})
        if column.role != "dense" or moved.get("psi", 0) < MOVED_PSI:
            continue
        sides = parent.profile[column.name], of.record.profile[column.name]
        old, new = (side["sum"] / max(1, side["rows"]) for side in sides)
        small, large = sorted((abs(old), abs(new)))
        # After a logarithm or a scale, a factor of the input is a difference.
        has_unit = all(op.name in ("fill", "clip") for op in column.ops)
        if sides[1]["rows"] >= MOVED_ROWS and (large >= MOVED_TIMES * small or not has_unit):
            yield (
                f"drift: column {column.name!r}, after its operators, has the mean {new:.3g} and had "
                f"{old:.3g} in the version before; if its unit has changed, convert the new input and pass --mode "
                "overwrite with all of the input; drift.psi in the spec sets another limit"
            )


INPUT_CHECKS: tuple[Callable[[CountedInput], Iterator[str]], ...] = (
    find_unmatched_joins,
    find_late_rows,
    find_empty_columns,
)
VERSION_CHECKS: tuple[Callable[[NewVersion], Iterator[str]], ...] = (
    find_repeated_rows,
    find_empty_splits,
    find_single_label,
    find_moved_columns,
)


def count_by_split(files: Iterable[FileRecord | DataFile]) -> dict[str, int]:
    rows = Counter[str]()
    for file in files:
        rows[file.split] += file.rows
    return dict(rows)
