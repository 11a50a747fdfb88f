"""A reader's pin: taken, renewed, moved, released; what a killed reader leaves; and a table that cannot be written."""

from __future__ import annotations

import threading
import time

import pytest

from benchmarks.small_table import small_table
from sluice.common.stores import StoreError
from sluice.etl.table import vacuum as vacuum_file
from sluice.etl.table.pins import LASTS_S, PinKeeper, Removal, being_removed, pins
from sluice.etl.table.store import TableStore
from sluice.etl.table.vacuum import DAY_S, vacuum
from tests.raises import assert_names


class Clock:
    """Stands still, but for `now`; `asked` is set once it was asked `times` times."""

    def __init__(self, times: int = 1) -> None:
        self.now, self._left, self.asked = 1000.0, times, threading.Event()

    def __call__(self) -> float:
        self._left -= 1
        if self._left <= 0:
            self.asked.set()
        return self.now


def versions(store: TableStore, now: float) -> list[int]:
    return [pin.version for pin in pins(store, now)]


def test_a_pin_lasts_as_long_as_its_reader(tmp_path):
    store, clock = TableStore(tmp_path), Clock()
    with PinKeeper("train run 1/ä", print, clock=clock) as hold:
        assert versions(store, 0) == []
        hold.take(store.uri, 3)
        hold.take(store.uri, 4)
        assert [(p.version, p.expires) for p in pins(store, 0)] == [(4, 1000.0 + LASTS_S)]
        with PinKeeper("train run 1/ä", print, clock=clock) as other:
            other.take(store.uri, 3)
            assert sorted(versions(store, 0)) == [3, 4]
        assert versions(store, 0) == [4]
    assert versions(store, 0) == []


def test_it_is_renewed_until_its_owner_ends_and_a_killed_owners_expires(tmp_path):
    store, clock = TableStore(tmp_path), Clock(times=4)
    with PinKeeper("reader", print, clock=clock, every_s=1e-4) as hold:
        hold.take(store.uri, 7)
        assert clock.asked.wait(60)
        clock.now = 9000.0
        clock.asked.clear()
        hold.take(store.uri, 7)
        left = store.read_json(f"_sluice/pins/{pins(store, 0)[0].name}.json")
    store.write_json("_sluice/pins/killed.json", left)  # as one leaves it that cannot say goodbye
    assert versions(store, 9000.0 + LASTS_S - 1) == [7]
    assert versions(store, 9000.0 + LASTS_S) == []


def test_another_table_is_pinned_instead(tmp_path):
    stores = [TableStore(tmp_path / name) for name in "ab"]
    with PinKeeper("server", print) as hold:
        for number, store in enumerate(stores):
            hold.take(store.uri, number)
        assert [versions(store, 0) for store in stores] == [[], [1]]
    assert versions(stores[1], 0) == []


def test_a_table_that_cannot_be_written_is_told_once(tmp_path):
    said: list[str] = []
    (tmp_path / "_sluice").write_text("a file where the folder of pins would be")
    with PinKeeper("reader", said.append) as hold:
        for _ in range(3):
            hold.take(str(tmp_path), 2)
    assert len(said) == 1
    assert_names(said[0], f"{tmp_path}:", "version 2", "pinned")


def test_a_version_that_a_vacuum_has_begun_to_remove_cannot_be_taken(tmp_path):
    """Whoever pins looks then for what is being removed; a vacuum says first what it removes, then looks for pins."""
    table = small_table(tmp_path / "clicks", rows=100, files=1)
    store, job = TableStore(table.uri), table.record.job
    path = table.record.files[0].path
    other, beside = (
        Removal.of(["data/another/x.parquet"], []),
        Removal.of([f"data/{job}/_SUCCESS"], [path]),
    )
    for removal in (other, beside):
        removal.begin(store)
    with PinKeeper("reader", print) as hold:
        hold.take(table.uri, 0)
        assert versions(store, 0) == [0]
        removal = Removal.of([path], [])
        removal.begin(store)
        with pytest.raises(
            StoreError, match=f"a vacuum is removing version 0 .data/{job}.; start again"
        ):
            hold.take(table.uri, 0)
        removal.end(store)
        hold.take(table.uri, 0)


def test_a_vacuum_says_what_it_removes_before_it_looks_for_pins_the_last_time(
    tmp_path, monkeypatch
):
    """And what a vacuum that was killed has said goes with the next one, a day later."""
    store, now = (
        TableStore(small_table(tmp_path / "clicks", rows=100, files=1).uri),
        time.time() + 40 * DAY_S,
    )
    small_table(store.uri, rows=100, files=1, mode="overwrite")
    Removal(folders=frozenset({"data/before"})).begin(store)
    said = []
    monkeypatch.setattr(
        vacuum_file, "pins", lambda *_: said.append(being_removed(store)) or pins(store, now)
    )
    done = vacuum(store, keep=1, now=now)
    assert done.files
    assert [len(folders) for folders in said] == [1, 1 + 2], (
        "of the second look: data and record of the first version"
    )
    assert being_removed(store) == frozenset()
