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

from sluice.etl.ops.base import as_one_column
from sluice.etl.ops.chain import lacks, reading, step
from sluice.etl.spec.nested_columns import flattened, join_chunks, parts
from sluice.etl.table.table_columns import FileColumns, TableParquet
from sluice.ingest.columns import ColumnError, Columns
from sluice.ingest.plain.footer_chunks import check_chunks
from sluice.ingest.plain.made_columns import MadeColumns
from sluice.ingest.plain.recipe import Recipe, typed
from sluice.ingest.plain.roles import ParquetError
from sluice.ingest.stages.number_types import ValueRefused, filled_numbers

_FILES = 8
_GROUPS = 32
_ROWS = 20_000
_CHUNKS = 20_000
_EXAMPLES = 1_000
"""How much is examined at most: files, evenly spread; row groups of each file; rows of the first and of the last file
(half of them from its last row groups); column chunks in all, roughly; and values that are kept of a column."""
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
    nulls: dict[Place, int] = field(default_factory=dict)
    """The number of missing values in each place that has any."""
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
    examples: pa.Array | None = field(default=None, repr=False)
    """Some of the distinct values."""
    optional: bool = False
    """Whether some file lacks the column."""
    known: bool = True
    """Whether all examined footers have the smallest and the largest value."""

    def widen(self, low: Any, high: Any, place: Place) -> None:
        if self.low is None or low < self.low:
            self.low, self.low_place = low, place
        if self.high is None or high > self.high:
            self.high, self.high_place = high, place


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
    facts: dict[str, ColumnFacts] = {}
    samples: list[pa.Table] = []
    for path in chosen:
        try:
            with TableParquet(path, files[path]) as file:
                look = _FileLook(file, path, names, facts, common)
                look.statistics(
                    file.num_row_groups
                    if every
                    else max(1, min(_GROUPS, _CHUNKS // max(1, len(names) * len(chosen))))
                )
                if file.metadata.num_rows and path in (chosen[0], chosen[-1]) and rows:
                    samples.append(
                        look.sample(
                            max(min(rows, _CELLS // max(1, len(names))), min(rows, _LEAST_ROWS))
                        )
                    )
        except Exception as error:  # flipped bits can cause any kind of error
            raise ParquetError(
                f"{path}: cannot be read ({type(error).__name__}: {error}); the file is damaged, or in "
                "a form that this Arrow does not know"
            ) from error.with_traceback(None)
    for name, one in facts.items():
        if any(name in table.column_names for table in samples):
            one.sampled = _join_parts(
                [
                    table[name]
                    if name in table.column_names
                    else pa.chunked_array([pa.nulls(len(table))])
                    for table in samples
                ]
            )
            values = elements(one.sampled).drop_null()
            differ = pc.unique(values)
            one.values = len(values)
            one.distinct = len(differ)
            one.examples = differ[:_EXAMPLES]
    return facts


def _join_parts(parts: Sequence[pa.ChunkedArray]) -> pa.Array:
    """Joins parts of a column into one array, in the type of the first part that has one."""
    kind = next((part.type for part in parts if not pa.types.is_null(part.type)), pa.null())
    return join_chunks(
        pa.chunked_array([chunk for part in parts for chunk in part.cast(kind).chunks], kind)
    )


def elements(values: pa.Array) -> pa.Array:
    """Returns the elements of lists, or the values themselves if they are not lists."""
    return pc.list_flatten(values) if is_list(values.type) else values


def is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def rows_of_elements(values: pa.Array) -> Sequence[int]:
    """Returns the row of each of `elements(values)`."""
    found: Sequence[int] = (
        pc.list_parent_indices(values) if is_list(values.type) else range(len(values))
    )
    return found


def _spread(items: list[Any], most: int) -> list[Any]:
    """At most `most` items, evenly spread, with the first and the last."""
    if len(items) <= most:
        return items
    if most == 1:
        return items[:1]
    return [items[round(n * (len(items) - 1) / (most - 1))] for n in range(most)]


class _FileLook:
    """Adds the facts of one file to those of its columns."""

    def __init__(
        self,
        file: TableParquet,
        path: str,
        names: Sequence[str],
        facts: dict[str, ColumnFacts],
        common: Mapping[str, pa.DataType],
    ):
        self._file = file
        self._path = path
        self._facts = facts
        self._common = common
        self._types = {part.name: part.type for part in parts(file.schema_arrow)}
        self._names = [name for name in names if name in self._types]
        self._known: set[str] = set()
        """The columns whose statistics are complete in the footer."""

    def statistics(self, groups: int) -> None:
        """Adds the footer's statistics of `groups` row groups."""
        leaves: dict[str, int] = {}
        for number, leaf in enumerate(self._file.leaves):
            leaves.setdefault(
                next((name for name in _upwards(leaf) if name in self._types), leaf), number
            )
        self._known = set(self._names)
        check_chunks(self._file.metadata)
        for name in self._names:
            self._facts.setdefault(name, ColumnFacts(self._common.get(name, self._types[name])))
        for group in _spread(list(range(self._file.metadata.num_row_groups)), groups):
            chunks = self._file.metadata.row_group(group)
            for name in self._names:
                if name in self._file.constants:
                    self._add_constant(name, group)
                    continue
                one, known = self._facts[name], chunks.column(leaves[name]).statistics
                if known is None or not (
                    known.has_null_count and (known.has_min_max or not known.num_values)
                ):
                    self._known.discard(name)
                    one.known = False
                if (
                    known is not None
                    and known.has_null_count
                    and known.null_count
                    and not pa.types.is_nested(one.type)
                ):
                    # Lists are not counted, because their count includes empty ones.
                    one.nulls[self._path, group] = known.null_count
                if known is not None and known.has_min_max:
                    one.widen(_plain(known.min), _plain(known.max), (self._path, group))

    def _add_constant(self, name: str, group: int) -> None:
        """Adds a column that has one value in the whole file."""
        one, value = self._facts[name], self._file.constants[name].as_py()
        if value is not None:
            one.widen(_plain(value), _plain(value), (self._path, group))
        elif rows := self._file.metadata.row_group(group).num_rows:
            one.nulls[self._path, group] = rows

    def sample(self, rows: int) -> pa.Table:
        """Reads the first rows of the file and the first rows of its last row groups. Adds what the footer did not
        say."""
        names = [name for name in self._names if _is_looked_at(self._types[name])]
        sizes = [
            self._file.metadata.row_group(group).num_rows
            for group in range(self._file.num_row_groups)
        ]
        first = next(
            (n for n, before in enumerate(accumulate(sizes), 1) if before >= rows // 2), len(sizes)
        )
        last = next(
            (n for n in range(len(sizes) - 1, first, -1) if sum(sizes[n:]) >= rows // 2), first
        )
        batches = [
            *self._rows(range(first), rows // 2 if first < len(sizes) else rows, names),
            *self._rows(range(last, len(sizes)), rows // 2, names),
        ]
        table = flattened(pa.Table.from_batches(batches))
        kept = {}
        for name in names:
            one, values = self._facts[name], join_chunks(table.column(name))
            if name in self._common:
                values = values.cast(self._common[name], safe=False)
            if values.null_count and (name not in self._known or pa.types.is_nested(values.type)):
                one.nulls[self._path, 0] = values.null_count
            if pa.types.is_floating(values.type):
                one.unusable |= bool(pc.any(pc.invert(pc.is_finite(values))).as_py())
            if pa.types.is_dictionary(values.type):
                values = values.dictionary_decode()
            values = values.cast(_COMMON.get(values.type, values.type))
            if pa.types.is_nested(elements(values).type):
                continue
            kept[name] = values
            values = elements(values).drop_null()
            if name not in self._known and len(values) and not pa.types.is_boolean(values.type):
                bounds = pc.min_max(values)
                one.widen(
                    _plain(bounds["min"].as_py()), _plain(bounds["max"].as_py()), (self._path, 0)
                )
        return pa.table(kept) if kept else pa.table({"": pa.nulls(table.num_rows)})

    def _rows(self, groups: Iterable[int], rows: int, names: list[str]) -> Iterator[pa.RecordBatch]:
        """Yields the first `rows` rows of these row groups."""
        chosen = list(groups)
        if not chosen:  # which some releases of Arrow refuse to read
            return
        for batch in self._file.iter_batches(max(1, rows), chosen, names):
            yield batch.slice(0, rows)
            rows -= batch.num_rows
            if rows <= 0:
                return


def _is_looked_at(kind: pa.DataType) -> bool:
    """Whether values of a column are read. Bytes may be large, and deeper nested values cannot be features."""
    several = is_list(kind)
    if several and (pa.types.is_nested(kind.value_type) or pa.types.is_dictionary(kind.value_type)):
        return False
    return several or not (
        pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    )


def _upwards(path: str) -> Iterable[str]:
    """Yields a dotted path and the paths of its parents, the nearest first."""
    yield path
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


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
        if (one := facts.get(source)) is None:
            continue  # an optional column that no examined file has
        kind = np.int32 if name in columns.sparse else np.float32
        low, high = (0, _MOST_ID) if kind is np.int32 else (-_LARGEST, _LARGEST)
        optional = name in columns.fill or is_list(one.type)  # a missing list has no elements
        places = [] if optional else list(one.nulls)[:1]
        if isinstance(one.low, (int, float)) and one.low < low:
            places.append(one.low_place)
        if isinstance(one.high, (int, float)) and one.high > high:
            places.append(one.high_place)
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
    one = probe(files, recipe.sources).get(source)
    if one is None or not (one.sampled and one.examples) or len(recipe.sources) > 1:
        return ""
    if not recipe.operators and one.low != one.high:
        return ""  # rows that were not sampled have another label
    try:
        labels = MadeColumns([recipe]).table(pa.table({source: one.sampled}))[0]
    except ColumnError:
        return ""  # loading these rows raises it, too
    if labels.null_count and fill is not None:
        return ""  # missing ones may get another label
    labels = labels.drop_null()
    if len(labels) < _LEAST_ROWS or pc.count_distinct(labels).as_py() > 1:
        return ""
    return (
        f"the label {recipe.name!r} is {labels[0].as_py():g} in all of {len(labels):,} examined rows, and a model "
        f"learns nothing from one label; column {source!r} holds for instance "
        f"{', '.join(map(repr, one.examples[:3].to_pylist()))}"
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
        raise ColumnError(refused.message(where, name, rows_of_elements(values)) + how) from None


def facts_text(one: ColumnFacts) -> str:
    """Describes what is known about a column, for people."""
    texts = [str(one.type)]
    if one.low is not None and not isinstance(one.low, (bytes, str)):
        texts.append(f"{_shown(one.low)} to {_shown(one.high)}")
    if one.optional or one.nulls:
        texts.append("not in every file" if one.optional else "with empty values")
    if one.values:
        texts.append(f"{one.distinct:,} different among {one.values:,}")
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
    paths = list(files)
    for path in dict.fromkeys((paths[0], paths[-1])) if wanted else ():
        rows = _first_rows(
            path,
            files[path],
            list(dict.fromkeys(name for recipe in wanted for name in recipe.sources)),
        )
        for recipe in wanted:
            if not rows.num_rows or not set(recipe.sources) <= set(rows.column_names):
                continue  # an optional column that this file lacks
            share, example = _unreadable_share(recipe, rows)
            if share < _WARNED_SHARE:
                continue
            text = (
                f"{path}: column {recipe.name!r}: {share:.1%} of its values cannot be read (first {rows.num_rows:,}"
                f" rows), for instance {example!r}"
            )
            if share > _REFUSED_SHARE:
                raise ColumnError(
                    f"{text}; correct the format in the spec (it may list several), or leave the column out"
                )
            yield f"warning: {text}; they count as missing"


def _first_rows(path: str, located: FileColumns, names: list[str]) -> pa.Table:
    batches: list[pa.RecordBatch] = []
    with TableParquet(path, located) as file:
        # A batch does not cross row groups.
        for batch in file.iter_batches(_CHECKED_ROWS, range(file.num_row_groups), names):
            batches.append(batch)
            if sum(one.num_rows for one in batches) >= _CHECKED_ROWS:
                break
    return (
        flattened(pa.Table.from_batches(batches).slice(0, _CHECKED_ROWS))
        if batches
        else pa.table({})
    )


def _unreadable_share(recipe: Recipe, rows: pa.Table) -> tuple[float, str]:
    """Returns the unreadable share of the values that are not missing, and the first unreadable value."""
    stored = [join_chunks(rows.column(name)) for name in recipe.sources]
    columns = [typed(*one) for one in zip(recipe.sources, stored, recipe.kinds, strict=True)]
    values = as_one_column(columns, recipe.sources)
    for op in recipe.operators[: reading(recipe.operators)]:
        values = step(op, values, None, {})
    there = pc.invert(lacks(columns[0]))
    bad = pc.and_(there, lacks(values))
    count = pc.sum(bad).as_py() or 0
    example = str(stored[0].filter(bad)[0])[:_QUOTED] if count else ""
    return count / max(1, pc.sum(there).as_py() or 0), example
