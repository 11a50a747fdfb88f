"""Rows of a file are sorted in memory, or in runs on the disk, with the same result."""

import numpy as np
import pyarrow as pa
import pytest

from sluice.etl.apply import row_store
from sluice.etl.apply.row_store import SortedRows


def batches(names: list[str], count: int = 9, rows: int = 700) -> list[pa.RecordBatch]:
    draw = np.random.default_rng(len(names))
    made = []
    for number in range(count):
        keys = {
            "_first": draw.integers(0, 3, rows).astype(float),
            "_then": draw.integers(0, 3, rows),
            "_row": draw.integers(-9, 9, rows),
            "_key": draw.integers(-(2**62), 2**62, rows)
            if len(names) < 3
            else draw.integers(0, 5, rows),
        }
        text = pa.array([f"{number}-{'x' * int(size)}" for size in draw.integers(0, 99, rows)])
        columns = [keys[name] for name in names]
        made.append(pa.record_batch([text, *columns], ["text", *names]))
    return made


def sorted_by(budget: int, given: list[pa.RecordBatch], rows: int) -> list[pa.Table]:
    sorter = SortedRows(budget)
    for batch in given:
        sorter.add(batch)
    pieces = list(sorter.pieces(rows))
    sorter.close()
    return pieces


@pytest.mark.parametrize(
    "names", [["_key"], ["_first", "_key"], ["_first", "_then", "_row", "_key"]]
)
@pytest.mark.parametrize("rows", [64, 1000, 6300, 9999])
def test_runs_on_the_disk_make_the_same_pieces_as_memory(names, rows, monkeypatch):
    monkeypatch.setattr(row_store, "_PART_BYTES", 5000)
    given = batches(names)
    whole = pa.Table.from_batches(given).drop_columns("text").to_pylist()
    order = ["_first", "_then", "_key", "_row"]
    want = sorted(whole, key=lambda row: [row[name] for name in order if name in row])
    for budget in (1 << 30, 100_000, 0):
        pieces = sorted_by(budget, given, rows)
        assert [len(piece) for piece in pieces[:-1]] == [rows] * (len(pieces) - 1)
        assert 0 < len(pieces[-1]) <= rows
        joined = pa.concat_tables(pieces)
        assert joined.drop_columns("text").to_pylist() == want
        texts = pa.Table.from_batches(given)
        assert sorted(map(repr, joined.to_pylist())) == sorted(map(repr, texts.to_pylist()))


def test_a_merge_has_one_part_of_each_run_in_memory(monkeypatch):
    monkeypatch.setattr(row_store, "_PART_BYTES", 5000)
    held: list[int] = []
    real = row_store.sort_order

    def noted(table: pa.Table) -> np.ndarray:
        held.append(len(table))
        return real(table)

    given = batches(["_key"])
    monkeypatch.setattr(row_store, "sort_order", noted)
    pieces = sorted_by(0, given, 100)
    assert sum(map(len, pieces)) == 6300
    assert held[:9] == [700] * 9  # each batch is a run
    part = 5000 * 700 // given[0].nbytes
    assert max(held[9:]) <= 9 * 2 * (part + 1)
