"""`sluice.testing`: Sluice's loader keeps each promise, and a loader that breaks one is found and named."""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sluice import Loader, Order
from sluice.testing import (
    assert_even_ranks,
    assert_exactly_once,
    assert_resumes,
    assert_resumes_on,
    assert_same_order,
    assert_within_memory,
)
from tests.raises import raises

ROWS = 1200


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    path = tmp_path_factory.mktemp("clicks") / "clicks.parquet"
    ids = np.arange(ROWS, dtype=np.int32)
    table = pa.table({"click": (ids % 2).astype(np.int8), "id": ids, "tag": [f"t{n}" for n in ids]})
    pq.write_table(table, path, row_group_size=150)
    return path


def loader_of(path, rank=0, ranks=1, last="pad", **more):
    roles = {"label": "click", "dense": ["id"], "sparse": ["tag"]}
    settings = {"roles": roles, "hash": {"tag": 100}, "tuning": "fixed", "seed": 3} | more
    return Loader(
        path,
        batch_size=96,
        rank=rank,
        ranks=ranks,
        order=Order(last=last, window_rows=300),
        **settings,
    )


@pytest.mark.parametrize("form", ["batch", "dict", "numpy", "pandas", "kjt"])
def test_our_loader_has_the_same_order_in_each_form(clicks, form):
    assert_same_order(lambda: loader_of(clicks, as_=form, last="drop"), epochs=2)


def test_our_loader_keeps_every_promise(clicks):
    assert_exactly_once(lambda: loader_of(clicks), key="id", rows=range(ROWS), epochs=2)
    assert_resumes(lambda: loader_of(clicks))
    assert_resumes_on(lambda rank, ranks: loader_of(clicks, rank, ranks), key="id")
    assert_even_ranks(lambda rank, ranks: loader_of(clicks, rank, ranks))
    assert_within_memory(lambda: loader_of(clicks), "8GiB")


@dataclass
class Numbers:
    """A loader of 0 to 23 in batches of 4 for one rank, that breaks the promise that its name says."""

    breaks: str = ""
    rank: int = 0
    ranks: int = 1
    made: int = 0
    place: int = 0
    closed: bool = False

    def __iter__(self):
        start, self.place = self.place, 0
        numbers = np.arange(24)
        if self.breaks == "order":
            numbers = np.roll(numbers, self.made)
        if self.breaks == "once":
            numbers[5] = 4
        if self.breaks == "last":
            numbers = numbers[:-1]
        batches = numbers.reshape(-1, 4) if len(numbers) == 24 else np.array_split(numbers, 6)
        for step in range(start, 6):
            own = batches[step][self.rank :: self.ranks]
            self.place = step + (2 if self.breaks == "read ahead" and step == 3 else 1)
            yield {"id": own, "parts": (torch.tensor(own) * 2, {"name": f"step {step}"})}
        if self.breaks == "even" and self.rank == 1:
            yield {"id": own, "parts": ()}
        self.place = 0

    def state_dict(self):
        if self.breaks == "looked at":
            self.made += 1
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]

    def close(self):
        self.closed = True


class Held:
    """A loader whose iterator has the state."""

    def __iter__(self):
        return HeldIterator()


class HeldIterator:
    def __init__(self):
        self.next = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == 5:
            raise StopIteration
        self.next += 1
        return np.float32(self.next)

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Maker:
    """Makes loaders, and knows which are still open."""

    def __init__(self, breaks=""):
        self.breaks, self.loaders = breaks, []

    def __call__(self, rank=0, ranks=1):
        self.loaders.append(Numbers(self.breaks, rank, ranks, made=len(self.loaders)))
        return self.loaders[-1]


def test_another_loader_keeps_every_promise_and_each_is_closed():
    make = Maker()
    assert_same_order(make, epochs=2)
    assert_exactly_once(make, key="id", rows=range(24), epochs=2)
    assert_exactly_once(make, key=lambda batch: batch["id"])
    assert_resumes(make)
    assert_resumes(make, at=[3, 0])
    assert_resumes_on(make, key="id")
    assert_even_ranks(make)
    assert_resumes(Held)
    assert all(loader.closed for loader in make.loaders)


@pytest.mark.parametrize(
    ("breaks", "check", "facts"),
    [
        ("order", assert_same_order, ["batch 0", "id", "parts.0"]),
        ("once", lambda make: assert_exactly_once(make, key="id"), ["1 rows", "4"]),
        (
            "once",
            lambda make: assert_exactly_once(make, key="id", rows=range(24)),
            ["1 rows", "4", "too often"],
        ),
        ("last", lambda make: assert_exactly_once(make, key="id", rows=range(24)), ["missing", "23"]),
        ("read ahead", assert_resumes, ["after 4 batches", "batch 4"]),
        ("even", assert_even_ranks, ["2 ranks", "[6, 7]"]),
        (
            "read ahead",
            lambda make: assert_resumes(make, at=[6]),
            ["at=6", "6 batches"],
        ),
    ],
)  # fmt: skip
def test_a_broken_promise_is_named(breaks, check, facts):
    make = Maker(breaks)
    with raises(AssertionError, *facts):
        check(make)
    assert all(loader.closed for loader in make.loaders)


def test_a_state_that_skips_rows_on_another_number_of_ranks_is_found():
    class Skips(Numbers):
        def load_state_dict(self, state):
            self.place = state["place"] + (self.ranks == 4)

    with raises(AssertionError, "1 ranks, then 4", "missing"):
        assert_resumes_on(lambda rank, ranks: Skips("", rank, ranks), key="id")


def test_taking_a_state_may_not_change_the_batches():
    class Jumps(Numbers):
        def state_dict(self):
            self.breaks = "order"
            self.made = 1
            return super().state_dict()

    with raises(AssertionError, "while states were taken", "batch 0"):
        assert_resumes(Jumps)


def test_memory_above_the_limit_is_named():
    class Used:
        def __init__(self, *mib):
            self.left = iter(mib)

        def memory_used(self):
            return next(self.left) * 2**20

    assert_within_memory(Held, "9MiB", machine=Used(5, 6, 7, 8, 9))
    with raises(AssertionError, "batch 3", "10 MiB", "9 MiB"):
        assert_within_memory(Held, "9MiB", machine=Used(5, 6, 7, 10, 9))


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch | {"bits": np.array([0.0], np.float32)},
        lambda batch: batch | {"bits": np.array([[-0.0]], np.float32)},
        lambda batch: batch | {"bits": np.array([-0.0])},
        lambda batch: batch | {"words": np.array(["a", "c"], object)},
        lambda batch: {name: batch[name] for name in ("bits", "words")},
        lambda batch: batch | {"deep": replace(batch["deep"], y=[torch.zeros(2)])},
    ],
    ids=["sign", "shape", "type", "word", "column", "tensor"],
)
def test_each_bit_shape_and_type_counts(change):
    @dataclass
    class Deep:
        x: int
        y: list

    batch = {
        "bits": np.array([-0.0], np.float32),
        "words": np.array(["a", "b"], object),
        "deep": Deep(1, [torch.ones(2)]),
    }
    loaders = iter([[batch], [batch], [batch], [change(batch)]])
    assert_same_order(lambda: next(loaders))
    with raises(AssertionError, "batch 0"):
        assert_same_order(lambda: next(loaders))


def test_a_batch_that_cannot_be_compared_is_refused():
    with raises(TypeError, "object"):
        assert_same_order(lambda: [object()])


def test_an_epoch_without_batches_proves_nothing():
    for check in (assert_same_order, assert_resumes):
        with raises(AssertionError, "no batch"):
            check(list)
