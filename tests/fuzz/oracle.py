"""Finds leaks of a table: features that contain information which they would not have at serving time.

The oracle computes the features again, changes the input in a way that must not change them, and compares. An example:
three rows of one user, and two features made of the user's labels.

    row  user  label  mean of all rows  mean of the other rows
      1  ann       1              2/3                     1/2
      2  ann       0              2/3                       1
      3  ann       1              2/3                     1/2

The oracle flips the label of row 1 from 1 to 0, and computes both features of row 1 again. The mean of all rows becomes
1/3: this feature contains the row's own label, and that is a leak. The mean of the other rows is still 1/2: no leak.

The oracle makes these changes, one at a time:

- One label is flipped. That row must keep its features.
- All labels are flipped, and operators keep what they learned. All rows must keep their features.
- The labels of the test split are flipped, or its rows are removed. Training rows must keep their features, and
  operators must learn the same.
- The rows after a moment are removed, or the labels from that moment on are flipped. Rows up to that moment must keep
  their features.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sluice.etl.apply.counts import CountsOfRows, selected
from sluice.etl.apply.features import Features, stored
from sluice.etl.apply.learned_rows import learned_from_another_split
from sluice.etl.apply.parse import InputParser, Parsed
from sluice.etl.apply.row_counts import COUNTS
from sluice.etl.jobs.engine import Engine, Sums, closer_sums
from sluice.etl.jobs.job import Job
from sluice.etl.ops.base import plain
from sluice.etl.spec.columns import MODEL_ROLES, ColumnSpec
from sluice.etl.spec.input_section import ARROW_TYPES, Input
from sluice.etl.spec.nested_columns import join_chunks
from sluice.etl.spec.row_rules import HistorySpec, Join, RowRules
from sluice.etl.spec.row_split import fold_keys, row_keys, split_of
from sluice.etl.spec.spec import Learned, Spec
from sluice.etl.table.fitted_state import FittedState, StateError, digest_of
from sluice.etl.table.store import TableStore
from sluice.etl.table.table import FeatureTable, TableError

Mask = npt.NDArray[np.bool_]
Columns = dict[str, pa.Array]
EngineFor = Callable[[Job], Engine]
_MOMENTS = 3
"""How many moments are tried. Each divides the rows into earlier and later ones."""
# The oracle adds these columns to the rows: the row's number, the number of its changed input, and a history's `by` for
# each changed input.
_ROW = "_oracle_row"
_CHANGE = "_oracle_change"
_BY = "_oracle_by"
# The names that a spec has for the types of columns.
_KINDS = {kind: name for name, kind in ARROW_TYPES.items()}


class CannotJudge(Exception):
    """The files do not give a version's rows or states again."""


class OneLabel(Exception):
    """There is no other label to flip to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """A feature that contains information which it must not have."""

    column: str
    holds: str
    """The information that the column must not have, for example "its own label"."""
    row: int | None = None
    """The first row whose feature changes."""

    @property
    def text(self) -> str:
        where = "" if self.row is None else f", first in row {self.row}"
        return f"column {self.column!r}: it holds {self.holds}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the input, and the rows that must keep their features in spite of it."""

    leak: str
    """If a feature changes, it contains this information. It becomes `Leak.holds`."""
    flipped: Mask
    """The rows whose labels are flipped."""
    removed: Mask
    """The rows that are left out."""
    keeps_features: Mask
    """The rows whose features must not change."""
    keeps_states: bool = False
    """Whether operators must learn the same as before."""
    learns_again: Callable[[Learned], bool] = lambda _: False
    """Returns whether an operator learns from the changed rows. The others keep what they learned."""
    runs_rules: bool = True
    """Whether joins and histories run again on the changed rows."""
    side_ends: Mapping[str, Any] = field(default_factory=dict)
    """Maps the time column of a join to a time. The side table's rows after that time are left out."""


class RuleRunner:
    """Runs dedup, joins and histories of a spec. Joins and histories run on several inputs in one pass, because a pass
    of the engine takes seconds."""

    def __init__(self, engine_for: EngineFor, folder: Path) -> None:
        self._engine_for, self._folder = engine_for, folder
        self._numbers = itertools.count()

    def drop_duplicates(self, rows: pa.Table, spec: Spec) -> pa.Table:
        """Returns the rows that `dedup` keeps."""
        if spec.rows.dedup is None:
            return rows
        by = spec.rows.dedup.by or tuple(spec.input.columns)
        return self._run(rows, spec, RowRules(dedup=replace(spec.rows.dedup, by=by)))

    def add_columns(
        self, spec: Spec, inputs: Sequence[tuple[pa.Table, Mapping[str, Any]]]
    ) -> Iterator[pa.Table]:
        """Yields the rows of each input with the columns that joins and histories add. An input is its rows, and the
        `side_ends` of its change."""
        rows = pa.concat_tables(
            part.append_column(_CHANGE, pa.array(np.full(part.num_rows, number)))
            for number, (part, _) in enumerate(inputs)
        )
        if spec.rows.joins:
            ends = [side_ends for _, side_ends in inputs]
            joins = tuple(self._cut_side_table(join, ends) for join in spec.rows.joins)
            rows = self._run(rows, spec, RowRules(joins=joins))
        rest = list(spec.rows.histories)
        while rest:
            ready = list[HistorySpec]()
            # If an earlier history adds the column `by` of a history, that history needs a later run.
            while rest and rest[0].by in rows.column_names:
                name = f"{_BY}{len(ready)}"
                codes = (
                    rows[rest[0].by].combine_chunks().dictionary_encode().indices.cast(pa.int64())
                )
                # Rows of different inputs get different values of `by`, so that they do not share a history.
                rows = rows.append_column(
                    name, pc.add(pc.multiply(codes, len(inputs)), rows[_CHANGE])
                )
                ready.append(replace(rest.pop(0), by=name))
            rows = self._run(rows, spec, RowRules(histories=tuple(ready)))
        for number in range(len(inputs)):
            yield rows.filter(pc.equal(rows[_CHANGE], number))

    def _run(self, rows: pa.Table, spec: Spec, rules: RowRules) -> pa.Table:
        """Returns the rows after the rules. The engine reads them from a Parquet file, as a job does."""
        path = self._folder / f"{next(self._numbers)}.parquet"
        pq.write_table(rows, path)
        source = Input(
            format="parquet",
            columns={name.name: _KINDS[name.type] for name in rows.schema},
            marks=tuple(name for name in rows.column_names if name not in spec.input.with_place),
        )
        job = Job(
            spec=replace(
                spec,
                input=source,
                rows=rules,
                table=replace(spec.table, split_column=None),
                identity=spec.rule,
            ),
            inputs=(str(path),),
            store=TableStore(self._folder / "no-table"),
        )
        with contextlib.closing(self._engine_for(job)) as engine:
            engine.check()
            parser = InputParser(engine.spec)
            parts = (
                _select(engine.spec, parser.parse(batch))
                for batch in engine._raw.rows.toArrow().to_batches()
            )
            columns = _columns(pa.concat_tables(pa.table(dict(part)) for part in parts))
        return pa.table(
            {
                name: values
                if values.type in _KINDS
                else values.cast(pa.list_(values.type.value_type))
                for name, values in columns.items()
                if not name.startswith(_BY)
            }
        )

    def _cut_side_table(self, join: Join, ends: Sequence[Mapping[str, Any]]) -> Join:
        """Returns the join with a copy of its side table for each input, without the rows that are too late for it."""
        path = str(self._folder / f"{next(self._numbers)}")
        _write_side_tables(join, [end.get(join.time or "") for end in ends], _CHANGE, path)
        return replace(join, path=path, format="parquet", on=(*join.on, _CHANGE), fields=())


def _select(spec: Spec, parsed: Parsed) -> Columns:
    return {name: plain(values) for name, values in selected(spec, parsed)[0].items()}


def _write_side_tables(join: Join, ends: Sequence[float | None], number: str, path: str) -> None:
    """Writes a copy of a join's side table for each end, as Parquet. A copy lacks the rows that are later than its end,
    and has the end's index in a column called `number`. An end of None leaves out no row."""
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as sql

    spark = SparkSession.active()
    ended = spark.createDataFrame(list(enumerate(ends)), f"{number} bigint, _end double")
    options = {"header": str(not join.fields).lower(), "sep": join.delimiter}
    side = spark.read.options(**(options if join.format == "csv" else {})).format(join.format)
    side = side.load(join.path)
    side = (side.toDF(*join.fields) if join.fields else side).crossJoin(ended)
    if join.their_time:
        side = side.where(
            ~sql.coalesce(side[join.their_time].try_cast("double") > side["_end"], sql.lit(False))
        )
    side.drop("_end").write.parquet(path)


class TablePart:
    """The rows of a table that one job wrote, recomputed from the input.

    The kept rows are those rows of the input that dedup, filters and the sample keep. `columns`, `row_numbers` and
    `splits` have one entry for each kept row. Features have more entries, because drawn negatives follow the kept
    rows."""

    def __init__(
        self, table: FeatureTable, rows: pa.Table, rules: RuleRunner, available: Mask
    ) -> None:
        """`rows` are the rows of this version's input. `available` are those that no earlier job got: only these can be
        this job's."""
        self.table, self._rules = table, rules
        self._available = available
        self.spec = replace(table.spec(), identity=table.record.identity)
        self.state = table.state() or FittedState()
        self._rows = rules.drop_duplicates(rows, self.spec)
        joined = self._rows
        if self.spec.rows.relational:
            joined = next(rules.add_columns(self.spec, [(joined, {})]))
        self.columns = _select(self.spec, Parsed(_columns(joined), joined.num_rows, []))
        self.row_numbers = self.columns[_ROW].to_numpy()
        """The number of each kept row in the input."""
        keys = row_keys(self.columns, self.spec)
        self.made_from = np.arange(len(self.row_numbers))
        """For each row with features, the kept row that it was made from: itself, or a negative's positive row."""
        self._negatives = Columns()
        if self.spec.rows.negatives:
            drawn, self.made_from = self.spec.rows.negatives.drawn(
                self.columns, self.spec.label, keys, self.state["rows/negatives/0"]
            )
            self._negatives = {
                name: values.slice(len(self.row_numbers)) for name, values in drawn.items()
            }
        self.splits = split_of(self.columns, keys, self.spec)

    def apply_changes(self, changes: Sequence[Change]) -> Iterator[Columns]:
        """Yields the columns of the kept rows after each change. If joins and histories run again, the columns are null
        in removed rows."""
        has_rules = self.spec.rows.relational
        inputs = [
            (
                pa.table(self._flip_labels(change, _columns(self._rows))).filter(
                    pa.array(~change.removed[self._rows[_ROW].to_numpy()])
                ),
                change.side_ends,
            )
            for change in changes
            if change.runs_rules and has_rules
        ]
        joined = self._rules.add_columns(self.spec, inputs) if inputs else iter(())
        for change in changes:
            if not (change.runs_rules and has_rules):
                yield self._flip_labels(change, self.columns)
                continue
            rows = next(joined)
            place = np.full(len(change.removed), -1)
            place[rows[_ROW].to_numpy()] = np.arange(rows.num_rows)
            place = place[self.row_numbers]
            yield _columns(rows.select(list(self.columns)).take(pa.array(place, mask=place < 0)))

    def _flip_labels(self, change: Change, columns: Columns) -> Columns:
        """Returns the columns with flipped labels. A flipped row gets the raw label of another row."""
        labels = pc.fill_null(self.spec.labels(columns).cast(pa.int8()), -1).to_numpy(
            zero_copy_only=False
        )
        flipped, source = change.flipped[columns[_ROW].to_numpy()], np.arange(len(labels))
        for label in (0, 1):
            chosen = flipped & (labels == label)
            if chosen.any():
                other = np.flatnonzero(labels == 1 - label)
                if not len(other):
                    raise OneLabel(f"all rows have the same label, {label}")
                source[chosen] = other[0]
        return {**columns, self.spec.label: columns[self.spec.label].take(pa.array(source))}

    def compute(
        self, columns: Columns, state: FittedState, wanted: Iterable[ColumnSpec]
    ) -> Columns:
        """Returns the wanted columns of the table for the kept rows, and after them for the drawn negatives."""
        features, keys = Features(self.spec, state, ahead=False), row_keys(columns, self.spec)
        splits, folds = split_of(columns, keys, self.spec), fold_keys(columns, keys, self.spec)
        if self._negatives:
            columns = {
                name: pa.concat_arrays([values, self._negatives[name]])
                for name, values in columns.items()
            }
        source = self.made_from
        extras = features.extras(columns, keys[source], splits[source], folds[source])
        return {
            column.name: stored(
                features.run(column, column.left_to_spark, columns, extras), self.spec, column
            )
            for column in wanted
        }

    def learn(self, columns: Columns, removed: Mask, keys: Iterable[str]) -> dict[str, pa.Table]:
        """Returns what the operators with these state keys learn from the rows that are not removed."""
        keys = set(keys)
        spec = replace(
            self.spec,
            columns=tuple(
                column
                for column in self.spec.columns
                if column.role == "label" or any(key in keys for key, _, _ in column.fitted)
            ),
        )
        remaining = pa.array(self.learned_from & ~removed[self.row_numbers])
        columns = {name: values.filter(remaining) for name, values in columns.items()}
        tables: dict[str, Any] = {
            key: table for key, table in self.state.tables.items() if key not in keys
        }

        def count(level: int, state: FittedState, _: object = None) -> Sums:
            counts = CountsOfRows(spec, level, Features(spec, state, ahead=False))
            counted = pa.Table.from_batches(
                counts.count_selected(columns, row_keys(columns, spec)), COUNTS
            )
            return Sums(
                counted.group_by(["key", "value"])
                .aggregate([("count", "sum")])
                .rename_columns(COUNTS.names)
            )

        for level in range(spec.levels):
            sums = count(level, FittedState(tables=tables))
            chosen = {
                number: sums.of(number)
                for number, learned in enumerate(spec.fitted)
                if learned.level == level and learned.key in keys
            }
            for number, closer in closer_sums(count, spec, tables, chosen).items():
                op = spec.fitted[number].op
                if op.least > 1:
                    closer = closer.filter(pc.greater_equal(closer["count"], op.least))  # noqa: PLW2901
                tables[spec.fitted[number].key] = op.learn(closer)
        return {key: tables[key] for key in keys}

    @cached_property
    def written(self) -> Mask:
        """Which of the kept rows this job wrote to its files.

        Files have another order than the input, so rows are compared by the texts of their values. Equal rows are
        counted: if the files have two of three equal rows, the first two match. A row with drawn negatives matches only
        if the files have all of them, too."""
        splits = np.array([*self.spec.table.split, ""])
        computable = [
            column for column in self.spec.columns if set(column.sources) <= self.columns.keys()
        ]
        values = self.compute(self.columns, self.state, computable)
        # How often each text is in the files and has not matched yet.
        unmatched = self._count_rows_in_files(list(values))
        texts: list[list[tuple[str, ...]]] = [[] for _ in self.row_numbers]
        for row, text in zip(
            self.made_from, _row_texts(values, splits[self.splits][self.made_from]), strict=True
        ):
            texts[row].append(text)
        matches = np.zeros(len(texts), bool)
        for row in np.flatnonzero(self._available[self.row_numbers]):
            if all(unmatched[text] > 0 for text in texts[row]):
                matches[row] = True
                unmatched.subtract(texts[row])
        return matches

    def _count_rows_in_files(self, names: list[str]) -> Counter[tuple[str, ...]]:
        """Counts the rows of this job's files by their text: some columns, and the split."""
        store, counts = TableStore(self.table.uri), Counter[tuple[str, ...]]()
        for file in self.table.record.files:
            with store.fs.open_input_file(store.path(file.path)) as opened:
                columns = _columns(pq.read_table(opened, columns=names))
                counts.update(_row_texts(columns, [file.split] * file.rows))
        return counts

    @cached_property
    def learned_from(self) -> Mask:
        """Which of the kept rows this job learned from, including those whose features it then rejected."""
        keys, learned_from = row_keys(self.columns, self.spec), self.written.copy()
        features = Features(self.spec, self.state, ahead=False)
        folds = fold_keys(self.columns, keys, self.spec)
        extras = features.extras(self.columns, keys, self.splits, folds)
        rejected = features.rejected_after_learning(self.columns, extras)
        for flags in rejected.values():
            learned_from[flags] = True
        return learned_from


def _columns(table: pa.Table) -> Columns:
    return {name: join_chunks(table[name]) for name in table.column_names}


def _row_texts(columns: Columns, splits: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yields each row as texts. Two texts are equal if the values are equal to the last bit."""
    return zip(
        *(map(repr, values.to_pylist()) for values in columns.values()), splits, strict=False
    )


def _make_changes(
    part: TablePart, count: int, flips: int, draw: np.random.Generator
) -> Iterator[Change]:
    """Yields the changes that show leaks in one part of a table. The input has `count` rows."""
    spec, written = part.spec, np.zeros(count, bool)
    written[part.row_numbers[part.written]] = True
    splits = np.full(count, -1)
    splits[part.row_numbers] = part.splits
    drawn = draw.permutation(np.flatnonzero(written))
    change = partial(Change, flipped=np.zeros(count, bool), removed=np.zeros(count, bool))
    for row in drawn[:flips]:
        this_row = np.arange(count) == row
        yield change(
            leak="its own label",
            flipped=this_row,
            keeps_features=this_row,
            learns_again=lambda fitted_op: _uses_label(fitted_op, spec),
        )
    yield change(
        leak="its own label, with all flipped at once",
        flipped=written,
        keeps_features=written,
        runs_rules=False,
    )
    yield from _change_other_splits(spec, splits, written, change)
    if spec.table.unlabelled:
        # A row without a label is in the last split. As in serving, its features may use all that was learned.
        written = written & (splits != len(spec.table.split) - 1)
    yield from _change_later_rows(part, written, drawn[:_MOMENTS], change)


def _change_other_splits(
    spec: Spec, splits: npt.NDArray[np.int_], written: Mask, change: partial[Change]
) -> Iterator[Change]:
    """Yields changes of the splits that are not the training split. Training rows must not depend on them."""
    training = written & (splits == list(spec.table.split).index(spec.table.training))
    for number, name in enumerate(spec.table.split):
        others = splits == number
        if name == spec.table.training or not others.any():
            continue
        yield change(
            leak=f"labels of split {name!r}",
            flipped=others,
            keeps_features=training,
            keeps_states=True,
            learns_again=lambda _: True,
        )
        yield change(
            leak=f"rows of split {name!r}",
            removed=others,
            keeps_features=training,
            keeps_states=True,
            learns_again=lambda fitted_op: not fitted_op.op.of_all_splits,
            runs_rules=False,
        )


def _change_later_rows(
    part: TablePart, written: Mask, rows: Iterable[int], change: partial[Change]
) -> Iterator[Change]:
    """Yields changes of the input after the moment of each of these rows. The rows up to that moment must keep their
    features."""
    ranks = _rank_times(part, len(written))
    if not len(ranks):
        return
    for row in rows:
        now = ranks[:, [row]]
        change_now = partial(
            change,
            keeps_features=written & (ranks <= now).all(axis=0),
        )
        kept_row = int(np.flatnonzero(part.row_numbers == row)[0])
        yield change_now(
            leak="rows of later moments",
            removed=(ranks > now).all(axis=0),
            side_ends={
                join.time: part.columns[join.time][kept_row].as_py()
                for join in part.spec.rows.joins
                if join.time
            },
        )
        yield change_now(
            leak="labels of the same moment, or later ones", flipped=(ranks >= now).all(axis=0)
        )


def _rank_times(part: TablePart, count: int) -> npt.NDArray[np.int_]:
    """Returns the rank of each row of the input in each column that orders rows by time: an array for each column.

    The rank of a missing time is 0, and that of a row which is not kept is -1."""
    spec = part.spec
    names = [
        *(history.order for history in spec.rows.histories),
        *(join.time for join in spec.rows.joins if join.time),
    ]
    ranks = np.full((len(names), count), -1)
    for number, name in enumerate(names):
        values = part.columns[name]
        if pa.types.is_floating(values.type):
            # Spark sorts NaN as the largest number.
            values = pc.if_else(pc.is_nan(values), np.inf, values)
        rank = pc.rank(values, "ascending", tiebreaker="dense").to_numpy()
        ranks[number, part.row_numbers] = np.where(
            values.is_valid().to_numpy(zero_copy_only=False), rank, 0
        )
    return ranks


def _uses_label(fitted_op: Learned, spec: Spec) -> bool:
    """Returns whether an operator learns from labels."""
    return "label" in fitted_op.op.needs or any(
        spec.label in column.sources for column, _ in fitted_op.users
    )


class Versions:
    """The versions of a table. Each is opened and recomputed when it is first needed, from its own input."""

    def __init__(self, uri: str, inputs: Sequence[Sequence[str]], rules: RuleRunner) -> None:
        self._uri, self._inputs, self._rules = uri, inputs, rules
        self._opened: dict[int, tuple[FeatureTable, pa.Table]] = {}
        self._parts: dict[int, TablePart] = {}

    def open(self, version: int) -> tuple[FeatureTable, pa.Table]:
        """Returns a version's table, and the rows that it was made from."""
        if version not in self._opened:
            table = FeatureTable.open(self._uri, version)
            self._opened[version] = table, _read_rows(table.spec(), self._inputs[version])
        return self._opened[version]

    def part(self, version: int) -> TablePart:
        """Returns the rows that the job of a version wrote."""
        if version not in self._parts:
            table, rows = self.open(version)
            available = np.ones(rows.num_rows, bool)
            appended_to = [r.version for r in table.records.values() if r.version < version]
            if appended_to:
                available[: self.open(max(appended_to))[1].num_rows] = False
            self._parts[version] = TablePart(table, rows, self._rules, available)
        return self._parts[version]

    def find_first(self, version: int, key: str) -> int:
        """Returns the first of the consecutive versions up to this one that have the same state of `key`."""
        with contextlib.suppress(TableError, StateError):
            while version and self._digest(version - 1, key) == self._digest(version, key):
                version -= 1
        return version

    def _digest(self, version: int, key: str) -> str:
        table, _ = self.open(version)
        state = table.state() or FittedState()
        return _digest(state[key]) if key in state.tables else ""


def _read_rows(spec: Spec, inputs: Iterable[str]) -> pa.Table:
    """Returns the rows of the input, numbered in the column `_ROW`."""
    parser, names = InputParser(spec), list(spec.input.columns)
    rows = pa.concat_tables(
        pa.table(dict(parser.parse(batch).columns))
        for path in inputs
        for batch in pq.read_table(path, columns=names).to_batches()
    ).combine_chunks()
    return rows.append_column(_ROW, pa.array(np.arange(rows.num_rows)))


def _digest(table: pa.Table) -> str:
    return digest_of(table.schema, table.to_batches())


def find_leaks(
    table: FeatureTable,
    inputs: Sequence[Sequence[str]],
    engine_for: EngineFor,
    *,
    flips: int,
    seed: int = 0,
) -> list[Leak]:
    """Returns the leaks of a version of a table. Raises `CannotJudge` if the Parquet files in `inputs` do not give all
    of its rows and learned states, because the others cannot be checked.

    `inputs` has the files of each version up to this one. A version's files begin with all rows of the version before
    it, in the same order: an append adds files, and an overwrite writes the rows anew. `flips` is the number of rows
    whose labels are flipped one at a time. `seed` draws these rows."""
    leaks, unlearnable, checked = list[Leak](), set[str](), 0
    draw = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(prefix="sluice-leaks-") as folder:
        versions = Versions(table.uri, inputs, RuleRunner(engine_for, Path(folder)))
        count = versions.open(table.version)[1].num_rows
        for record in sorted(table.records.values(), key=lambda record: record.version):
            part = versions.part(record.version)
            if part.written.any():
                changes = list(_make_changes(part, count, flips, draw))
                unlearnable.update(_check_part(part, versions, leaks, count, changes))
                checked += int(part.written[part.made_from].sum())
    if not leaks and unlearnable:
        raise CannotJudge(
            f"what {' and '.join(sorted(unlearnable))} learned cannot be learned again"
        )
    if not leaks and checked < table.rows:
        raise CannotJudge(f"only {checked:,} of {table.rows:,} rows can be recomputed")
    return leaks


def _find_learners(
    part: TablePart, versions: Versions, count: int
) -> tuple[dict[str, TablePart], list[str]]:
    """Returns the part whose rows give each state again, bit for bit. If no part gives the state of an operator that
    depends on labels, its name is in the second result."""
    learners, unlearnable = dict[str, TablePart](), []
    for fitted_op in part.spec.fitted:
        # A small state may equal an older version's by chance. So the part's own rows are tried first.
        learner = next(
            (
                candidate
                for candidate in _possible_learners(part, versions, fitted_op.key)
                if _learns_the_same(candidate, part, fitted_op.key, count)
            ),
            None,
        )
        if learner is not None:
            learners[fitted_op.key] = learner
        elif _uses_label(fitted_op, part.spec):
            unlearnable.append(f"{fitted_op.op.name} of column {fitted_op.users[0][0].name!r}")
    return learners, unlearnable


def _possible_learners(part: TablePart, versions: Versions, key: str) -> Iterator[TablePart]:
    """Yields the parts that may have learned the state of `key`: the part itself, and that of the first version with
    the same state."""
    yield part
    first = versions.find_first(part.table.version, key)
    if first != part.table.version:
        with contextlib.suppress(TableError, StateError):
            yield versions.part(first)


def _learns_the_same(learner: TablePart, part: TablePart, key: str, count: int) -> bool:
    """Returns whether the rows of `learner` give the state that `part` applies, bit for bit."""
    try:
        again = learner.learn(learner.columns, np.zeros(count, bool), [key])[key]
        return _digest(again) == _digest(part.state[key])
    except (TableError, StateError, KeyError, OSError, pa.ArrowException):
        # The input does not have the columns or rows that the state was learned from.
        return False


def _check_part(
    part: TablePart,
    versions: Versions,
    leaks: list[Leak],
    count: int,
    changes: Sequence[Change],
) -> list[str]:
    """Adds the leaks of one part. Returns the operators that cannot be checked."""
    learners, unlearnable = _find_learners(part, versions, count)
    if learned_from_another_split(part.state, part.spec):
        holds = f"what was learned from the rows of split {part.state.fitted_on!r}"
        leaks += [
            Leak(column=fitted_op.users[0][0].name, holds=holds)
            for fitted_op in part.spec.fitted
            if not fitted_op.op.of_all_splits
        ]
    features = [column for column in part.spec.columns if column.role in MODEL_ROLES]
    parts = list({part, *learners.values()})
    values = part.compute(part.columns, part.state, features)
    # Each part yields its columns after the first change, then after the second, and so on.
    for change, *columns in zip(
        changes, *(part.apply_changes(changes) for part in parts), strict=True
    ):
        changed = dict(zip(parts, columns, strict=True))
        state = _learn_again(part, learners, change, changed)
        checked = (part.written & change.keeps_features[part.row_numbers])[part.made_from]
        changed_values = part.compute(changed[part], state, features)
        for column in features:
            if _is_known(leaks, column.name, change.leak):
                continue
            differs = _find_differences(values[column.name], changed_values[column.name])
            rows = np.flatnonzero(checked & differs)
            if len(rows):
                leaks.append(Leak(column=column.name, holds=change.leak, row=int(rows[0])))
        if change.keeps_states:
            _check_states(part, state, leaks, change.leak)
    return unlearnable


def _is_known(leaks: Iterable[Leak], column: str, holds: str) -> bool:
    return any((leak.column, leak.holds) == (column, holds) for leak in leaks)


def _check_states(part: TablePart, after: FittedState, leaks: list[Leak], leak: str) -> None:
    """Adds a leak for each operator that learned something else after a change."""
    for fitted_op in part.spec.fitted:
        name, key = fitted_op.users[0][0].name, fitted_op.key
        if not _is_known(leaks, name, leak) and _digest(after[key]) != _digest(part.state[key]):
            leaks.append(Leak(column=name, holds=leak))


def _learn_again(
    part: TablePart,
    learners: Mapping[str, TablePart],
    change: Change,
    changed: Mapping[TablePart, Columns],
) -> FittedState:
    """Returns what the operators of a part apply after a change. Each state is learned by its learner."""
    tables = dict[str, Any](part.state.tables)
    for learner, columns in changed.items():
        keys = [
            fitted_op.key
            for fitted_op in part.spec.fitted
            if learners.get(fitted_op.key) is learner and change.learns_again(fitted_op)
        ]
        tables |= learner.learn(columns, change.removed, keys)
    return FittedState(tables=tables)


def _find_differences(values: pa.Array, others: pa.Array) -> Mask:
    """Returns where two columns differ. Values are compared by their texts, so that NaN equals NaN."""
    if values.equals(others):
        return np.zeros(len(values), bool)
    texts = (map(repr, column.to_pylist()) for column in (values, others))
    return np.array([text != other for text, other in zip(*texts, strict=True)], bool)
