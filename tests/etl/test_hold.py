"""A reader's pin: taken, renewed, moved, released; what a killed reader leaves; and a table that cannot be written."""

import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.small_table import small_table
from sluice import FeatureTable
from sluice.etl.table import vacuum as vacuum_file
from sluice.etl.table.pins import announce_removal, being_removed
from sluice.etl.table.table import Unreadable
from sluice.etl.table.vacuum import DAY_S
from tests.product import LASTS_S, LostVersion, Pin, PinKeeper, TableStore, pins, vacuum
from tests.raises import assert_names, raises


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


def table_at(path: Path, count: int) -> TableStore:
    """Returns the store of a table of so many versions, each of which is whole."""
    for number in range(count):
        mode = "overwrite" if number else "create"
        small_table(path, rows=60, files=1, mode=mode, first=number * 60)
    return TableStore(path)


def test_a_pin_lasts_as_long_as_its_reader(tmp_path):
    store, clock = table_at(tmp_path / "table", 5), Clock()
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
    store, clock = table_at(tmp_path / "table", 8), Clock(times=4)
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
    stores = [table_at(tmp_path / name, 2) for name in "ab"]
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
    announce_removal(store, ["data/another/x.parquet"], [])
    announce_removal(store, [f"data/{job}/_SUCCESS"], [path])
    with PinKeeper("reader", print) as hold:
        hold.take(table.uri, 0)
        assert versions(store, 0) == [0]
        removal = announce_removal(store, [path], [])
        with raises(LostVersion, "version 0", f"data/{job}"):
            hold.take(table.uri, 0)
        assert len(pins(store, 0)) == 1, "the pin before the refused one"
        store.remove(removal)
        hold.take(table.uri, 0)
        assert len(pins(store, 0)) == 1


def test_a_vacuum_says_what_it_removes_before_it_looks_for_pins_the_last_time(
    tmp_path, monkeypatch
):
    """And what a vacuum that was killed has said goes with the next one, a day later."""
    store, now = (
        TableStore(small_table(tmp_path / "clicks", rows=100, files=1).uri),
        time.time() + 40 * DAY_S,
    )
    small_table(store.uri, rows=100, files=1, mode="overwrite")
    announce_removal(store, ["data/before/x.parquet"], [])
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


# ---- "A reader that holds a pin has a whole version, or is told so"


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    """A table of three versions, of which no file is in two."""
    path = tmp_path_factory.mktemp("template") / "table"
    table_at(path, 3)
    return path


@pytest.fixture
def copied(template, tmp_path) -> TableStore:
    shutil.copytree(template, tmp_path / "table")
    return TableStore(tmp_path / "table")


LATER = 4e9
"""All files of the table are older than a day then, and pins of now have expired unless they are renewed."""


def vacuum_newest(store: TableStore) -> vacuum_file.Vacuumed:
    return vacuum(store, keep=1, now=LATER)


def keeper() -> PinKeeper:
    return PinKeeper("reader", print, clock=lambda: LATER)


def part_of(table: FeatureTable, part: str) -> str:
    return table.record.files[0].path if part == "data" else f"_sluice/jobs/{table.record.job}.json"


@pytest.mark.parametrize("part", ["data", "record"])
def test_a_version_that_lost_a_file_before_the_pin_is_refused_and_keeps_no_pin(copied, part):
    """No vacuum runs any more, so nothing but the missing file shows the loss. The pin before stays."""
    path = part_of(FeatureTable.open(copied.uri, 0), part)
    with keeper() as hold:
        hold.take(copied.uri, 1)
        copied.remove(path)
        with raises(LostVersion, path):
            hold.take(copied.uri, 0)
        assert versions(copied, 0) == [1]
        assert vacuum_newest(copied).pinned == (1,)
        assert FeatureTable.open(copied.uri, 1).check() == []


def test_a_pin_of_a_lost_version_keeps_nothing_and_stops_no_vacuum(copied):
    """A vacuum may look at the pins before the reader has taken its own back. A record that cannot be read does stop
    it."""
    lost = FeatureTable.open(copied.uri, 0)
    vacuum_newest(copied)
    Pin(name="late", version=lost.version, expires=LATER + 1).save(copied)
    assert vacuum_newest(copied).files == ()
    assert FeatureTable.open(copied.uri).check() == []
    copied.write(f"_sluice/jobs/{lost.record.job}.json", b"{")
    with raises(Unreadable, f"{lost.record.job}.json"):
        vacuum_newest(copied)


def test_both_versions_are_pinned_while_a_reader_moves(copied):
    with keeper() as hold:
        hold.take(copied.uri, 0)
        with hold.moving(copied.uri, 1):
            assert vacuum_newest(copied).pinned == (0, 1)
        assert versions(copied, 0) == [1]
        with pytest.raises(KeyError), hold.moving(copied.uri, 2):
            raise KeyError
        assert versions(copied, 0) == [1]


def test_the_newest_version_is_opened_even_if_another_one_was_newest_at_first(copied, monkeypatch):
    """A job publishes a version, and a vacuum removes the one before, after the log was read."""

    def publish_and_vacuum(self, path, read=TableStore.read_json):
        if "_sluice/jobs/" in path:
            monkeypatch.undo()
            small_table(copied.uri, rows=60, files=1, mode="overwrite", first=900)
            vacuum_newest(copied)
        return read(self, path)

    monkeypatch.setattr(TableStore, "read_json", publish_and_vacuum)
    assert FeatureTable.open(copied.uri).version == 3
    monkeypatch.setattr(TableStore, "read_json", publish_and_vacuum)
    with raises(LostVersion, "vacuum"):
        FeatureTable.open(copied.uri, 3)


class Turns:
    """Two threads, of which one runs at a time. A drawn one of them makes a drawn number of requests to the store, and
    then another one is drawn. The thread `first` begins."""

    def __init__(self, seed: int, first: str) -> None:
        self._random = random.Random(seed)
        self._drawn = [first] * self._random.randrange(60)
        self._turn = threading.Condition()
        self._running: set[str] = set()
        self._next = ""

    def request(self) -> None:
        """Hands over to a drawn thread, and waits until this one is drawn."""
        name = threading.current_thread().name
        with self._turn:
            if name in self._running:
                self._draw()
                assert self._turn.wait_for(lambda: self._next == name, timeout=60)

    def run(self, **actors: Callable[[], None]) -> None:
        self._running = set(actors)
        threads = [
            threading.Thread(target=self._act, args=[act], name=name)
            for name, act in actors.items()
        ]
        for thread in threads:
            thread.start()
        with self._turn:
            self._draw()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()

    def _act(self, act: Callable[[], None]) -> None:
        name = threading.current_thread().name
        with self._turn:
            assert self._turn.wait_for(lambda: self._next == name, timeout=60)
        try:
            act()
        finally:
            with self._turn:
                self._running.discard(name)
                self._draw()

    def _draw(self) -> None:
        self._drawn = [name for name in self._drawn if name in self._running]
        if self._running and not self._drawn:
            self._drawn = [self._random.choice(sorted(self._running))] * self._random.randint(1, 30)
        self._next = self._drawn.pop() if self._drawn else ""
        self._turn.notify_all()


_REQUESTS = ("read", "write", "files", "listed", "remove", "size", "modified")


def test_a_reader_that_holds_a_pin_has_a_whole_version_or_is_told_so(
    template, tmp_path, monkeypatch
):
    """In drawn orders of the requests that a reader and two vacuums make. A later vacuum removes nothing pinned."""
    ends = {"held": 0, "told": 0}
    for seed in range(80):
        folder = tmp_path / str(seed)
        shutil.copytree(template, folder)
        store, turns = TableStore(folder), Turns(seed, first="clean")
        told: list[LostVersion] = []

        def read(store=store, told=told) -> None:
            try:
                hold.take(store.uri, 0)
            except LostVersion as error:
                told.append(error)

        def clean(store=store) -> None:
            for _ in range(2):
                vacuum_newest(store)

        with keeper() as hold, monkeypatch.context() as patched:
            for name in _REQUESTS:
                patched.setattr(TableStore, name, _in_turn(turns, getattr(TableStore, name)))
            turns.run(read=read, clean=clean)
            assert versions(store, LATER) == ([] if told else [0]), seed
            vacuum_newest(store)
            if not told:
                assert FeatureTable.open(store.uri, 0).check() == [], seed
        assert FeatureTable.open(store.uri).check() == []
        ends["told" if told else "held"] += 1
        shutil.rmtree(folder)
    assert min(ends.values()) > 2, ends


def _in_turn(turns: Turns, request: Callable) -> Callable:
    def called(*args: object, **more: object) -> object:
        turns.request()
        return request(*args, **more)

    return called
