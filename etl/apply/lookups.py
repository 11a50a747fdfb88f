"""`Serving`: adds the columns of joins and histories to the rows of a server. Needs no Spark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sluice.etl.ops.base import Arrays, key_texts
from sluice.etl.ops.hashing import Lookup, hash_texts
from sluice.etl.ops.lists import flat
from sluice.etl.spec.nested_columns import join_chunks
from sluice.etl.spec.row_rules import HistorySpec
from sluice.etl.spec.spec import Spec
from sluice.etl.table.store import TableStore, folder_of_tails, tail_of_join
from sluice.etl.table.table import FeatureTable, TableError, check_values


@dataclass(frozen=True)
class _Tail:
    """The newest values of one history or side table, by key."""

    lookup: Lookup
    table: pa.Table

    @classmethod
    def read(cls, store: TableStore, folder: str, columns: list[str]) -> _Tail:
        tables = []
        for path in store.files(folder):
            if path.endswith(".parquet"):
                with store.fs.open_input_file(store.path(path)) as file:
                    tables.append(
                        pq.ParquetFile(file, page_checksum_verification=True).read(columns)
                    )
        if not tables:
            raise TableError(
                f"{store.url(folder)}: what serving must know of other rows is not there; was this "
                "version removed by vacuum?"
            )
        table = pa.concat_tables(tables).combine_chunks()
        keys = join_chunks(table["key"])
        parts = keys.flatten() if pa.types.is_struct(keys.type) else [keys]
        return cls(Lookup.of(key_texts(parts)), table)

    def of(self, columns: list[pa.Array], name: str) -> pa.Array:
        """Returns a column's values for the keys in these columns; null if the table lacks a key."""
        keys = key_texts(columns)
        places = self.lookup.places(hash_texts(keys)).astype(np.int64)
        missing = (places < 0) | np.asarray(pc.is_null(keys))
        taken = self.table[name].take(pa.array(np.where(missing, 0, places), mask=missing))
        return join_chunks(taken)


@dataclass(frozen=True)
class Serving:
    """The newest state of one version's joins and histories."""

    spec: Spec
    tails: Mapping[str, _Tail]

    @classmethod
    def open(cls, table: FeatureTable) -> Serving:
        spec, store = table.spec(), TableStore(table.uri)
        check_values(table, spec)
        wanted = {
            tail_of_join(number): [*join.columns] for number, join in enumerate(spec.rows.joins)
        }
        wanted |= {history.name: ["value"] for history in spec.rows.histories}
        return cls(
            spec,
            {
                name: _Tail.read(store, folder_of_tails(table.record.job, name), ["key", *columns])
                for name, columns in wanted.items()
            },
        )

    def complete(self, columns: Arrays) -> dict[str, pa.Array]:
        """Adds the columns that joins and histories make to the rows' input columns, as
        `sluice.etl.apply.features.Features` takes them."""
        completed = dict(columns)
        for number, join in enumerate(self.spec.rows.joins):
            keys = [completed[name] for name in join.on]
            completed |= {
                name: self.tails[tail_of_join(number)].of(keys, name) for name in join.columns
            }
        for history in self.spec.rows.histories:
            lists = self.tails[history.name].of([completed[history.by]], "value")
            completed[history.name] = (
                _lagged(lists, history, completed)
                if history.lag
                else pc.fill_null(
                    lists.cast(kind := pa.list_(lists.type.value_type)), pa.scalar([], kind)
                )
            )
        return completed


def _lagged(lists: pa.Array, history: HistorySpec, columns: Arrays) -> pa.Array:
    """Returns the value `lag` rows before the next row."""
    values, lengths = flat(lists)
    missing = lengths < history.lag
    places = np.where(missing, 0, np.cumsum(lengths) - history.lag)
    before = values.take(pa.array(places, mask=missing))
    if not history.difference:
        return before
    now = columns[history.of]
    difference = pc.subtract(now, before)
    if not pa.types.is_integer(now.type):
        return difference
    # If a difference needs more than 64 bits, its sign is wrong.
    signs = pc.bit_wise_and(pc.bit_wise_xor(now, before), pc.bit_wise_xor(now, difference))
    return pc.if_else(pc.less(signs, 0), None, difference)
