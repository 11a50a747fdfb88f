"""The error policy as arithmetic, the list of quarantined rows, and the search for bad rows."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pyarrow as pa
import pytest

from sluice import Errors
from sluice.ingest.stages.quarantine import isolate, kinds_of
from tests.open_loader import open_loader, quarantined_rows
from tests.product import Quarantine, QuarantineError, Read
from tests.raises import MISTAKES, assert_names, raises

SET_ASIDE = Errors(on_error="quarantine", max_rows=10, max_rate=0.1, probation_rows=50)


# ---- the policy


@pytest.mark.parametrize(
    ("seen", "aside", "stops"),
    [
        (1, 1, False),  # in probation, a first bad row is no rate
        (49, 10, False),  # still
        (49, 11, True),  # but the count holds always
        (50, 5, False),
        (50, 6, True),
        (1000, 10, False),
        (100_000, 11, True),
    ],
)
def test_count_and_rate_after_probation(seen, aside, stops):
    assert (
        SET_ASIDE.objection(rows_seen=seen, rows_aside=aside, kinds=("ValueError",)) is not None
    ) == stops


@pytest.mark.parametrize(
    "error",
    [
        NameError("x"),
        ModuleNotFoundError("x"),
        MemoryError(),
        IndentationError("x"),
        UnboundLocalError("x"),
        RecursionError("x"),
        SystemExit(1),
    ],
)
def test_errors_of_the_program_are_never_quarantined(error):
    stops = SET_ASIDE.objection(rows_seen=10**6, rows_aside=1, kinds=kinds_of(error))
    if isinstance(error, RecursionError):
        assert stops is None, "deep data may be to blame"
    else:
        assert_names(stops, "program")


@pytest.mark.parametrize(
    ("options", "facts"),
    MISTAKES["errors"],
)
def test_a_policy_is_checked(options, facts):
    with raises(ValueError, *facts):
        Errors(**options)


# ---- the books


def test_quarantined_rows_are_listed_and_summed(tmp_path):
    path = tmp_path / "aside.jsonl"
    books = Quarantine(replace(SET_ASIDE, quarantine=path))
    assert not path.exists()
    books.count_rows(90)
    books.add(ValueError("no number: 'ü'"), stage="transform", group=("part-3", 2), rows=[7, 9])
    books.add(KeyError("C1"), stage="log", group=("part-4", 0), rows=[0])
    assert quarantined_rows(path)[1] == {
        "stage": "transform",
        "file": "part-3",
        "row_group": 2,
        "row": 9,
        "type": "ValueError",
        "reason": "no number: 'ü'",
    }
    assert books.summary() == {
        "rows_set_aside": 3,
        "file": str(path),
        "reasons": {"transform: ValueError": 2, "log: KeyError": 1},
    }
    books.close()
    books.close()


def test_one_row_too_many_stops_with_its_place(tmp_path):
    books = Quarantine(replace(SET_ASIDE, quarantine=tmp_path / "x"))
    books.add(ValueError("a"), stage="t", group=("f", 0), rows=range(10))
    cause = ValueError("b")
    with raises(
        QuarantineError, "part-9 row group 4 row 77", "t", "ValueError: b", "max_rows=10"
    ) as e:
        books.add(cause, stage="t", group=("part-9", 4), rows=[77])
    assert e.value.__cause__ is cause
    assert len(quarantined_rows(tmp_path / "x")) == 10, "what stopped the run was not set aside"
    books.close()


def test_the_end_of_the_probation_judges_the_rows_quarantined_in_it(tmp_path):
    books = Quarantine(replace(SET_ASIDE, quarantine=tmp_path / "x"))
    books.add(ValueError("a"), stage="t", group=("f", 0), rows=range(6))
    books.count_rows(43)
    with raises(QuarantineError, "6 of 50", "max_rate=0.1", tmp_path / "x"):
        books.count_rows(1)
    books.close()


def test_stages_share_the_books(tmp_path):
    books = Quarantine(Errors(on_error="quarantine", max_rate=1, quarantine=tmp_path / "x"))
    barrier = threading.Barrier(4)

    def stage(number):
        barrier.wait()
        for row in range(50):
            books.add(ValueError("x" * 5000), stage=f"s{number}", group=("f", 0), rows=[row])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(stage, range(4)))
    assert books.summary()["rows_set_aside"] == 200
    assert {(line["stage"], line["row"]) for line in quarantined_rows(tmp_path / "x")} == {
        (f"s{n}", row) for n in range(4) for row in range(50)
    }
    assert max(len(line["reason"]) for line in quarantined_rows(tmp_path / "x")) == 500
    books.close()


# ---- the search


@pytest.mark.parametrize("rows", [1, 2, 3, 17, 100])
@pytest.mark.parametrize("every", [1, 2, 5, 16, 1000])
def test_exactly_the_bad_rows_are_found(rows, every):
    bad = {row for row in range(rows) if row % every == every - 1}
    calls = []

    def attempt(start, stop):
        calls.append((start, stop))
        if bad & set(range(start, stop)):
            raise ValueError(f"in {start} to {stop}")
        return list(range(start, stop))

    good, isolated = isolate(attempt, rows, max_rows=rows)
    assert [row for row, _ in isolated] == sorted(bad)
    assert [row for _, _, result in good for row in result] == [
        r for r in range(rows) if r not in bad
    ]
    assert len(calls) <= 1 + 2 * len(bad) * rows.bit_length()


def test_the_search_gives_up():
    calls = []

    def attempt(start, stop):
        calls.append(start)
        raise ValueError("all bad")

    with raises(ValueError, "all bad"):
        isolate(attempt, 2**20, max_rows=3)
    assert len(calls) < 40


@pytest.mark.parametrize(
    "kind",
    [pa.bool_(), pa.int8(), pa.float32(), pa.binary(), pa.list_(pa.int32()), pa.date32()],
)
def test_something_of_every_kind_stands_for_a_row_group_that_cannot_be_read(tmp_path, kind):
    errors = replace(SET_ASIDE, quarantine=tmp_path / "aside.jsonl")
    books = Quarantine(errors, None, lambda file: f"{file}.parquet")
    table = books.replace_group(
        OSError("damaged"), Read(file=0, group=1, rows=3, parts=()), pa.schema([("x", kind)])
    )
    assert (table.num_rows, table.schema.field("x").type) == (3, kind)
    assert table["x"].null_count == 0
    assert books.summary()["rows_set_aside"] == 3
    books.close()


@pytest.mark.parametrize(("streams", "window_rows"), [(1, 50), (4, 30), (8, None)])
def test_each_row_of_an_epoch_has_one_origin(table, streams, window_rows):
    order = {"streams": streams, "window_rows": window_rows, "last": "pad"}
    with open_loader(table, batch_size=80, **order) as loader:
        steps = [loader._origins.batch(1, step) for step in range(-(-4000 // 80) + 1)]
    assert {len(rows) for rows in steps} == {80}
    origins = Counter(row for rows in steps for row in rows if row is not None)
    groups = loader._input.groups.row_groups
    every = [
        (f, g, n)
        for f, file in enumerate(groups)
        for g, rows in enumerate(file)
        for n in range(rows)
    ]
    assert origins == dict.fromkeys(every, 1)
