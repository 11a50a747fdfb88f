"""Each row's history against a quadratic search: the last events of its user with a smaller time, and none else."""

import contextlib
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice import Errors, History, Knobs, Transform
from sluice.ingest.read.petastorm import compat
from tests.etl.jobs import build_table
from tests.etl.jobs import rows_of as stored_rows
from tests.open_loader import open_loader
from tests.product import LoadingError, ParquetFiles, PetastormOptions, UsageError
from tests.raises import MISTAKES, raises

ROLES = "label=label;dense=duration;sparse=item,row"
BATCH = 16
ROOT = Path(__file__).resolve().parents[2]


def history(last=3, columns=("item", "duration", "label"), **names):
    return History(**{"by": "user", "time": "time"} | names, columns=columns, last=last)


@dataclass
class Events:
    """Events as lists, sorted by user and time."""

    user: list
    time: list
    known: dict = field(default_factory=dict, repr=False)

    @property
    def rows(self):
        return range(len(self.user))

    @property
    def table(self):
        rows = np.arange(len(self.user))
        return pa.table(
            {
                "user": self.user,
                "time": self.time,
                "item": rows * 7 % 101 + 1,
                "duration": (rows * 0.5).astype(np.float32),
                "label": rows % 2,
                "row": rows,
            }
        )

    def before(self, row, last):
        """The rows of the history of a row."""
        return [
            other
            for other in self.rows
            if self.user[other] == self.user[row] and self.time[other] < self.time[row]
        ][-last:]

    def write(self, folder, groups, files, names=range(99)):
        """Writes row groups of these sizes, the last as long as the rest, to so many files. `names` numbers them."""
        table, start = self.table, 0
        folder.mkdir(exist_ok=True)
        cuts = np.array_split(np.arange(len(groups)), files)
        for number, cut in enumerate(cuts):
            with pq.ParquetWriter(folder / f"part-{names[number]}.parquet", table.schema) as writer:
                for group in cut:
                    end = table.num_rows if group == len(groups) - 1 else start + groups[group]
                    writer.write_table(table.slice(start, end - start))
                    start = end
        return folder

    def histories(self, last):
        """The history of each row, as `before` finds it."""
        if last not in self.known:
            self.known[last] = [self.before(row, last) for row in self.rows]
        return self.known[last]


def check(events, last, batches, shift=0):
    """Asserts the history of every row. Returns the rows in their order. `shift` is what a spec adds to ids."""
    columns, seen = events.table.to_pydict(), []
    for batch in batches:
        rows = (batch["row"] - shift).tolist()
        for name in ("item", "duration", "label"):
            values, lengths = batch[f"{name}_history"]
            assert lengths.sum() == len(values)
            parts = np.split(values.numpy(), np.cumsum(lengths.numpy())[:-1])
            for row, weight, history in zip(rows, batch.weight, parts, strict=True):
                expected = events.histories(last)[row] if weight else []
                assert (history - shift * (name == "item")).tolist() == [
                    columns[name][other] for other in expected
                ], (row, name)
        seen += [row for row, weight in zip(rows, batch.weight, strict=True) if weight]
    return seen


@st.composite
def drawn_events(draw):
    counts = draw(st.lists(st.integers(1, 25), min_size=1, max_size=6))
    steps = st.sampled_from([0, 0, 1, 5])
    times = [np.cumsum(draw(st.lists(steps, min_size=n, max_size=n))) for n in counts]
    users = [user for user, count in enumerate(counts) for _ in range(count)]
    if draw(st.booleans()):
        users = [f"user {user}" for user in users]
    kind = draw(st.sampled_from(["int64", "float64", "datetime64[us]"]))
    return Events(users, np.concatenate(times).astype(kind).tolist())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("events")


@settings(max_examples=12, deadline=None)
@given(drawn_events(), st.data())
def test_a_history_has_the_last_events_before_its_row_and_no_other(folder, events, data):
    groups = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=8))
    groups = [
        n
        for n, before in zip(groups, np.cumsum(groups) - groups, strict=True)
        if before < len(events.rows)
    ]
    files = data.draw(st.integers(1, len(groups)))
    for old in folder.glob("*.parquet"):
        old.unlink()
    source = ParquetFiles.open(events.write(folder, groups, files), ROLES)
    last = data.draw(st.sampled_from([1, 2, 5, 40]))
    options = {
        "batch_size": BATCH,
        "history": history(last),
        "last": "pad",
        "reader": "arrow",
        "streams": data.draw(st.sampled_from([2, 4, 8])),
        "window_rows": data.draw(st.sampled_from([1, 7, 50])),
        "shuffle": data.draw(st.booleans()),
    }
    first, then = (data.draw(st.sampled_from([1, 2])) for _ in range(2))
    stop = data.draw(st.integers(0, -(-len(events.rows) // BATCH) - 1))
    seen = []
    for rank in range(first):
        with open_loader(source, rank=rank, ranks=first, **options) as loader:
            steps = iter(loader)
            seen += check(events, last, (next(steps) for _ in range(stop)))
            state = json.loads(json.dumps(loader.state_dict()))
    for rank in range(then):
        knobs = Knobs(workers={"decode": data.draw(st.integers(1, 3))})
        with open_loader(source, rank=rank, ranks=then, knobs=knobs, **options) as loader:
            loader.load_state_dict(state)
            seen += check(events, last, loader)
    assert sorted(seen) == list(events.rows)


@pytest.fixture(scope="module")
def events():
    random = np.random.default_rng(5)
    users = np.sort(random.integers(0, 30, 2000))
    times = random.integers(0, 60, 2000)
    order = np.lexsort((times, users))
    return Events(users.tolist(), times[order].tolist())


@pytest.fixture(scope="module")
def plain(events, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "events"
    return events.write(folder, [130] * 15, 3)


def rows_of(source, events, last=9, shift=0, **options):
    """The rows in their order, with checked histories, and the order hash of each epoch."""
    options = {"batch_size": 80, "history": history(last), "last": "pad"} | options
    with open_loader(source, epochs=2, **options) as loader:
        return [(check(events, last, loader, shift), loader.order_hash) for _ in range(2)]


@settings(max_examples=12, deadline=None)
@given(drawn_events(), st.data())
def test_sorted_files_may_have_any_names(folder, events, data):
    """Also if events of one moment fill row groups."""
    for old in folder.glob("*.parquet"):
        old.unlink()
    groups = [data.draw(st.integers(1, 4))] * -(-len(events.rows) // 4)
    groups = groups[: -(-len(events.rows) // groups[0])]
    names = data.draw(st.permutations(range(len(groups))))
    source = ParquetFiles.open(events.write(folder, groups, len(groups), names), ROLES)
    with open_loader(source, batch_size=1, history=history(200, ["row"])) as loader:
        for batch in loader:
            [row] = batch["row"].tolist()
            assert sorted(batch["row_history"][0].tolist()) == events.histories(200)[row]


def test_readers_copies_remote_workers_and_knobs_give_one_order(events, plain, tmp_path):
    source = ParquetFiles.open(plain, ROLES)
    expected = rows_of(source, events)
    assert expected[0] != expected[1]
    with open_loader(source, epochs=2, batch_size=80, last="pad") as loader:
        hashes = [(list(loader), loader.order_hash)[1] for _ in range(2)]
    assert hashes == [order for _, order in expected], "a history changes no row"
    for options in (
        {"reader": "arrow"},
        {"knobs": Knobs(workers={"decode": 3})},
        {"workers": "local:1"},
    ):
        assert rows_of(source, events, **options) == expected, options


def test_a_transform_gets_histories_in_threads_and_in_processes(events, plain):
    source = ParquetFiles.open(plain, ROLES)
    transform = Transform("tests.ingest.test_histories:twice", "twice")
    for backend in ("thread", "process"):
        knobs = Knobs(backend={"twice": backend})
        with open_loader(
            source, batch_size=80, history=history(4), transforms=[transform], knobs=knobs
        ) as loader:
            for batch in loader:
                rows = [events.before(row, 4) for row in batch["row"].tolist()]
                expected = [row for before in rows for row in before]
                assert batch["duration_history"].values.tolist() == expected
                assert batch["label_history"].values.tolist() == [row % 2 for row in expected]


def twice(columns):
    columns["duration_history"] = columns["duration_history"] * 2


@pytest.mark.parametrize("size", [1000, 3_000_000_000])
def test_ids_are_those_of_their_column(events, plain, size):
    """Ids beyond int32 make all values of a batch int64, also the bits of numbers."""
    source = ParquetFiles.open(
        plain, f"label=label;dense=duration;sparse=item%{size},row", {"item": size}
    )
    ids, seen = {}, []
    with open_loader(source, batch_size=80, history=history(1, ["item", "duration"])) as loader:
        assert loader.cardinalities["item_history"] == loader.cardinalities["item"] == size + 2
        for batch in loader:
            rows, arrays = batch["row"].tolist(), batch.numpy()
            ids |= dict(zip(rows, arrays["item"].tolist(), strict=True))
            before = [events.before(row, 1) for row in rows]
            assert arrays["item_history"].lengths.tolist() == list(map(len, before))
            assert arrays["duration_history"].values.tolist() == [
                event[0] / 2 for event in before if event
            ]
            expected = [event[0] for event in before if event]
            seen += zip(expected, arrays["item_history"].values.tolist(), strict=True)
    known = [(ids[row], value) for row, value in seen if row in ids]
    assert known
    assert all(expected == value for expected, value in known)


SPEC = """
[input]
format = "parquet"
columns = ["user:int", "time:int", "item:int", "duration:float", "label:int", "row:int", "part:text"]

[table]
{split}

[[column]]
name = "label"
role = "label"

[[column]]
name = "duration"
role = "dense"
ops = [{{op = "fill", value = 0}}]

[[column]]
name = "item"
role = "sparse"
ops = [{{op = "fill", value = 0}}, {{op = "modulus", size = 5000, online = true}}]

[[column]]
name = "row"
role = "sparse"
ops = [{{op = "fill", value = 0}}, {{op = "modulus", size = 5000}}]
"""
USER_AND_TIME = """
[[column]]
name = "user"
role = "sparse"
ops = [{{op = "fill", value = 0}}, {{op = "modulus", size = 5000}}]

[[column]]
name = "time"
role = "time"
"""
PLACED = (
    'order = "user"\nthen = "time"\norder_step = 1\nfile_rows = {file}\nrow_group_rows = {group}\n'
)
NAMES = ("train", "valid", "test")
SPLITS = {
    "user": 'split_by = "user"\nsplit = {train = 0.4, valid = 0.3, test = 0.3}',
    "time": 'split_time = "time"\nsplit = {train = 0, valid = 20, test = 40}',
    "column": 'split_column = "part"\nsplit = {train = 0.4, valid = 0.3, test = 0.3}',
    "row": 'key = ["row"]\nsplit = {train = 0.4, valid = 0.3, test = 0.3}',
}


@dataclass
class OfSplits(Events):
    """A row sees only events of its own split and of the splits before it."""

    def __post_init__(self):
        self.parts = np.random.default_rng(len(self.user)).choice([*NAMES, "none"], len(self.user))

    @property
    def table(self):
        return Events.table.fget(self).append_column("part", pa.array(self.parts))

    def read_splits(self, source, by_column):
        """Finds the split of each row by loading each split."""
        self.split = np.full(len(self.user), -1)
        for number, name in enumerate(NAMES):
            if name in source.splits:
                with open_loader(source, batch_size=BATCH, last="pad", split=name) as loader:
                    for batch in loader:
                        rows = batch["row"][batch.weight > 0].numpy() - 2
                        assert (self.split[rows] == -1).all()
                        self.split[rows] = number
        if by_column:
            assert [NAMES[n] if n >= 0 else "none" for n in self.split] == self.parts.tolist()
        assert by_column or (self.split >= 0).all()
        self.places = np.arange(len(self.split))

    def before(self, row, last):
        users, times = np.array(self.user), np.array(self.time)
        seen = (users == users[row]) & (times < times[row])
        seen &= (self.split >= 0) & (self.split <= self.split[row])
        rows = np.flatnonzero(seen)
        return rows[np.lexsort((self.places[rows], times[rows]))][-last:].tolist()


def check_splits(events, source, last, **options):
    """Asserts the histories of all splits, also after a resume on another number of ranks. Returns how many rows see
    another split."""
    options = {"batch_size": BATCH, "last": "pad", "history": history(last)} | options
    for number, name in enumerate(NAMES):
        if name not in source.splits:
            continue
        seen = []
        with open_loader(source, split=name, **options) as loader:
            steps = iter(loader)
            several = (events.split == number).sum() > BATCH
            seen += check(events, last, [next(steps)] if several else [], shift=2)
            state = json.loads(json.dumps(loader.state_dict()))
        for rank in range(2):
            with open_loader(source, split=name, rank=rank, ranks=2, **options) as loader:
                loader.load_state_dict(state)
                seen += check(events, last, loader, shift=2)
        assert sorted(seen) == np.flatnonzero(events.split == number).tolist()
    split = events.split
    return sum((split[events.histories(last)[row]] < split[row]).any() for row in events.rows)


@settings(max_examples=8, deadline=None)
@given(drawn_events(), st.sampled_from(sorted(SPLITS)), st.data())
def test_a_row_of_files_sees_its_split_and_those_before_it(folder, events, split, data):
    for old in folder.glob("*.parquet"):
        old.unlink()
    events = OfSplits(*whole_times(events))
    events.write(folder, [data.draw(st.integers(1, 30)), len(events.rows)], 2)
    source = with_split(folder, folder, SPLITS[split])
    events.read_splits(source, split == "column")
    last = data.draw(st.sampled_from([1, 3, 40]))
    window = data.draw(st.sampled_from([1, 7, 50]))
    others = check_splits(events, source, last, window_rows=window)
    assert not others or split != "user"


def whole_times(events):
    """Users and times as the spec declares them."""
    users = {user: number for number, user in enumerate(dict.fromkeys(events.user))}
    # Times up to 60, as the splits by time expect.
    moments, numbers = np.unique(events.time, return_inverse=True)
    times = numbers * 60 // len(moments)
    return [users[user] for user in events.user], times.tolist()


def with_split(plain, path, split):
    (path / "spec.toml").write_text(SPEC.format(split=split))
    return ParquetFiles.open(plain, spec=path / "spec.toml")


@contextlib.contextmanager
def started_worker(table, folder):
    """A worker process of this table, as the value of a loader's `workers`. A fleet would start one for each loader."""
    token = folder / "token"
    token.write_text("histories")
    words = f"sluice worker --table {table.uri} --listen 127.0.0.1:0 --token-file {token}"
    command = [sys.executable, "-m", *words.split()]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
        try:
            yield json.loads(worker.stdout.readline())["listening"] + f"?token={token}"
        finally:
            worker.terminate()


@pytest.mark.parametrize("split", SPLITS)
def test_a_row_of_a_feature_table_sees_its_split_and_those_before_it(tmp_path, split):
    random = np.random.default_rng(3)
    counts = random.integers(1, 90, 25)
    # One user has several row groups of each split.
    counts[7] = 900
    users = np.repeat(np.arange(25), counts).tolist()
    times = np.concatenate([np.sort(random.integers(0, 60, n)) for n in counts]).tolist()
    events = OfSplits(users, times)
    mixed = events.table.take(random.permutation(len(users)))
    pq.write_table(mixed, tmp_path / "mixed.parquet")
    text = (SPEC + USER_AND_TIME).format(split=PLACED.format(file=300, group=64) + SPLITS[split])
    table = build_table(None, tmp_path / "table", tmp_path / "mixed.parquet", text=text)
    events.read_splits(table, split == "column")
    # Events of one moment are in the order of the splits and of their files.
    files = [row["row"] - 2 for name in NAMES for row in stored_rows(table, name)]
    events.places[files] = np.arange(len(files))
    others = check_splits(events, table, 30)
    assert bool(others) == (split != "user")
    if split == "time":
        with started_worker(table, tmp_path) as workers:
            assert check_splits(events, table, 30, workers=workers) == others


def refused(path, *facts, table=None, **options):
    """Asserts that a loader refuses a file of this table, before it reads it or while it does."""
    if table is not None:
        pq.write_table(table, path / "a.parquet", row_group_size=3)
    source = ParquetFiles.open(path, options.pop("roles", ROLES))
    with (
        raises(LoadingError, *facts),
        open_loader(
            source, **{"batch_size": 4, "history": history(), "shuffle": False} | options
        ) as loader,
    ):
        list(loader)


SMALL = Events([1, 1, 1, 1, 2, 2, 3], [0, 1, 1, 2, 0, 0, 5]).table


def replaced(name, values):
    return SMALL.set_column(SMALL.schema.get_field_index(name), name, pa.array(values))


@pytest.mark.parametrize(
    ("name", "values", "facts"),
    [
        ("time", [0, 2, 1, 2, 0, 0, 5], ("row group 0", "row 2", "time", 1, 2)),
        ("time", [0, 1, 3, 2, 0, 0, 5], ("row group 0", "row group 1", "time", 3, 2)),
        ("user", [1, 1, 2, 1, 2, 2, 3], ("row group 0", "row group 1", "user")),
        ("user", [1, 1, None, 1, 2, 2, 3], ("row group 0", "user", 1)),
        ("time", [0.0, 1, 1, 2, float("nan"), 0, 5], ("row group 1", "time", 1)),
        ("time", ["a", "b", "b", "c", "a", "a", "b"], ("time", "string")),
        ("duration", [0.5, None, 1, 1, 2, 2, 3], ("duration", 1, "fill")),
        ("item", [2**40, 1, 1, 1, 2, 2, 3], ("item", 2**40)),
    ],
)
def test_rows_out_of_order_and_empty_values_are_refused(tmp_path, name, values, facts):
    refused(tmp_path, "a.parquet", *facts, table=replaced(name, values))


def test_a_user_in_two_files_out_of_order_is_refused(tmp_path):
    pq.write_table(SMALL.slice(2), tmp_path / "a.parquet")
    pq.write_table(replaced("user", [1, 3, 3, 3, 4, 4, 5]).slice(0, 3), tmp_path / "b.parquet")
    refused(tmp_path, "a.parquet", "b.parquet", "user", 1, 3)


def test_missing_statistics_are_refused(tmp_path):
    pq.write_table(SMALL, tmp_path / "a.parquet", write_statistics=False)
    refused(tmp_path, "a.parquet", "user", "statistics")


@pytest.mark.parametrize(
    ("given", "facts"),
    MISTAKES["history"],
)
def test_a_history_checks_itself(given, facts):
    with raises(UsageError, *facts):
        history(**given)


def test_columns_that_cannot_have_a_history_are_refused(tmp_path):
    bags = SMALL.append_column("tags", pa.array([[1]] * 7)).append_column(
        "item_history", SMALL["item"]
    )
    pq.write_table(bags, tmp_path / "a.parquet")
    for roles, own, facts in (
        (ROLES, history(by="usr"), ("a.parquet", "usr", "user")),
        (ROLES, history(columns=["itm"]), ("itm", "item")),
        (f"{ROLES};id_list=tags", history(columns=["tags"]), ("tags",)),
        (f"{ROLES},item_history", history(columns=["item"]), ("item_history",)),
    ):
        refused(tmp_path, *facts, roles=roles, history=own)
    refused(tmp_path, "on_error", errors=Errors(on_error="quarantine"))
    compat.install()
    from petastorm.predicates import in_lambda

    odd = in_lambda(["row"], lambda row: row["row"] % 2 == 1)
    refused(tmp_path, "predicate", petastorm=PetastormOptions(predicate=odd))


def test_a_memory_limit_bounds_a_history_and_names_what_would_do(events, plain):
    source = ParquetFiles.open(plain, ROLES)
    with open_loader(source, batch_size=80, history=history(9)) as loader:
        least = loader.pipeline.least_limit
    with open_loader(source, batch_size=80, history=history(9000)) as loader:
        assert loader.pipeline.least_limit > least
        assert loader.memory()["parts"]["batches"] > 80 * 3 * 9000 * 4
