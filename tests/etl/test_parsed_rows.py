"""What Spark's workers parse is kept in cells, and what they make ready for one task serves the next."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pytest

from sluice.etl.apply.counts import (
    COUNTS,
    CountsOfRows,
    RowCounts,
    join_batches,
    selected,
)
from sluice.etl.apply.features import Features
from sluice.etl.apply.parse import InputParser
from sluice.etl.spark.workers import parsed_rows
from sluice.etl.spark.workers.count_cells import count_cells, read_counts, sum_cells
from sluice.etl.spark.workers.last_features import load_features
from sluice.etl.spark.workers.parsed_rows import ParsedRows
from sluice.etl.spec.row_split import row_keys
from sluice.etl.spec.spec import Spec
from sluice.etl.table.fitted_state import FittedState
from tests.etl.tables import batch_of, column, write_spec

TEXT = write_spec(
    "label:int I1:int C1:text",
    column("C1", "sparse", "categorify, oov = 2"),
    form="tsv",
    head="%s\n",
    table="split = {train = 0.8, test = 0.2}",
)
FILTERED = '[[filter]]\ncolumn = "I1"\nop = ">="\nvalue = 10'
WIDE = 2_000_000


def lines(count: int, text: str = "é") -> pa.RecordBatch:
    rows = [f"{n % 2}\t{n}\t{text}{n}".encode() for n in range(count)]
    rows[3], rows[5] = b"one\tbad", b"7\t1\tx"
    return batch_of(rows)


@pytest.mark.parametrize(
    "rules", [FILTERED, "", '[sample]\nnegatives = 0.3\nweight = "w"', "[dedup]"]
)
def test_cells_hold_what_parsing_gave_and_what_was_counted_of_it(rules):
    spec, batch = Spec.parse(TEXT % rules), lines(60)
    stored = ParsedRows(spec, 0, 3, None, None)
    cells = list(parsed_rows._parse(stored, iter([batch, lines(8)])))
    parsed = InputParser(spec).parse(batch)
    rows = next(stored.read(iter(cells)))
    if spec.rows.relational:  # which rows are left is decided after they have met others
        assert rows.to_pydict() == pa.table(parsed.columns).to_pydict()
    else:
        columns, keys = parsed_rows.with_keys(rows)
        kept, known = selected(spec, parsed)
        assert {name: values.to_pylist() for name, values in columns.items()} == {
            name: values.to_pylist() for name, values in kept.items()
        }
        assert keys.tolist() == (row_keys(kept, spec) if known is None else known).tolist()
    every = summed(read_counts(iter(cells)))
    assert RowCounts.of(every).parsed == 58 + 6
    assert sum(RowCounts.of(every).rejected.values()) == 4
    if not spec.rows.relational:  # what the first level learns from is counted, too
        alone = CountsOfRows(spec, 0, Features(spec, FittedState()))
        whole = summed(
            one for part in (batch, lines(8)) for one in alone.of(InputParser(spec).parse(part))
        )
        assert sorted(map(repr, every.to_pylist())) == sorted(map(repr, whole.to_pylist()))


def test_each_value_is_counted_in_one_part_and_sums_below_the_least_are_left_out():
    draw = np.random.default_rng(5)
    counted = [
        pa.record_batch(
            [
                pa.array(np.full(500, key, np.int32)),
                pa.array([f"v{n}" for n in draw.integers(0, 60, 500)]),
                pa.array(draw.integers(1, 4, 500)),
            ],
            schema=COUNTS,
        )
        for key in (2, 0, 1, 0, -3)
    ]
    cells = [*count_cells(counted[:2], 4), *count_cells(counted[2:], 4), *count_cells([], 4)]
    found = []
    for part in range(4):
        mine = [cell for cell in cells if cell["part"][0].as_py() == part]
        assert len(mine) == 2
        sums = list(sum_cells({1: 20}, iter(mine)))
        assert [cell["key"][0].as_py() for cell in sums] == [-3, 0, 1, 2]
        rows = list(read_counts(iter(sums)))
        assert [cell["sums"][0].as_py() for cell in sums] == [one.num_rows for one in rows]
        found += [row for one in rows for row in one.to_pylist()]
    want = [row for row in summed(counted).to_pylist() if row["key"] != 1 or row["count"] >= 20]
    assert 0 < len([row for row in want if row["key"] == 1]) < 60
    assert sorted(map(repr, found)) == sorted(map(repr, want))


def summed(counts: Iterable[pa.RecordBatch]) -> pa.Table:
    return (
        pa.Table.from_batches(list(counts))
        .group_by(["key", "value"])
        .aggregate([("count", "sum")])
        .rename_columns(["key", "value", "count"])
    )


def test_wide_rows_lie_in_several_cells(monkeypatch):
    monkeypatch.setattr("sluice.etl.spark.workers.cells.CELL_BYTES", WIDE)
    spec = Spec.parse(TEXT % "")
    stored = ParsedRows(spec, None, 1, None, None)
    cells = list(parsed_rows._parse(stored, iter([lines(1000, "x" * 8000)])))
    counted = cells.pop()  # it has the counts, and no rows
    assert list(stored.read(iter([counted]))) == []
    assert len(cells) == 5
    assert list(read_counts(iter(cells))) == []
    assert (
        max(len(cell["rows"][0].as_buffer()) for cell in cells) < 1.2 * WIDE
    )  # a slice is written without its whole
    rows = list(stored.read(iter(cells)))
    assert [number for batch in rows for number in batch["I1"].to_pylist()] == [
        n for n in range(1000) if n not in (3, 5)
    ]
    assert len({one.num_rows for one in rows[:-1]}) == 1


def test_rows_are_worked_on_together_up_to_a_number_and_a_size():
    few, wide = (pa.record_batch([pa.array([size * "x"] * 10)], ["t"]) for size in (1, 4_000_000))
    assert [one.num_rows for one in join_batches(iter(5 * [few]), 20)] == [20, 20, 10]
    assert [one.num_rows for one in join_batches(iter(3 * [wide]), 1 << 30)] == [20, 10]


def test_a_batch_of_which_nothing_is_left_is_still_counted():
    spec = Spec.parse(TEXT % FILTERED)
    stored = ParsedRows(spec, None, 1, None, None)
    cells = list(parsed_rows._parse(stored, iter([lines(9)])))
    assert list(stored.read(iter(cells))) == []
    assert RowCounts.of(summed(read_counts(iter(cells)))).parsed == 7


def test_a_worker_makes_a_state_ready_once_for_all_tasks_that_are_sent_it():
    spec = Spec.parse(TEXT % "")
    table = spec.fitted[0].op.learn(
        pa.table({"value": ["a", "b"], "count": pa.array([2, 1], pa.int64())})
    )
    packed = FittedState(spec=spec.fitted_hash, tables={spec.fitted[0].key: table}).packed()
    state, features = load_features(spec, packed, ahead=True)
    assert state[spec.fitted[0].key].equals(table)
    assert load_features(spec, packed, ahead=True)[1] is features
    assert load_features(spec, dict(packed), ahead=True)[1] is not features
    assert load_features(spec, packed, ahead=False)[1] is not features
