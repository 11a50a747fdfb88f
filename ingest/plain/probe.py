"""Examines columns of plain Parquet by the statistics in footers and a few rows: `probe`. `check_values` and
`unreadable` reject values that would stop a loader later or be lost."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.ops.base import as_one_column, plain
from sluice.etl.ops.chain import applied, lacks, reading
from sluice.etl.ops.hashing import Flags
from sluice.etl.spec.nested_columns import flattened, is_bytes, is_list, join_chunks, parts
from sluice.etl.table.table_columns import FileColumns, TableParquet
from sluice.ingest.columns import ColumnError, Columns
from sluice.ingest.flow.number_types import ValueRefused, filled_numbers
from sluice.ingest.plain.footer_chunks import check_chunks, group_rows
from sluice.ingest.plain.made_columns import MadeColumns
from sluice.ingest.plain.recipe import Recipe, typed
from sluice.ingest.plain.roles import ParquetError

_FILES = 8
_GROUPS = 32
_ROWS = 20_000
_CHUNKS = 20_000
"""How much is examined at most: files, evenly spread; row groups of each file; rows of the first and of the last file
(half of them from its last row groups); and column chunks in all, roughly."""
_CELLS, _LEAST_ROWS = 4_000_000, 1_000
"""Roughly how many values are read of a file, and of how many rows at least. Wide tables get fewer rows."""
_MOST_ID, _LARGEST = np.iinfo(np.int32).max, float(np.finfo(np.float32).max)
# Arrow joins no texts of two types, and finds no smallest half float.
_COMMON = {pa.large_string(): pa.string(), pa.float16(): pa.float32()}
_CHECKED_ROWS = 10_000  # rows of a file that `unreadable` checks
# This share of unreadable values causes a warning, as in a job for a first version.
_WARNED_SHARE = 0.05
# Above this share the column is rejected, because its format is probably wrong.
_REFUSED_SHARE = 0.5
_QUOTED = 100  # characters of a value to quote
Files = Mapping[str, FileColumns]
"""The paths of files, each with where it has the columns."""
Place = tuple[str, int]
"""A file, and the number of a row group in it."""


@dataclass(slots=True)
class ColumnFacts:
    """What is known about a column."""

    type: pa.DataType
    nulls: list[Place] = field(default_factory=list)
    """Places in which values are missing."""
    low: Any = None
    """The smallest value, or the smallest element of a list. None: unknown."""
    high: Any = None
    low_place: Place = ("", 0)
    high_place: Place = ("", 0)
    unusable: bool = False
    """Whether the sampled floats include NaN or infinity."""
    values: int = 0
    """The number of values in the sampled rows."""
    distinct: int = 0
    """The number of distinct values in the sampled rows."""
    sampled: pa.Array | None = field(default=None, repr=False)
    """The column in the sampled rows, null where a value is missing. All columns have the same rows."""
    optional: bool = False
    """Whether some file lacks the column."""
    known: bool = True
    """Whether all examined footers have the smallest and the largest value."""
    texts: pa.Array | None = field(default=None, repr=False)
    """For a column of a log whose cells are not all texts: the cells that are. Null in other rows."""
    places: Sequence[str] = field(default=(), repr=False)
    """For a log: the file and the line of each sampled row."""

    def widen(self, low: Any, high: Any, place: Place) -> None:
        if self.low is None or low < self.low:
            self.low, self.low_place = low, place
        if self.high is None or high > self.high:
            self.high, self.high_place = high, place

    @classmethod
    def of_log(cls, values: pa.Array, texts: pa.Array | None, places: Sequence[str]) -> ColumnFacts:
        """Returns what a column of a log shows. A text that does not fit counts as no missing value."""
        facts = cls(values.type, texts=texts, places=places)
        facts.add_sample(values, has_range=False)
        lost = 0 if texts is None else is_lost(texts, values).sum()
        if values.null_count > lost:
            facts.nulls.append(("", 0))
        return facts

    def add_sample(self, values: pa.Array, *, has_range: bool) -> None:
        """Adds the column in the sampled rows. Without `has_range`, they show the smallest and the largest value."""
        there = elements(values).drop_null()
        self.sampled, self.values, self.distinct = values, len(there), len(there.unique())
        if pa.types.is_floating(values.type):
            self.unusable = bool(pc.any(pc.invert(pc.is_finite(there))).as_py())
        if not has_range and len(there):
            ends = pc.min_max(there)
            self.widen(_plain(ends["min"].as_py()), _plain(ends["max"].as_py()), ("", 0))


def probe(
    files: Files,
    names: Iterable[str],
    *,
    rows: int = _ROWS,
    common: Mapping[str, pa.DataType] = MappingProxyType({}),
    every: bool = False,
) -> dict[str, ColumnFacts]:
    """Examines columns. Parts of structs have dotted names. `rows` rows of a file are read. With 0, only footers are
    read. With `every`, the footers of all row groups in all files are. Columns in `common` have several types, and are
    converted to this one."""
    chosen, names = _spread(list(files), len(files) if every else _FILES), list(names)
    groups = max(1, min(_GROUPS, _CHUNKS // max(1, len(names) * len(chosen))))
    rows = max(min(rows, _CELLS // max(1, len(names))), min(rows, _LEAST_ROWS))
    facts: dict[str, ColumnFacts] = {}
    samples: list[pa.Table] = []
    for path in chosen:
        try:
            with TableParquet(path, files[path]) as file:
                there = {part.name: part.type for part in parts(file.schema_arrow)}
                types = {name: there[name] for name in names if name in there}
                for name, kind in types.items():
                    facts.setdefault(name, ColumnFacts(common.get(name, kind)))
                examined = file.num_row_groups if every else groups
                _add_statistics(file, path, types, facts, examined)
                if file.metadata.num_rows and path in (chosen[0], chosen[-1]) and rows:
                    read = {name: common.get(name) for name in types if _is_looked_at(types[name])}
                    samples.append(_sample(file, read, rows=rows))
        except Exception as error:  # flipped bits can cause any kind of error
            raise ParquetError(
                f"{path}: cannot be read ({type(error).__name__}: {error}); the file is damaged, or in "
                "a form that this Arrow does not know"
            ) from error.with_traceback(None)
    sampled = pa.concat_tables(samples, promote_options="default") if samples else pa.table({})
    for name, column in facts.items():
        if name in sampled.column_names:
            values = join_chunks(sampled[name])
            column.add_sample(values, has_range=column.known)
            if values.null_count and (is_list(values.type) or not column.known):
                column.nulls.append(("", 0))
    return facts


def elements(values: pa.Array) -> pa.Array:
    """Returns the elements of lists, or the values themselves if they are not lists."""
    return pc.list_flatten(values) if is_list(values.type) else values


def has_text(texts: pa.Array) -> pa.Array:
    """Whether each text is there and not empty."""
    return pc.fill_null(pc.not_equal(texts, ""), False)


def is_lost(texts: pa.Array, values: pa.Array) -> Flags:
    """Whether each text is there, and the value that is made of it is not."""
    return np.asarray(pc.and_(has_text(texts), pc.is_null(values)))


def _spread(items: list[Any], most: int) -> list[Any]:
    """At most `most` items, evenly spread, with the first and the last."""
    places = np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int)
    return [items[place] for place in places]


def _add_statistics(
    file: TableParquet,
    path: str,
    types: Mapping[str, pa.DataType],
    facts: Mapping[str, ColumnFacts],
    groups: int,
) -> None:
    """Adds the footer's statistics of `groups` row groups."""
    leaves: dict[str, int] = {}
    for number, name in enumerate(file.leaves):
        while name not in types and "." in name:
            name = name.rpartition(".")[0]  # noqa: PLW2901
        leaves.setdefault(name, number)
    check_chunks(file.metadata)
    for group in _spread(list(range(file.metadata.num_row_groups)), groups):
        chunks, place = file.metadata.row_group(group), (path, group)
        for name in types:
            column = facts[name]
            if name in file.constants:
                value = _plain(file.constants[name].as_py())
                if value is not None:
                    column.widen(value, value, place)
                elif chunks.num_rows:
                    column.nulls.append(place)
                continue
            stats = chunks.column(leaves[name]).statistics
            if stats is None or not (
                stats.has_null_count and (stats.has_min_max or not stats.num_values)
            ):
                column.known = False
            if stats is None:
                continue
            # Lists are not counted, because their count includes empty ones.
            if stats.has_null_count and stats.null_count and not pa.types.is_nested(column.type):
                column.nulls.append(place)
            if stats.has_min_max:
                column.widen(_plain(stats.min), _plain(stats.max), place)


def _sample(file: TableParquet, wanted: Mapping[str, pa.DataType | None], *, rows: int) -> pa.Table:
    """Reads the first rows of the file and the first rows of its last row groups. `wanted` has the type to which a
    column is converted if its files have several."""
    sizes = group_rows(file.metadata)
    first = next(
        (n for n, before in enumerate(accumulate(sizes), 1) if before >= rows // 2), len(sizes)
    )
    last = next((n for n in range(len(sizes) - 1, first, -1) if sum(sizes[n:]) >= rows // 2), first)
    names = list(wanted)
    batches = [
        *_first_rows(file, range(first), rows // 2 if first < len(sizes) else rows, names),
        *_first_rows(file, range(last, len(sizes)), rows // 2, names),
    ]
    table = flattened(pa.Table.from_batches(batches))
    kept = {}
    for name, common in wanted.items():
        values = join_chunks(table.column(name))
        if common is not None:
            values = values.cast(common, safe=False)
        values = plain(values)
        values = values.cast(_COMMON.get(values.type, values.type))
        if not pa.types.is_nested(elements(values).type):
            kept[name] = values
    return pa.table(kept) if kept else pa.table({"": pa.nulls(table.num_rows)})


def _first_rows(
    file: TableParquet, groups: Sequence[int], rows: int, names: list[str]
) -> Iterator[pa.RecordBatch]:
    """Yields the first `rows` rows of these row groups. A batch does not cross row groups."""
    if not groups:  # which some releases of Arrow refuse to read
        return
    for batch in file.iter_batches(max(1, rows), groups, names):
        yield batch.slice(0, rows)
        rows -= batch.num_rows
        if rows <= 0:
            return


def _is_looked_at(kind: pa.DataType) -> bool:
    """Whether values of a column are read. Bytes may be large, and deeper nested values cannot be features."""
    several = is_list(kind)
    if several and (pa.types.is_nested(kind.value_type) or pa.types.is_dictionary(kind.value_type)):
        return False
    return several or not (pa.types.is_nested(kind) or is_bytes(kind))


def _plain(value: Any) -> Any:
    """Converts a value so that it can be compared with others of its column."""
    if isinstance(value, datetime.datetime):
        return value if value.tzinfo else value.replace(tzinfo=datetime.UTC)
    return float(value) if isinstance(value, decimal.Decimal) else value


def check_values(recipes: Sequence[Recipe], columns: Columns, files: Files) -> str:
    """Raises ColumnError if a footer shows a value that a batch cannot hold, in a column without operators: a missing
    value without a fill, an id that does not fit, or a number that is too large. Raises it also for a fill that is no
    result of the label's comparison. Returns a warning about the labels, or an empty text."""
    stored = {name for name in (*columns.floats, *columns.sparse) if name not in columns.added}
    taken = {
        recipe.name: recipe.sources[0]
        for recipe in recipes
        if recipe.name in stored and not recipe.operators
    }
    facts = probe(files, dict.fromkeys(taken.values()), rows=0) if taken else {}
    for name, source in taken.items():
        if (column := facts.get(source)) is None:
            continue  # an optional column that no examined file has
        kind = np.int32 if name in columns.sparse else np.float32
        low, high = (0, _MOST_ID) if kind is np.int32 else (-_LARGEST, _LARGEST)
        optional = name in columns.fill or is_list(column.type)  # a missing list has no elements
        places = [] if optional else column.nulls[:1]
        if isinstance(column.low, (int, float)) and column.low < low:
            places.append(column.low_place)
        if isinstance(column.high, (int, float)) and column.high > high:
            places.append(column.high_place)
        for place in places:
            _refuse(name, source, kind, place, columns, files[place[0]])
    label = facts.get(taken.get(columns.label, ""))
    if label is None or label.low == label.high:  # footers show no two labels
        for recipe in recipes:
            if recipe.name == columns.label:
                fill = columns.fill.get(recipe.name)
                if recipe.operators and fill not in (None, 0, 1):
                    raise ColumnError(
                        f"fill: {fill:g} for the label {recipe.name!r}, which is a comparison; its result is 0 or 1, "
                        "and so is what stands for a missing one"
                    )
                return _describe_useless_label(recipe, files, fill)
        return ""
    if not isinstance(label.low, (int, float)) or 0 <= label.low <= label.high <= 1:
        return ""
    return (
        f"the label {columns.label!r} goes from {_shown(label.low)} to {_shown(label.high)}, and is loaded unchanged; "
        'binary cross-entropy needs labels from 0 to 1, which roles="label='
        f'{taken[columns.label]} >= {_shown(label.high)}" makes'
    )


def _describe_useless_label(recipe: Recipe, files: Files, fill: float | None) -> str:
    """Returns a warning if all examined rows have one label, as a misspelt value in a comparison makes it. Otherwise an
    empty text."""
    source = recipe.sources[0]
    column = probe(files, recipe.sources).get(source)
    if column is None or not column.values or len(recipe.sources) > 1:
        return ""
    if not recipe.operators and column.low != column.high:
        return ""  # rows that were not sampled have another label
    try:
        labels = MadeColumns([recipe]).table(pa.table({source: column.sampled}))[0]
    except ColumnError:
        return ""  # loading these rows raises it, too
    if labels.null_count and fill is not None:
        return ""  # missing ones may get another label
    labels = labels.drop_null()
    if len(labels) < _LEAST_ROWS or pc.count_distinct(labels).as_py() > 1:
        return ""
    examples = elements(column.sampled).drop_null().unique()[:3].to_pylist()
    return (
        f"the label {recipe.name!r} is {labels[0].as_py():g} in all of {len(labels):,} examined rows, and a model "
        f"learns nothing from one label; column {source!r} holds for instance "
        f"{', '.join(map(repr, examples))}"
    )


def _refuse(  # noqa: PLR0917 # called once
    name: str, source: str, kind: Any, place: Place, columns: Columns, located: FileColumns
) -> None:
    """Reads the values in this place, and raises ColumnError if they are really what the footer says."""
    path, group = place
    with TableParquet(path, located) as file:
        values = flattened(file.read_row_group(group, [source])).column(source)
    where = f"{path}, row group {group}"
    fill = columns.fill.get(name)
    if values.null_count and fill is None and name == columns.label:
        raise ColumnError(
            f"{where}: column {name!r} has {values.null_count} empty values, and is the label; leave "
            'such rows out by a spec (`sluice guess` writes one) whose [table] has unlabelled = "ask", '
            f"or give them a value by name, fill={{{name!r}: 0}}"
        )
    try:
        filled_numbers(name, elements(values), kind, fill)
    except ValueRefused as refused:
        is_id = refused.at is not None and kind is np.int32
        how = f", for instance hash={{{name!r}: 1_000_000}}" if is_id else ""
        rows = pc.list_parent_indices(values) if is_list(values.type) else range(len(values))
        raise ColumnError(refused.message(where, name, rows) + how) from None


def facts_text(column: ColumnFacts) -> str:
    """Describes what is known about a column, for people."""
    texts = [str(column.type)]
    if column.low is not None and not isinstance(column.low, (bytes, str)):
        texts.append(f"{_shown(column.low)} to {_shown(column.high)}")
    if column.optional or column.nulls:
        texts.append("not in every file" if column.optional else "with empty values")
    if column.values:
        texts.append(f"{column.distinct:,} different among {column.values:,}")
    return ", ".join(texts)


def _shown(value: Any) -> str:
    if isinstance(value, datetime.datetime):
        return f"{value:%Y-%m-%d %H:%M}"
    return f"{value + 0.0:g}" if isinstance(value, float) else str(value)


def unreadable(recipes: Sequence[Recipe], files: Files) -> Iterator[str]:
    """Yields a warning for each column with many values that its operators cannot read, such as times in another
    format. Raises ColumnError if most are unreadable.

    In batches, a fill hides such values. A job compares with the table's previous version. A loader of plain files has
    no previous version, so it checks the first rows of its first and its last file."""
    wanted = [recipe for recipe in recipes if reading(recipe.operators)]
    names = list(dict.fromkeys(name for recipe in wanted for name in recipe.sources))
    paths = list(files)
    for path in dict.fromkeys((paths[0], paths[-1])) if wanted else ():
        with TableParquet(path, files[path]) as file:
            batches = [*_first_rows(file, range(file.num_row_groups), _CHECKED_ROWS, names)]
        rows = flattened(pa.Table.from_batches(batches)) if batches else pa.table({})
        for recipe in wanted:
            if not rows.num_rows or not set(recipe.sources) <= set(rows.column_names):
                continue  # an optional column that this file lacks
            stored = [join_chunks(rows.column(name)) for name in recipe.sources]
            columns = [
                typed(*entry) for entry in zip(recipe.sources, stored, recipe.kinds, strict=True)
            ]
            operators = recipe.operators[: reading(recipe.operators)]
            values = applied(operators, as_one_column(columns, recipe.sources))
            there = pc.invert(lacks(columns[0]))
            bad = pc.and_(there, lacks(values))
            share = (pc.sum(bad).as_py() or 0) / max(1, pc.sum(there).as_py() or 0)
            if share < _WARNED_SHARE:
                continue
            example = str(stored[0].filter(bad)[0])[:_QUOTED]
            text = (
                f"{path}: column {recipe.name!r}: {share:.1%} of its values cannot be read (first {rows.num_rows:,}"
                f" rows), for instance {example!r}"
            )
            if share > _REFUSED_SHARE:
                raise ColumnError(
                    f"{text}; correct the format in the spec (it may list several), or leave the column out"
                )
            yield f"warning: {text}; they count as missing"
