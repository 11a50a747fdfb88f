"""Every row once, in the table's order, while rows are quarantined and others write to the table."""

import gc
import json
import threading
import time

import psutil
import pyarrow as pa
import pytest

from benchmarks.small_table import small_table
from sluice import Errors, FeatureTable, Knobs, Transform
from tests.ingest.twin import eventually
from tests.open_loader import open_loader
from tests.product import PinKeeper, TableError, TableStore, vacuum

pytestmark = pytest.mark.slow

ROWS, BAD = 4000, 97


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return small_table(
        tmp_path_factory.mktemp("exact") / "t",
        rows=ROWS,
        files=3,
        row_group_rows=256,
        splits={"train": 1.0},
        number_rows=True,
    )


def fails_on_some(columns):
    if (columns["I1"] % BAD == 0).any():
        raise ValueError("a row that nothing can be made of")
    return columns


def loading(table, path, workers, function):
    transforms = [] if function is None else [Transform(function, "mine", reads=("I1",))]
    knobs = Knobs(workers={"decode": workers, **({"mine": workers} if transforms else {})})
    return open_loader(
        table,
        batch_size=80,
        seed=3,
        transforms=transforms,
        knobs=knobs,
        errors=Errors(on_error="quarantine", max_rate=1, quarantine=path),
        window_rows=300,
        last="pad",
    )


def taken(batches, most=None):
    """Row numbers with their weights, in order, of so many batches."""
    batches_taken = []
    for number, batch in enumerate(batches, 1):
        batches_taken += [
            (int(row), float(weight))
            for row, weight in zip(batch.dense[:, 0], batch.weight, strict=True)
        ]
        if number == most:
            break
    return batches_taken


@pytest.mark.parametrize("workers", [1, 4])
def test_rows_that_are_set_aside_move_no_other_row(table, tmp_path, workers):
    """The same order hash as without them; also when it goes on in the middle of the epoch, with other workers."""
    with loading(table, tmp_path / "none", 1, None) as loader:
        plain, usual = taken(loader), loader.order_hash
    path = tmp_path / "aside.jsonl"
    with loading(table, path, workers, fails_on_some) as loader:
        rows = taken(loader)
        assert loader.order_hash == usual
        assert loader.quarantined["rows_set_aside"] == -(-ROWS // BAD)
    want = [(row, 0.0 if row % BAD == 0 else weight) for row, weight in plain]
    assert rows == want
    real = [row for row, weight in rows if weight]
    assert sorted(real) == [row for row in range(ROWS) if row % BAD]
    assert len(path.read_text().splitlines()) == -(-ROWS // BAD)
    listed = {
        (x["file"], x["row_group"], x["row"])
        for x in map(json.loads, path.read_text().splitlines())
    }
    assert len(listed) == -(-ROWS // BAD)
    with loading(table, tmp_path / "one", workers, fails_on_some) as loader:
        first = taken(loader, 17)
        state = loader.state_dict()
    with loading(table, tmp_path / "two", 5 - workers, fails_on_some) as loader:
        loader.load_state_dict(state)
        assert first + taken(loader) == want


def test_writers_and_vacuums_at_any_moment_leave_a_held_version_as_it_is(tmp_path):
    """Appends, overwrites and vacuums that keep nothing but the newest follow one another while a run reads version 0,
    again and again; the pin goes, and so do its files."""
    held = small_table(
        tmp_path / "t",
        rows=ROWS,
        files=3,
        row_group_rows=256,
        splits={"train": 1.0},
        number_rows=True,
    )
    store, begun, seen = TableStore(held.uri), threading.Event(), []
    said: list[str] = []

    def disturb():
        begun.wait(60)
        for number, mode in enumerate(["append", "overwrite", "append"], 1):
            small_table(
                held.uri, rows=200, files=1, mode=mode, first=number * ROWS, splits={"train": 1.0}
            )
            seen.append(vacuum(store, keep=1, now=time.time() + 1, grace_s=0))

    with PinKeeper("reader", said.append) as hold:
        hold.take(held.uri, held.version)
        disturbing = threading.Thread(target=disturb)
        disturbing.start()
        hashes = set()
        with open_loader(
            held,
            batch_size=80,
            seed=3,
            epochs=1000,
            window_rows=300,
            last="pad",
            shuffle=False,
        ) as loader:
            while disturbing.is_alive() or len(seen) < 3:
                rows = taken(loader)
                begun.set()
                hashes.add(loader.order_hash)
                assert sorted(int(row) for row, weight in rows if weight) == list(range(ROWS))
        disturbing.join()
        assert len(hashes) == 1
        assert [v.pinned for v in seen] == [(0,)] * 3
        assert sum(len(v.files) for v in seen) > 0, "the vacuums had something to remove"
        assert FeatureTable.open(held.uri, 0).check() == []
        assert FeatureTable.open(held.uri).rows == 400
    assert said == []
    gone = vacuum(store, keep=1, now=time.time() + 1, grace_s=0)
    assert {store.relative(f.path) for f in held.files} <= set(gone.files)
    with pytest.raises(TableError, match=r"was this version removed by vacuum\?"):
        FeatureTable.open(held.uri, 0)


def test_many_epochs_and_resizes_leave_no_thread_file_or_memory(table):
    process = psutil.Process()

    def held():
        gc.collect()
        return process.num_fds(), threading.active_count(), pa.total_allocated_bytes()

    def some(loader, epochs):
        for epoch in range(epochs):
            for batch in loader:
                if batch.step % 2 == 0:
                    loader.apply(Knobs(workers={"decode": 1 + (epoch + batch.step) % 3}))
            yield held()

    how = {"batch_size": 1000, "epochs": 1000, "window_rows": 300, "last": "pad"}
    with open_loader(table, **how) as warm:
        list(some(warm, 2))
    del warm
    before = held()
    with open_loader(table, **how) as loader:
        during = list(some(loader, 16))
    del loader
    eventually(lambda: held()[:2] <= before[:2])  # the lock's probe wakes once more
    assert held()[2] <= before[2] + 2**20
    files, threads, _ = zip(*during, strict=True)
    opened = (
        3 * 2 * len(table.files_of("train"))
    )  # each of three workers may have each file open, by two descriptors
    assert max(files) <= before[0] + opened + 12  # a leak in each epoch would be 16
    assert max(threads[8:]) <= max(threads[:8]) + 6
