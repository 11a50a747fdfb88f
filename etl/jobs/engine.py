"""`Engine`: the interface between a job and what does its work, Spark or this machine's threads.
`fit` learns what a spec's operators need, with one pass over the input for each level."""

from __future__ import annotations

import contextlib
import errno
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from sluice.common.errors import InputError, RunFailure
from sluice.etl.apply.rejected import Rejects, check_rejects_folder
from sluice.etl.apply.row_counts import RowCounts
from sluice.etl.apply.row_placement import WritePlan
from sluice.etl.jobs.progress import JobProgress
from sluice.etl.ops import Fitted
from sluice.etl.spec.spec import Learned, Spec
from sluice.etl.table.fitted_state import UNDECIDED, FileBackedState, FittedState, Learnt
from sluice.etl.table.new_files import NewFile
from sluice.etl.table.sketch import Gathered

if TYPE_CHECKING:
    from sluice.etl.jobs.job import Job

_REJECTS_BYTES = 64 << 20
"""The memory for rejected rows. Others are on the disk."""
MAPPED = "mapped file"
"""How workers look values up in a vocabulary that is in files."""


class JobFailure(RunFailure):
    """A job that its engine could not finish. The message is the cause in one line."""


@dataclass(frozen=True, slots=True)
class Sums:
    """What one pass counted, as `COUNTS`."""

    table: pa.Table
    stored: Mapping[int, FileBackedState] = field(default_factory=dict)
    """The vocabularies that were written to files instead, by their keys."""
    parsed_before: RowCounts | None = None
    """If rows met other rows, the counts before that. Only they include the rows that do not parse."""

    @property
    def counted(self) -> RowCounts:
        counts = RowCounts.of(self.table)
        first = self.parsed_before
        if first is None:
            return counts
        # Rows that were rejected after they met others did parse.
        rejected = Counter(first.rejected) + Counter(counts.rejected)
        parsed = first.parsed - sum(counts.rejected.values())
        return replace(counts, parsed=parsed, rejected=dict(sorted(rejected.items())))

    def of(self, number: int) -> pa.Table:
        """Returns the values and counts of one fitted operator."""
        return self.table.filter(pa.compute.equal(self.table["key"], number)).drop_columns("key")


@dataclass(frozen=True, slots=True)
class Written:
    """What one pass wrote."""

    files: Sequence[NewFile]
    seen: Gathered
    """What `RowPlacement` has collected for the sketches."""


@contextlib.contextmanager
def os_errors_as_job_failure() -> Iterator[None]:
    """Turns the errors of this machine's disk and memory into a `JobFailure`."""
    try:
        yield
    except MemoryError as error:
        raise JobFailure(
            f"this machine has too little memory ({error}); nothing was published"
        ) from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            words = "the disk is full: make room for output and TMPDIR "
        elif error.errno in (errno.EROFS, errno.EACCES):
            words = "see that this user may read the input, and write to the output and TMPDIR "
        elif error.errno == errno.EIO:
            words = "a disk does not work: that of the input, the output or TMPDIR "
        else:
            words = ""
        place = f"{error.filename}: " if error.filename else ""
        raise JobFailure(f"{place}{words}({error}); nothing was published") from error


class Engine(ABC):
    """Does the work of one job. The result depends only on the job and its input: every engine makes the same rows in
    the same files and order, and learns the same states."""

    name: ClassVar[str]

    def __init__(self, job: Job, progress: JobProgress) -> None:
        self.job = job
        self.spec = job.spec
        self.progress = progress
        self.rejects = Rejects(_REJECTS_BYTES)
        """The rejected rows of the passes so far."""
        self.late = 0
        """The number of an append's rows that are older than rows of the table from which their histories continue."""

    def check(self) -> None:
        """Raises an error if the input cannot be read, or if the folder of rejects has other files. Reads no rows."""
        if self.job.rejects is not None:
            check_rejects_folder(self.job.rejects)

    @abstractmethod
    def sums(self, level: int | None, state: FittedState, operators: Mapping[int, Learned]) -> Sums:
        """Counts rows, and what these `operators` of one level learn from, in one pass over the input. A level of None
        counts only rows. Leaves out sums below an operator's `least`."""

    @abstractmethod
    def extend(self, level: int, number: int, op: Fitted, old: Learnt, new: Learnt) -> Learnt:
        """Returns `old` with the values that only `new` has. The ids of known values do not change."""

    def ways(self, state: FittedState) -> dict[str, str]:
        """Describes how rows meet each fitted table in files, and each side table."""
        return {}

    @abstractmethod
    def write(self, state: FittedState, plan: WritePlan) -> Written:
        """Writes the table's files, and the rows that serving needs."""

    def close(self) -> None:
        """Releases what the job needed, also after a failure."""
        self.rejects.close()


def fit(engine: Engine, before: FittedState | None = None) -> tuple[FittedState, RowCounts]:
    """Returns the state of every fitted operator, and the counts of good rows and of rejects by reason.

    Takes a pass for each level, and others if `closer_sums` needs them. Values in `before` keep their ids, and new
    values follow."""
    spec, counted = engine.spec, None
    tables: dict[str, Learnt] = {}
    for level in range(max(1, spec.levels)):
        wanted = {
            number: learned for number, learned in enumerate(spec.fitted) if learned.level == level
        }
        sums = engine.sums(level, FittedState(spec=spec.fitted_hash, tables=tables), wanted)
        known = before.tables if before is not None else {}
        of_ops = {
            number: sums.of(number)
            for number, learned in wanted.items()
            if number not in sums.stored
        }
        free = {
            number: table for number, table in of_ops.items() if wanted[number].key not in known
        }
        of_ops |= closer_sums(engine.sums, spec, tables, free)
        for number, learned in wanted.items():
            new = sums.stored.get(number)
            if new is None:
                new = learned.op.learn(of_ops[number])
            if before is not None and learned.key in before.tables:
                new = engine.extend(level, number, learned.op, before.kept(learned.key), new)
            tables[learned.key] = new
        counted = counted or sums.counted
    assert counted is not None
    return FittedState(
        spec=spec.fitted_hash, tables=tables, chains=spec.chains, fitted_on=spec.table.training
    ), counted


def closer_sums(
    count: Callable[[int, FittedState, Mapping[int, Learned]], Sums],
    spec: Spec,
    tables: Mapping[str, Learnt],
    of_ops: Mapping[int, pa.Table],
) -> dict[int, pa.Table]:
    """Returns the sums of operators, by their numbers, from which all of them can learn. If sums are too coarse,
    `count` counts their values again, in passes of no level."""
    closer, learned = dict(of_ops), spec.fitted
    while True:
        coarse = {
            number: sums
            for number, counted in closer.items()
            if (sums := learned[number].op.undecided(counted)) is not None
        }
        if not coarse:
            return closer
        marked = {
            learned[number].key: sums.append_column(UNDECIDED, sums["value"])
            for number, sums in coarse.items()
        }
        state = FittedState(spec=spec.fitted_hash, tables={**tables, **marked})
        again = count(spec.levels, state, {number: learned[number] for number in coarse})
        for number, sums in coarse.items():
            divided = pa.compute.is_in(closer[number]["value"], sums["value"])
            others = closer[number].filter(pa.compute.invert(divided))
            closer[number] = pa.concat_tables([others, again.of(number)])


def too_many_values(names: str, max_values: int) -> InputError:
    return InputError(
        f"{names}: its columns have more than {max_values:,} values to keep in all; give the "
        "largest columns a min_count or max_size, or hash them"
    )
