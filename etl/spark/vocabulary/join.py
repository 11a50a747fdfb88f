"""`VocabularyJoins`: finds the places of values in vocabularies that no worker can hold.

One join serves all columns, and it moves no rows. A task requests the distinct values of its rows from all vocabularies
together. Requests and vocabularies meet in buckets of hashes. The places are written to files, from which the task that
applies the operators reads those of its own rows.

Only hashes are moved and compared, as in `Lookup`. They are in cells, so that Spark handles few and large records.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sluice.etl.apply.failure import FeatureError
from sluice.etl.apply.features import Features
from sluice.etl.apply.number_limits import NUMBERS, reason, unfit
from sluice.etl.apply.parse import Batches
from sluice.etl.ops.chain import lifted, prepare_column
from sluice.etl.ops.hash_table import Lookup
from sluice.etl.ops.hashing import NULL, U64, hash_texts
from sluice.etl.ops.ids import Categorify
from sluice.etl.ops.lists import flat
from sluice.etl.spark.vocabulary.large import COMMIT_OPTIONS
from sluice.etl.spark.workers.cells import CELL_BYTES, one_value, read_stream, write_stream
from sluice.etl.spark.workers.part_of_input import name_part
from sluice.etl.spark.workers.placed_rows import PlacedRows
from sluice.etl.spec.columns import ColumnSpec
from sluice.etl.spec.spec import Spec
from sluice.etl.table.fitted_state import FileBackedState, FittedState
from sluice.etl.table.store import TableStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_BUCKET_VALUES = 1 << 19
_CELL_ENTRIES = CELL_BYTES // 16
_VOCABULARY = -1
"""The block of cells that hold a part of a vocabulary. It sorts before all blocks of rows."""
_CELLS = "bucket int, block bigint, cell binary"
_PARTS = "vocabulary int, uri string, path string, rows bigint, first bigint"
_Known = tuple[Lookup, npt.NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class JoinedOperator:
    """A column, and the number of its operator whose vocabulary is joined."""

    column: ColumnSpec
    number: int

    @property
    def op(self) -> Categorify:
        op = self.column.ops[self.number]
        assert isinstance(op, Categorify)
        return op

    @property
    def key(self) -> str:
        return self.column.state_key(self.number)

    def hash_values(
        self, features: Features, columns: Mapping[str, pa.Array], extras: Mapping[str, pa.Array]
    ) -> U64:
        """Returns the hashes of the distinct values that the operator gets. Runs in a worker."""
        values = features.run(self.column, self.column.ops[: self.number], columns, extras)
        if lifted(self.op, values):
            values, _ = flat(values)
        return hash_texts(pc.unique(prepare_column(self.op, values, extras)).drop_null())


@dataclass(frozen=True, slots=True)
class VocabularyJoins:
    """All operators of a job that need the join. Usually there are none."""

    spec: Spec
    operators: tuple[JoinedOperator, ...] = ()

    @classmethod
    def of(cls, spec: Spec, keys: Sequence[str]) -> VocabularyJoins:
        operators = [
            JoinedOperator(column, number)
            for column in spec.columns
            for key, _, number in column.fitted
            if key in keys and (column.online is None or number < column.online)
        ]
        return cls(spec, tuple(operators))

    @property
    def names(self) -> list[str]:
        return [operator.column.name for operator in self.operators]

    @property
    def keys(self) -> list[str]:
        """The keys of the vocabularies. Cells have a vocabulary's number in this list."""
        return sorted({operator.key for operator in self.operators})

    def for_workers(self, state: FittedState) -> FittedState:
        """Returns the state that workers need, without the joined vocabularies."""
        tables = {key: table for key, table in state.tables.items() if key not in self.keys}
        return replace(state, tables=tables)

    def hash_values(
        self, features: Features, columns: Mapping[str, pa.Array], extras: Mapping[str, pa.Array]
    ) -> dict[str, list[U64]]:
        """Returns the hashes that the operators look up, by the key of the vocabulary."""
        found: dict[str, list[U64]] = {key: [] for key in self.keys}
        for operator in self.operators:
            found[operator.key].append(operator.hash_values(features, columns, extras))
        return found

    def check_numbers(self, made: Mapping[str, pa.Array]) -> None:
        """Raises a FeatureError if a column that follows a joined vocabulary has a number that must not be published.
        The pass that lists rejected rows does not know these columns."""
        for column in (operator.column for operator in self.operators):
            if column.role in NUMBERS and len(
                unfit(made[column.name].to_numpy(zero_copy_only=False), column)
            ):
                raise FeatureError(
                    f"column {column.name!r}: its vocabulary is in files, and the operators after it make a number "
                    f"that may not be published ({reason(column)}); clip it before, or fill it"
                )


@dataclass(frozen=True, slots=True)
class KnownPlaces:
    """Finds the places of values, like `Lookup`, for values that were requested."""

    lookup: Lookup
    found: npt.NDArray[np.int32]
    """The place of each requested value in its vocabulary, or -1."""

    @classmethod
    def of(cls, hashes: U64, found: npt.NDArray[np.int32]) -> KnownPlaces:
        return cls(Lookup.of_hashes(np.append(hashes, NULL)), np.append(found, np.int32(-1)))

    def places(self, hashes: U64) -> npt.NDArray[np.int32]:
        at = self.lookup.places(hashes)
        if len(at) and at.min() < 0:
            raise RuntimeError(
                "a task got other rows than before, so that ids of its values are not known; run the job again"
            )
        return self.found[at]


@dataclass(frozen=True, slots=True)
class RequestedPlaces:
    """The places of all values that tasks have requested, in files of a folder."""

    keys: Sequence[str]
    uri: str
    folder: str

    def of_block(self, block: int) -> dict[str, KnownPlaces]:
        """Returns the places of a block's values, by the key of their vocabulary. Runs in a worker."""
        store = TableStore(self.uri)
        entries = [
            one
            for path in store.files(f"{self.folder}/block={block}")
            if path.endswith(".parquet")
            for one in _read_cells(store, path)
        ]
        table = pa.Table.from_batches(entries) if entries else None
        found = {}
        for number, key in enumerate(self.keys):
            hashes, places = np.zeros(0, np.uint64), np.zeros(0, np.int32)
            if table is not None:
                mine = table.filter(pc.equal(table["vocabulary"], number))
                hashes, places = mine["hash"].to_numpy(), mine["place"].to_numpy()
            found[key] = KnownPlaces.of(hashes, places)
        return found


@dataclass(frozen=True, slots=True)
class PlacesFolder:
    """The folder for the places of one job. It is in the job's own folder, which goes if it becomes empty."""

    store: TableStore
    parent: str

    @contextlib.contextmanager
    def found(
        self, rows: DataFrame, placed: PlacedRows, joins: VocabularyJoins, state: FittedState
    ) -> Iterator[RequestedPlaces | None]:
        """Finds the places of all values that the rows look up, and removes the files at the end. None if `joins` has
        no operators."""
        if not joins.operators:
            yield None
            return
        folder = f"{self.parent}/places"
        try:
            _join(rows, placed, joins, state, self.store.spark_url(folder))
            yield RequestedPlaces(joins.keys, self.store.uri, folder)
        finally:
            self.store.remove(folder)
            self.store.remove_if_empty(self.parent)


def _join(
    rows: DataFrame, placed: PlacedRows, joins: VocabularyJoins, state: FittedState, url: str
) -> None:
    """Writes the places of all values that the rows look up."""
    spark = rows.sparkSession
    parts = list(_list_parts(joins.keys, state))
    buckets = max(
        spark.sparkContext.defaultParallelism, sum(part[3] for part in parts) // _BUCKET_VALUES
    )
    # The requests come first, so that their tasks have the same numbers as in the pass that applies the operators.
    worker = partial(_request_values, placed, joins, buckets)
    requests = rows.mapInArrow(worker, _CELLS)
    known = spark.createDataFrame(parts, _PARTS).mapInArrow(
        partial(_read_vocabularies, buckets), _CELLS
    )
    met = requests.unionAll(known).repartitionById(buckets, "bucket")
    found = met.sortWithinPartitions("block").mapInArrow(
        partial(_find_places), "block bigint, cell binary"
    )
    found.repartition("block").write.partitionBy("block").options(**COMMIT_OPTIONS).parquet(url)


def _list_parts(
    keys: Sequence[str], state: FittedState
) -> Iterator[tuple[int, str, str, int, int]]:
    """Yields the files of the vocabularies, each with the place of its first value: see `_PARTS`."""
    for number, key in enumerate(keys):
        table = state.kept(key)
        assert isinstance(table, FileBackedState)
        first = 0
        for path, count in table.parts:
            yield number, table.uri, path, count, first
            first += count


@name_part
def _request_values(
    placed: PlacedRows, joins: VocabularyJoins, buckets: int, batches: Batches
) -> Batches:
    """Yields cells with the distinct values of each block. Runs in a worker."""
    placing, features = placed.load()
    for block, parts in itertools.groupby(placed.blocks(batches), itemgetter(0)):
        wanted: dict[str, list[U64]] = {key: [] for key in joins.keys}
        for _, (columns, keys) in parts:
            rows = placing.of(columns, keys)
            extras = features.extras(rows.columns, rows.keys, rows.split, rows.folds)
            for key, hashes in joins.hash_values(features, rows.columns, extras).items():
                wanted[key] += hashes
        distinct = [np.unique(np.concatenate(hashes)) for hashes in wanted.values()]
        numbers = np.repeat(np.arange(len(distinct), dtype=np.int32), list(map(len, distinct)))
        entries = pa.record_batch([numbers, np.concatenate(distinct)], ["vocabulary", "hash"])
        yield from _in_buckets(entries, block, buckets)


def _read_vocabularies(buckets: int, batches: Batches) -> Batches:
    """Yields cells with the values of vocabularies and their places. Runs in a worker."""
    for batch in batches:
        for part in batch.to_pylist():
            first = part["first"]
            file = FileBackedState(
                uri=part["uri"], parts=((part["path"], part["rows"]),), digest=""
            )
            for values in file.row_groups():
                count = values.num_rows
                entries = pa.record_batch(
                    [
                        np.full(count, part["vocabulary"], np.int32),
                        hash_texts(values["value"]),
                        np.arange(first, first + count, dtype=np.int32),
                    ],
                    ["vocabulary", "hash", "place"],
                )
                first += count
                yield from _in_buckets(entries, _VOCABULARY, buckets)


def _in_buckets(entries: pa.RecordBatch, block: int, buckets: int) -> Batches:
    """Yields cells with the entries of each bucket, in their order."""
    # The low bits of a hash decide its slot in a `Lookup`, so others decide its bucket.
    bucket = (entries["hash"].to_numpy() >> np.uint64(32)) % np.uint64(buckets)
    order = np.argsort(bucket, kind="stable")
    ends = np.searchsorted(bucket[order], np.arange(buckets + 1, dtype=np.uint64))
    for number, (start, end) in enumerate(itertools.pairwise(ends)):
        for first in range(start, end, _CELL_ENTRIES):
            part = entries.take(pa.array(order[first : min(first + _CELL_ENTRIES, end)]))
            yield pa.record_batch(
                [
                    pa.array([number], pa.int32()),
                    pa.array([block], pa.int64()),
                    one_value(write_stream([part], part.schema)),
                ],
                ["bucket", "block", "cell"],
            )


def _find_places(batches: Batches) -> Batches:
    """Yields the requests of a bucket with the places of their values, or -1. Vocabularies come first. Runs in a
    worker."""
    parts: dict[int, list[pa.RecordBatch]] = defaultdict(list)
    known: dict[int, _Known] = {}
    for batch in batches:
        for block, cell in zip(batch["block"].to_pylist(), batch["cell"], strict=True):
            for entries in read_stream(cell):
                if block == _VOCABULARY:
                    parts[entries["vocabulary"][0].as_py()].append(entries)
                    continue
                while parts:
                    number, of_vocabulary = parts.popitem()
                    hashes, places = (
                        np.concatenate([part[name].to_numpy() for part in of_vocabulary])
                        for name in ("hash", "place")
                    )
                    known[number] = Lookup.of_hashes(hashes), places
                answered = entries.append_column("place", _look_up(entries, known))
                yield pa.record_batch(
                    [
                        pa.array([block], pa.int64()),
                        one_value(write_stream([answered], answered.schema)),
                    ],
                    ["block", "cell"],
                )


def _look_up(entries: pa.RecordBatch, known: Mapping[int, _Known]) -> pa.Array:
    numbers, hashes = entries["vocabulary"].to_numpy(), entries["hash"].to_numpy()
    found = np.full(len(numbers), -1, np.int32)
    for number, (lookup, places) in known.items():
        # The entries of a cell are in the order of their vocabularies.
        first, end = np.searchsorted(numbers, [number, number + 1])
        at = lookup.places(hashes[first:end])
        found[first:end] = np.where(at < 0, -1, places[at])
    return pa.array(found)


def _read_cells(store: TableStore, path: str) -> Iterator[pa.RecordBatch]:
    with store.fs.open_input_file(store.path(path)) as file:
        for cell in pq.ParquetFile(file).read(["cell"])["cell"]:
            yield from read_stream(cell)
