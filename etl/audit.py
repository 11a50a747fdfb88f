"""Shows that no feature holds what it must not: `audit_table`, and `audit_spec`, which makes a table first.

The features of a table's rows are recomputed in memory, from the raw input and by the code of a job, and compared with
those in the table. Then the input is changed in ways that no feature may follow: labels are flipped, later rows are
left out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sluice.common.errors import InputError
from sluice.etl.apply.counts import COUNTS, CountsOfRows, selected
from sluice.etl.apply.features import MODEL_ROLES, Features, stored
from sluice.etl.apply.learned_rows import saw_others
from sluice.etl.apply.parse import Parsed
from sluice.etl.jobs.engine import Engine, Sums
from sluice.etl.jobs.job import Job
from sluice.etl.jobs.job_run import run_job
from sluice.etl.ops.user_function import Python
from sluice.etl.spec.columns import ColumnSpec
from sluice.etl.spec.input_section import Input
from sluice.etl.spec.input_values import ARROW_TYPES
from sluice.etl.spec.row_rules import History, Join, RowRules
from sluice.etl.spec.row_split import fold_keys, row_keys, split_of
from sluice.etl.spec.spec import Learned, Spec
from sluice.etl.table.fitted_state import FittedState, StateError, digest_of
from sluice.etl.table.store import TableStore
from sluice.etl.table.table import FeatureTable, TableError

Mask = npt.NDArray[np.bool_]
Columns = dict[str, pa.Array]
EngineFor = Callable[[Job], Engine]
FLIPS, _PIVOTS = 50, 3
_MOST_ROWS = 2_000_000
"""How many rows meet each other in one pass, in all worlds together."""
_ROW, _WORLD, _BY, _FILE, _LINE = (
    f"_audit_{name}" for name in ("row", "world", "by", "file", "line")
)
_KINDS = {kind: name for name, kind in ARROW_TYPES.items()}
LABEL = "made from the label"
_ANEW = "make the table anew from all of its input, with --mode overwrite --refit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """A feature that holds what it must not."""

    column: str
    operator: str
    holds: str
    file: str = ""
    line: int = 0
    before: str = ""
    after: str = ""

    @property
    def text(self) -> str:
        """The text for a person."""
        seen = (
            f": {self.before} becomes {self.after} in {self.file}, line {self.line}"
            if self.file
            else ""
        )
        return f"leak: column {self.column!r}, {self.operator}: it holds {self.holds}{seen}; {self.advice}"

    @property
    def advice(self) -> str:
        """What to do about it."""
        if self.operator == LABEL:
            return "take the label out of what it is made from"
        if ":" in self.operator:
            return "this function sees the label; give it other columns"
        if "split" in self.holds:
            return "learn from the training split alone, and cut the splits by time or by what relates rows"
        if self.operator.startswith("[["):
            return f"order rows by another column than the label, and {_ANEW}"
        return _ANEW


@dataclass(slots=True, kw_only=True)
class Audit:
    """What an audit did and found."""

    version: int
    table_rows: int
    rows: int = 0
    """The rows of the table that were recomputed from the input: of others nothing is said."""
    tried: dict[str, int] = field(default_factory=dict)
    """What was looked for, and in how many changed inputs."""
    leaks: list[Leak] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A change of the input's rows, and the rows whose features it must leave as they are."""

    holds: str
    """What a feature that changes holds, in words."""
    flipped: Mask
    """The rows whose labels are flipped."""
    gone: Mask
    """The rows that are left out."""
    still: Mask
    learns: Callable[[Learned], bool] = lambda _: False
    """Whether an operator learns anew from the changed rows; others keep what they learned."""
    relates: bool = True
    """Whether rows meet other rows anew in joins and histories."""
    keeps_states: bool = False
    """Whether what operators learn must stay as it is, too."""
    until: Mapping[str, Any] = field(default_factory=dict)
    """For columns of time, the last time of which side tables hold rows."""


class Relations:
    """Applies a spec's rules between rows, in several worlds at once."""

    def __init__(self, engine_for: EngineFor, folder: Path) -> None:
        self._engine_for, self._folder = engine_for, folder
        self._numbers = itertools.count()

    def distinct(self, rows: pa.Table, spec: Spec) -> pa.Table:
        """Returns the rows that `dedup` keeps."""
        if spec.rows.dedup is None:
            return rows
        by = spec.rows.dedup.by or tuple(spec.input.columns)
        return self._pass(rows, spec, RowRules(dedup=replace(spec.rows.dedup, by=by)))

    def of(
        self, spec: Spec, worlds: Sequence[tuple[pa.Table, Mapping[str, Any]]]
    ) -> Iterator[pa.Table]:
        """Yields the rows of each world with the columns that joins and histories add. A world is its rows, and the
        last times of side tables."""
        rows = pa.concat_tables(
            part.append_column(_WORLD, pa.array(np.full(part.num_rows, number)))
            for number, (part, _) in enumerate(worlds)
        )
        if spec.rows.joins:
            ends = [until for _, until in worlds]
            rows = self._pass(
                rows,
                spec,
                RowRules(joins=tuple(self._apart(join, ends) for join in spec.rows.joins)),
            )
        rest = list(spec.rows.histories)
        while rest:
            ready = list[History]()
            while (
                rest and rest[0].by in rows.column_names
            ):  # worlds are kept apart by other values of `by`
                name = f"{_BY}{len(ready)}"
                codes = (
                    rows[rest[0].by].combine_chunks().dictionary_encode().indices.cast(pa.int64())
                )
                rows = rows.append_column(
                    name, pc.add(pc.multiply(codes, len(worlds)), rows[_WORLD])
                )
                ready.append(replace(rest.pop(0), by=name))
            rows = self._pass(rows, spec, RowRules(histories=tuple(ready)))
        for number in range(len(worlds)):
            yield rows.filter(pc.equal(rows[_WORLD], number))

    def _pass(self, rows: pa.Table, spec: Spec, rules: RowRules) -> pa.Table:
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
        engine = self._engine_for(job)
        try:
            found = engine.sample(rows.num_rows)
        finally:
            engine.close()
        return pa.table(
            {
                name: values
                if values.type in _KINDS
                else values.cast(pa.list_(values.type.value_type))
                for name, values in found.items()
                if not name.startswith(_BY)
            }
        )

    def _apart(self, join: Join, ends: Sequence[Mapping[str, Any]]) -> Join:
        """Returns the join with a side table for each world, without the side rows that are too late for it."""
        from sluice.etl.spark.joins import write_until

        path = str(self._folder / f"{next(self._numbers)}")
        write_until(join, [end.get(join.time or "") for end in ends], _WORLD, path)
        return replace(join, path=path, format="parquet", on=(*join.on, _WORLD), fields=())


class Recomputed:
    """A job's part of the table, recomputed from the input's rows."""

    def __init__(
        self, table: FeatureTable, rows: pa.Table, relations: Relations, free: Mask
    ) -> None:
        """Only the `free` rows can be this job's."""
        self.table, self._relations = table, relations
        self._free = free
        self.spec = replace(table.spec(), identity=table.record.identity)
        self.state = table.state() or FittedState()
        self._count, self._rows = rows.num_rows, relations.distinct(rows, self.spec)
        whole = self._rows
        if self.spec.rows.relational:
            whole = next(relations.of(self.spec, [(self._rows, {})]))
        kept, _ = selected(self.spec, Parsed(_columns(whole), whole.num_rows, []))
        self.numbers = kept[_ROW].to_numpy()
        """The number of each row that filters and the sample leave."""
        self.columns = kept
        self.origin, self._drawn = np.arange(len(self.numbers)), Columns()
        if self.spec.rows.negatives:
            drawn, self.origin = self.spec.rows.negatives.drawn(
                kept, self.spec.label, row_keys(kept, self.spec), self.state["rows/negatives/0"]
            )
            self._drawn = {name: values.slice(len(self.numbers)) for name, values in drawn.items()}
        self.split = split_of(kept, row_keys(kept, self.spec), self.spec)

    def in_worlds(self, worlds: Sequence[World]) -> Iterator[Columns]:
        """Yields the columns of its rows in each world, with nulls in removed rows."""
        related = self.spec.rows.relational
        meeting = [
            (
                pa.table(self._flipped(world, _columns(self._rows))).filter(
                    pa.array(~world.gone[self._rows[_ROW].to_numpy()])
                ),
                world.until,
            )
            for world in worlds
            if world.relates and related
        ]
        met = self._relations.of(self.spec, meeting) if meeting else iter(())
        for world in worlds:
            if not (world.relates and related):
                yield self._flipped(world, self.columns)
                continue
            found, place = next(met), np.full(self._count, -1)
            place[found[_ROW].to_numpy()] = np.arange(found.num_rows)
            at = place[self.numbers]
            yield _columns(found.select(list(self.columns)).take(pa.array(at, mask=at < 0)))

    def _flipped(self, world: World, columns: Columns) -> Columns:
        made = pc.fill_null(self.spec.labels(columns).cast(pa.int8()), -1).to_numpy(
            zero_copy_only=False
        )
        flipped, take = world.flipped[columns[_ROW].to_numpy()], np.arange(len(made))
        for label in (0, 1):
            if (flipped & (made == label)).any():
                other = np.flatnonzero(made == 1 - label)
                if not len(other):
                    raise InputError(
                        f"all rows have the same label, {label}: an audit needs rows of both"
                    )
                take[flipped & (made == label)] = other[0]
        labels = columns[self.spec.label].take(pa.array(take))
        return {**columns, self.spec.label: labels}

    def values(self, columns: Columns, state: FittedState, wanted: Iterable[ColumnSpec]) -> Columns:
        """Returns some columns of the table for its rows, and then for their drawn negatives."""
        features, columns, extras = self._ready(columns, state)
        return {
            column.name: stored(
                features.run(column, column.left_to_spark, columns, extras), self.spec, column
            )
            for column in wanted
        }

    def _ready(
        self, columns: Columns, state: FittedState
    ) -> tuple[Features, Columns, Mapping[str, pa.Array]]:
        keys = row_keys(columns, self.spec)
        split, folds = split_of(columns, keys, self.spec), fold_keys(columns, keys, self.spec)
        if self._drawn:
            columns = {
                name: pa.concat_arrays([values, self._drawn[name]])
                for name, values in columns.items()
            }
        features = Features(self.spec, state, ahead=False)
        return (
            features,
            columns,
            features.extras(columns, keys[self.origin], split[self.origin], folds[self.origin]),
        )

    def blame(
        self, column: ColumnSpec, row: int, *sides: tuple[Columns, FittedState]
    ) -> tuple[str, str, str]:
        """Returns the first operator, or rule on rows, after which a column's value in a row differs on two sides, and
        both values after the last."""
        steps, chains = column.left_to_spark, list[list[str]]()
        for features, columns, extras in (self._ready(*side) for side in sides):
            chains.append(
                [
                    repr(features.run(column, steps[:number], columns, extras)[row].as_py())
                    for number in range(len(steps) + 1)
                ]
            )
        differ = [one != other for one, other in zip(*chains, strict=True)]
        return (
            self._step(column, differ.index(True) if any(differ) else len(steps)),
            chains[0][-1],
            chains[1][-1],
        )

    def _step(self, column: ColumnSpec, number: int) -> str:
        op = column.ops[max(0, number - 1)] if column.ops else None
        if isinstance(op, Python):
            return op.function
        if op and number:
            return op.name
        for history in self.spec.rows.histories:
            if history.name in column.sources:
                return f"[[{'lag' if history.lag else 'history'}]] {history.name}"
        for join in self.spec.rows.joins:
            if join.columns.keys() & set(column.sources):
                return f"[[join]] {join.path}"
        return LABEL

    def learned(self, columns: Columns, gone: Mask, wanted: Iterable[str]) -> dict[str, pa.Table]:
        """Returns what the operators of these keys learn from the rows that remain."""
        wanted = set(wanted)
        spec = replace(
            self.spec,
            columns=tuple(
                column
                for column in self.spec.columns
                if column.role == "label" or any(key in wanted for key, _, _ in column.fitted)
            ),
        )
        there = pa.array(self.learners & ~gone[self.numbers])
        columns = {name: values.filter(there) for name, values in columns.items()}
        tables: dict[str, Any] = {
            key: table for key, table in self.state.tables.items() if key not in wanted
        }
        for level in range(spec.levels):
            counts = CountsOfRows(
                spec, level, Features(spec, FittedState(tables=tables), ahead=False)
            )
            found = pa.Table.from_batches(
                counts.count_selected(columns, row_keys(columns, spec)), COUNTS
            )
            sums = Sums(
                found.group_by(["key", "value"])
                .aggregate([("count", "sum")])
                .rename_columns(COUNTS.names)
            )
            for number, one in enumerate(spec.fitted):
                if one.level == level and one.key in wanted:
                    mine = sums.of(number)
                    enough = pc.greater_equal(mine["count"], one.op.least)
                    tables[one.key] = one.op.learn(
                        mine.filter(enough) if one.op.least > 1 else mine
                    )
        return {key: tables[key] for key in wanted}

    @cached_property
    def mine(self) -> Mask:
        """Which of the rows are in this job's files, with the recomputed features."""
        store, splits = TableStore(self.table.uri), np.array([*self.spec.table.split, ""])
        there = [
            column for column in self.spec.columns if set(column.sources) <= self.columns.keys()
        ]
        values = self.values(self.columns, self.state, there)
        held = Counter[tuple[str, ...]]()
        for file in self.table.record.files:
            with store.fs.open_input_file(store.path(file.path)) as opened:
                held.update(
                    _texts(
                        _columns(pq.read_table(opened, columns=list(values))),
                        [file.split] * file.rows,
                    )
                )
        with_drawn: list[list[tuple[str, ...]]] = [[] for _ in self.numbers]
        for row, text in zip(
            self.origin, _texts(values, splits[self.split][self.origin]), strict=True
        ):
            with_drawn[row].append(text)
        found = np.zeros(len(self.numbers), bool)
        for number, texts in enumerate(with_drawn):
            found[number] = self._free[self.numbers[number]] and all(
                held[text] > 0 for text in texts
            )
            if found[number]:
                held.subtract(texts)
        return found

    @cached_property
    def learners(self) -> Mask:
        """Which of the rows this job learned from, including those whose features it then rejected."""
        keys, learners = row_keys(self.columns, self.spec), self.mine.copy()
        late = Features(self.spec, self.state, ahead=False).late_unfit(
            self.columns, keys, self.split, fold_keys(self.columns, keys, self.spec)
        )
        for rejected in late.values():
            learners[rejected] = True
        return learners


def _columns(table: pa.Table) -> Columns:
    table = table.combine_chunks()
    return {
        name: column.chunk(0) if column.num_chunks else pa.array([], column.type)
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def _texts(columns: Columns, *more: Iterable[Any]) -> Iterator[tuple[str, ...]]:
    """Returns each row as texts, which are equal if all values are equal to the last bit."""
    return zip(*(map(repr, values.to_pylist()) for values in columns.values()), *more, strict=False)


def _worlds(part: Recomputed, rows: int, flips: int, draw: np.random.Generator) -> Iterator[World]:
    """Yields the changes of the input that show what one part's features hold."""
    spec, split = part.spec, np.full(rows, -1)
    mine, none = np.zeros(rows, bool), np.zeros(rows, bool)
    mine[part.numbers[part.mine]] = True
    split[part.numbers] = part.split
    drawn = draw.permutation(np.flatnonzero(mine))
    for row in drawn[: min(flips, max(1, _MOST_ROWS // rows)) if spec.rows.relational else flips]:
        one = np.arange(rows) == row
        yield World(
            holds="its own label",
            flipped=one,
            gone=none,
            still=one,
            learns=lambda learned: _by_label(learned, spec),
        )
    yield World(
        holds="its own label, with all flipped at once",
        flipped=mine,
        gone=none,
        still=mine,
        relates=False,
    )
    names = list(spec.table.split)
    for number, name in enumerate(names):
        others = split == number
        if name == spec.table.training or not others.any():
            continue
        training = mine & (split == names.index(spec.table.training))
        yield World(
            holds=f"labels of split {name!r}",
            flipped=others,
            gone=none,
            still=training,
            learns=lambda _: True,
            keeps_states=True,
        )
        yield World(
            holds=f"rows of split {name!r}",
            flipped=none,
            gone=others,
            still=training,
            relates=False,
            learns=lambda learned: not learned.op.of_all_splits,
            keeps_states=True,
        )
    past = any("time" in op.needs for column in spec.columns for op in column.ops)
    times = [
        *([spec.table.split_time or ""] if past else []),
        *(history.order for history in spec.rows.histories),
        *(join.time for join in spec.rows.joins if join.time),
    ]
    if not times:
        return
    ranks = np.full((len(times), rows), -1)
    for number, name in enumerate(times):
        values = part.columns[name]
        if pa.types.is_floating(values.type):
            values = pc.if_else(pc.is_nan(values), np.inf, values)  # as Spark sorts it
        rank = pc.rank(values, "ascending", tiebreaker="dense").to_numpy()
        ranks[number, part.numbers] = np.where(
            values.is_valid().to_numpy(zero_copy_only=False), rank, 0
        )
    if (
        spec.table.unlabelled
    ):  # such a row is treated as a server treats it, by all that is known in the end
        mine &= split != len(names) - 1
    for row in drawn[:_PIVOTS]:
        mark, place = ranks[:, [row]], int(np.flatnonzero(part.numbers == row)[0])
        still = mine & _all(ranks <= mark)
        until = {
            join.time: part.columns[join.time][place].as_py()
            for join in spec.rows.joins
            if join.time
        }
        yield World(
            holds="rows of later moments",
            flipped=none,
            gone=_all(ranks > mark),
            still=still,
            until=until,
            learns=lambda learned: "time" in learned.op.needs,
        )
        yield World(
            holds="labels of the same moment, or later ones",
            flipped=_all(ranks >= mark),
            gone=none,
            still=still,
            learns=lambda learned: "time" in learned.op.needs,
        )


def _by_label(learned: Learned, spec: Spec) -> bool:
    """Returns whether an operator learns from labels."""
    return "label" in learned.op.needs or any(
        spec.label in column.sources for column, _ in learned.users
    )


def _all(of_each_time: Mask) -> Mask:
    return np.asarray(of_each_time.all(axis=0))


class _Versions:
    """The versions of a table up to one, as parts that are made when they are needed."""

    def __init__(self, table: FeatureTable, rows: pa.Table, relations: Relations) -> None:
        self.table, self._relations = table, relations
        self._tables = {table.version: (table, rows)}
        self._parts: dict[int, Recomputed] = {}

    def table_of(self, version: int) -> tuple[FeatureTable, pa.Table]:
        """Returns a version, and the rows with the column names of its spec."""
        if version not in self._tables:
            later, rows = self.table_of(version + 1)
            table = FeatureTable.open(later.uri, version, allow_code=later.permission)
            was, had = later.spec().input.was, table.spec().input.columns
            rows = rows.rename_columns(
                [name if name in had else was.get(name, name) for name in rows.column_names]
            )
            for name, kind in had.items():
                if name in rows.column_names:
                    number = rows.column_names.index(name)
                    rows = rows.set_column(number, name, rows[name].cast(ARROW_TYPES[kind]))
            self._tables[version] = table, rows
        return self._tables[version]

    def part(self, version: int) -> Recomputed:
        if version not in self._parts:
            table, rows = self.table_of(version)
            free, live = (
                np.ones(rows.num_rows, bool),
                [record.version for record in self.table.records.values()],
            )
            for earlier in sorted(live) if version in live else ():
                if earlier < version:
                    part = self.part(earlier)
                    free[part.numbers[part.mine]] = False
            self._parts[version] = Recomputed(table, rows, self._relations, free)
        return self._parts[version]

    def learned_at(self, version: int, key: str) -> int:
        """Returns the version that learned what a later one applies."""
        with contextlib.suppress(TableError, StateError):
            while version and self._state(version - 1, key) == self._state(version, key):
                version -= 1
        return version

    def _state(self, version: int, key: str) -> str:
        """Returns the digest of what a version learned."""
        table, _ = self.table_of(version)
        state = table.state() or FittedState()
        return _digest(state[key]) if key in state.tables else ""


def _digest(table: pa.Table) -> str:
    return digest_of(table.schema, table.to_batches())


def audit_table(
    table: FeatureTable,
    inputs: Sequence[str],
    engine_for: EngineFor,
    *,
    flips: int = FLIPS,
    seed: int = 0,
) -> Audit:
    """Audits a version of a table by the inputs that it was made from. Raises an InputError if these inputs do not give
    all of its rows and learned states, because nothing can then be said of the others."""
    if importlib.util.find_spec("sluice.etl.local") is None:
        raise InputError(
            "an audit reads its input with the local engine, which this installation lacks"
        )
    from sluice.etl.local.sample import numbered_rows

    rows = numbered_rows(table.spec(), tuple(inputs), _FILE, _LINE)
    places = rows.select([_FILE, _LINE])
    rows = rows.drop_columns([_FILE, _LINE]).append_column(_ROW, pa.array(np.arange(rows.num_rows)))
    audit, draw = Audit(version=table.version, table_rows=table.rows), np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(prefix="sluice-audit-") as folder:
        versions = _Versions(table, rows, Relations(engine_for, Path(folder)))
        lost: list[str] = []
        for record in sorted(table.records.values(), key=lambda record: record.version):
            part = versions.part(record.version)
            if not part.mine.any():
                continue
            worlds = list(_worlds(part, len(places), flips, draw))
            lost += _audit_part(part, versions, audit, places, worlds)
            audit.rows += int(part.mine[part.origin].sum())
            for world in worlds:
                audit.tried[world.holds] = audit.tried.get(world.holds, 0) + 1
    if not audit.leaks and (lost or audit.rows < table.rows):
        what = (
            f"what {' and '.join(sorted(set(lost)))} learned cannot be learned again"
            if lost
            else f"only {audit.rows:,} of {table.rows:,} rows can be recomputed"
        )
        raise InputError(
            f"{table.uri}: {what} from {', '.join(inputs)}, so that nothing can be said of version "
            f"{table.version}; name all files that it was made from, or {_ANEW}"
        )
    return audit


def _sources(
    part: Recomputed, versions: _Versions, count: int
) -> tuple[dict[str, Recomputed], list[str]]:
    """Returns the part that learned each state which can be learned again, bit for bit. For the others that depend on
    labels or times, it returns their names."""
    found, lost = dict[str, Recomputed](), []
    for one in part.spec.fitted:
        # A small state may equal an older version's by chance. So the part's own rows are tried first.
        source = next(
            (
                learner
                for learner in _possible_sources(part, versions, one.key)
                if _learns_again(learner, part, one.key, count)
            ),
            None,
        )
        if source is not None:
            found[one.key] = source
        elif "time" in one.op.needs or _by_label(one, part.spec):
            lost.append(f"{one.op.name} of column {one.users[0][0].name!r}")
    return found, lost


def _possible_sources(part: Recomputed, versions: _Versions, key: str) -> Iterator[Recomputed]:
    """Yields the parts that may have learned the state of `key`: the part itself, and the first version with the same
    state."""
    yield part
    first = versions.learned_at(part.table.version, key)
    if first != part.table.version:
        with contextlib.suppress(TableError, StateError):
            yield versions.part(first)


def _learns_again(learner: Recomputed, part: Recomputed, key: str, count: int) -> bool:
    """Returns whether the rows of `learner` give the state that `part` applies, bit for bit."""
    try:
        again = learner.learned(learner.columns, np.zeros(count, bool), [key])[key]
        return _digest(again) == _digest(part.state[key])
    except (TableError, StateError, KeyError, OSError, pa.ArrowException):
        return False  # what it was learned from is not there any more


def _audit_part(
    part: Recomputed, versions: _Versions, audit: Audit, places: pa.Table, worlds: Sequence[World]
) -> list[str]:
    """Adds the leaks of one part of a version. Returns the operators that cannot be audited."""
    sources, lost = _sources(part, versions, len(places))
    features = [column for column in part.spec.columns if column.role in MODEL_ROLES]
    if saw_others(part.state, part.spec):
        holds = f"what was learned from the rows of split {part.state.fitted_on!r}"
        audit.leaks += [
            Leak(column=one.users[0][0].name, operator=one.op.name, holds=holds)
            for one in part.spec.fitted
            if not one.op.of_all_splits
        ]
    base, parts = (part.columns, part.state), list({part, *sources.values()})
    as_it_is, known = (
        part.values(*base, features),
        {(leak.column, leak.holds) for leak in audit.leaks},
    )
    for world, *changed in zip(worlds, *(one.in_worlds(worlds) for one in parts), strict=True):
        columns, tables = dict(zip(parts, changed, strict=True)), dict[str, Any](part.state.tables)
        for source in parts:
            tables |= source.learned(
                columns[source],
                world.gone,
                [
                    one.key
                    for one in part.spec.fitted
                    if sources.get(one.key) is source and world.learns(one)
                ],
            )
        after = columns[part], FittedState(tables=tables)
        still = part.mine[part.origin] & world.still[part.numbers[part.origin]]
        for column, values in zip(features, part.values(*after, features).values(), strict=True):
            if (column.name, world.holds) in known or values.equals(as_it_is[column.name]):
                continue
            rows = np.flatnonzero(still & (_reprs(values) != _reprs(as_it_is[column.name])))
            if len(rows):
                known.add((column.name, world.holds))
                place = int(part.numbers[part.origin[rows[0]]])
                operator, *seen = part.blame(column, int(rows[0]), base, after)
                audit.leaks.append(
                    Leak(
                        column=column.name,
                        operator=operator,
                        holds=world.holds,
                        before=seen[0],
                        after=seen[1],
                        file=places[_FILE][place].as_py(),
                        line=places[_LINE][place].as_py(),
                    )
                )
        for one in part.spec.fitted if world.keeps_states else ():
            name = one.users[0][0].name
            if (name, world.holds) not in known and _digest(after[1][one.key]) != _digest(
                part.state[one.key]
            ):
                known.add((name, world.holds))
                audit.leaks.append(Leak(column=name, operator=one.op.name, holds=world.holds))
    return lost


def _reprs(values: pa.Array) -> npt.NDArray[np.object_]:
    return np.array([repr(value) for value in values.to_pylist()], object)


def audit_spec(
    spec: Spec, inputs: Sequence[str], engine_for: EngineFor, *, flips: int = FLIPS, seed: int = 0
) -> Audit:
    """Audits the table that a spec makes of these inputs, in a folder that is removed again."""
    with tempfile.TemporaryDirectory(prefix="sluice-audit-") as folder:
        job = Job(
            spec=spec,
            inputs=tuple(inputs),
            store=TableStore(Path(folder) / "table"),
            max_rejects=1.0,
        )
        run_job(job, engine_for(job))
        table = FeatureTable.open(job.store.uri, allow_code=spec.permission)
        return audit_table(table, inputs, engine_for, flips=flips, seed=seed)
