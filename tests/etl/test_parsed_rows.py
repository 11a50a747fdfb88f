"""What Spark's workers parse is kept in cells, and what they make ready for one task serves the next."""

import pyarrow as pa

from sluice.etl.apply.counts import (
    RowCounts,
    join_batches,
)
from sluice.etl.spark.workers import parsed_rows
from sluice.etl.spark.workers.count_cells import read_counts
from sluice.etl.spark.workers.last_features import load_features
from sluice.etl.spark.workers.parsed_rows import ParsedRows
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


def lines(count, text="é"):
    rows = [f"{n % 2}\t{n}\t{text}{n}".encode() for n in range(count)]
    rows[3], rows[5] = b"one\tbad", b"7\t1\tx"
    return batch_of(rows)


def summed(counts):
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
