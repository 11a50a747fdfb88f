"""Proves what a loader promises, for Sluice's loader and for any other.

    from sluice.testing import assert_resumes

    def test_my_loader_resumes():
        assert_resumes(lambda: MyLoader("clicks/*.parquet", seed=7))

A loader is any iterable of which one `iter()` is one epoch. Each check takes a function that makes a new one, and
closes what it has made. Batches are compared bit for bit: arrays, tensors, numbers and texts, also in dicts, lists,
tuples and dataclasses. A check raises AssertionError, with the batch and the column that differ.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from sluice.ingest.knobs import format_bytes, parse_bytes

if TYPE_CHECKING:
    from sluice.ingest.machine import Machine

__all__ = [
    "assert_even_ranks",
    "assert_exactly_once",
    "assert_resumes",
    "assert_resumes_on",
    "assert_same_order",
    "assert_within_memory",
]

MakeLoader = Callable[[], Any]
MakeRank = Callable[[int, int], Any]
"""Makes the loader of a rank, given (rank, ranks)."""
Key = str | int | Callable[[Any], Iterable[Any]]
"""The column of a batch that tells rows apart, or a function that returns the keys of a batch's rows."""
_PLAIN = (bool, int, float, str, bytes, type(None))
_Content = dict[str, str]
"""A digest of each part of a batch, by its name."""


def assert_same_order(make_loader: MakeLoader, *, epochs: int = 1) -> None:
    """Two new loaders give the same batches in the same order, in each of these epochs."""
    with _opened(make_loader()) as first, _opened(make_loader()) as second:
        for epoch in range(epochs):
            expected = _contents(first)
            assert expected, f"epoch {epoch} has no batch"
            _compare(_contents(second), expected, f"a second loader, epoch {epoch}")


def assert_exactly_once(
    make_loader: MakeLoader, *, key: Key, rows: Iterable[Any] | None = None, epochs: int = 1
) -> None:
    """Each epoch has each row once: the keys `rows`, or without them, the keys of the first epoch. A key that stands
    n times in `rows` comes n times."""
    expected = None if rows is None else Counter(_plain(rows))
    with _opened(make_loader()) as loader:
        for epoch in range(epochs):
            found = Counter(chain.from_iterable(_keys(batch, key) for batch in loader))
            if expected is None:
                expected = Counter(dict.fromkeys(found, 1))
            _compare_rows(found, expected, f"epoch {epoch}")


def assert_resumes(make_loader: MakeLoader, at: str | Iterable[int] = "every step") -> None:
    """A new loader that loads the state after any step goes on with the next batch, to the end of the epoch, and taking
    states changes nothing. `at` are the numbers of batches before the states.

    `state_dict` and `load_state_dict` are methods of the loader or of its iterator."""
    with _opened(make_loader()) as loader:
        whole = _contents(loader)
    assert whole, "the epoch has no batch"
    with _opened(make_loader()) as loader:
        rest = iter(loader)
        saved = _saved_states(loader, rest, whole)
    steps = range(len(whole)) if at == "every step" else [int(step) for step in at]
    for step in steps:
        assert 0 <= step < len(whole), f"at={step}: the epoch has {len(whole)} batches"
        with _opened(make_loader()) as loader:
            resumed = _contents(_resumed(loader, saved[step]))
        _compare(resumed, whole[step:], f"resumed after {step} batches", step)


def assert_resumes_on(make_rank: MakeRank, *, key: Key, ranks: Sequence[int] = (1, 2, 4)) -> None:
    """A state that all of n ranks have reached continues on any other number of ranks. Together, they take each row of
    the epoch once. The state is that of rank 0, after half of the steps."""
    with _opened(make_rank(0, 1)) as loader:
        expected = Counter(chain.from_iterable(_keys(batch, key) for batch in loader))
    for before in ranks:
        with _opened(make_rank(0, before)) as loader:
            steps = max(1, sum(1 for _ in loader) // 2)
        taken: Counter[Any] = Counter()
        state = None
        for rank in range(before):
            with _opened(make_rank(rank, before)) as loader:
                batches = iter(loader)
                for batch in islice(batches, steps):
                    taken.update(_keys(batch, key))
                if rank == 0:
                    state = _state_of(loader, batches)
        for after in ranks:
            found = taken.copy()
            for rank in range(after):
                with _opened(make_rank(rank, after)) as loader:
                    for batch in _resumed(loader, state):
                        found.update(_keys(batch, key))
            _compare_rows(found, expected, f"{before} ranks, then {after}")


def assert_even_ranks(make_rank: MakeRank, *, ranks: Sequence[int] = (1, 2, 4)) -> None:
    """All ranks take the same number of steps, so that none waits for another in a sum over all ranks."""
    for count in ranks:
        steps = []
        for rank in range(count):
            with _opened(make_rank(rank, count)) as loader:
                steps.append(sum(1 for _ in loader))
        assert steps == [max(1, steps[0])] * count, f"{count} ranks take {steps} steps"


def assert_within_memory(
    make_loader: MakeLoader, limit: int | str, *, epochs: int = 1, machine: Machine | None = None
) -> None:
    """This process and its children never hold more memory than the limit, measured while each batch is held.

    Memory of files that the kernel can drop does not count."""
    from sluice.ingest.machine import Machine  # other checks run without what it needs

    machine, most = machine or Machine(), parse_bytes(limit)
    with _opened(make_loader()) as loader:
        for epoch in range(epochs):
            for step, _ in enumerate(loader):
                used = machine.memory_used()
                assert used <= most, (
                    f"epoch {epoch}, batch {step}: {format_bytes(used)} are in use, and the limit is "
                    f"{format_bytes(most)}"
                )


@contextmanager
def _opened(loader: Any) -> Iterator[Any]:
    try:
        yield loader
    finally:
        close = getattr(loader, "close", None)
        if close is not None:
            close()


def _saved_states(loader: Any, batches: Iterator[Any], whole: Sequence[_Content]) -> list[Any]:
    """Takes a state before each batch of an epoch."""
    states = []
    for step, expected in enumerate(whole):
        states.append(_state_of(loader, batches))
        batch = next(batches, None)
        assert batch is not None, f"the epoch ended after {step} batches while states were taken"
        _compare([_content(batch)], [expected], "while states were taken", step)
    return states


def _state_of(loader: Any, batches: Iterator[Any]) -> Any:
    owner: Any = loader if hasattr(loader, "state_dict") else batches
    return copy.deepcopy(owner.state_dict())


def _resumed(loader: Any, state: Any) -> Iterator[Any]:
    if hasattr(loader, "load_state_dict"):
        loader.load_state_dict(state)
        return iter(loader)
    batches: Any = iter(loader)
    batches.load_state_dict(state)
    return iter(batches)


def _keys(batch: Any, key: Key) -> list[Any]:
    """Returns the keys of a batch's rows, without those that only fill it."""
    if callable(key):
        return _plain(key(batch))
    keys = _plain(batch[key])
    weight = getattr(batch, "weight", None)
    if weight is None or getattr(batch, "rows", len(keys)) == len(keys):
        return keys
    return [name for name, kept in zip(keys, _plain(weight), strict=True) if kept]


def _plain(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _contents(batches: Iterable[Any]) -> list[_Content]:
    return [_content(batch) for batch in batches]


def _content(batch: Any) -> _Content:
    return {name: _digest(value) for name, value in _parts(batch, "")}


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields the arrays and plain values that something is made of, with their names."""
    parts: Iterable[tuple[Any, Any]]
    if hasattr(value, "to_dict") and hasattr(value, "columns"):  # a frame
        parts = ((column, value[column].to_numpy()) for column in value.columns)
    elif isinstance(value, Mapping):
        parts = value.items()
    elif hasattr(value, "lengths") and callable(value.values):  # TorchRec's tensor by keys
        parts = [(part, getattr(value, part)()) for part in ("keys", "values", "lengths")]
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [
            (field.name, getattr(value, field.name)) for field in fields(value) if field.compare
        ]
    elif isinstance(value, list | tuple) and not all(isinstance(part, _PLAIN) for part in value):
        parts = enumerate(value)
    else:
        yield name, value
        return
    for inner, part in parts:
        yield from _parts(part, f"{name}.{inner}" if name else str(inner))


def _digest(value: Any) -> str:
    """Returns the type, the shape and a digest of the bits of an array or a plain value."""
    if hasattr(value, "detach"):  # a tensor, which may be on another device
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        value = repr(value.tolist())
    if isinstance(value, np.ndarray | np.generic):
        bits = np.ascontiguousarray(value).tobytes()
        return f"{value.dtype}{list(value.shape)} {hashlib.sha256(bits).hexdigest()[:16]}"
    if isinstance(value, (*_PLAIN, list, tuple)):
        return f"{type(value).__name__} {value!r}"
    raise TypeError(
        f"a batch holds a {type(value).__name__}, which cannot be compared; make a loader of arrays, tensors, numbers "
        "or texts"
    )


def _compare(
    found: Sequence[_Content], expected: Sequence[_Content], what: str, first: int = 0
) -> None:
    for step, (one, other) in enumerate(zip(found, expected, strict=False), first):
        names = [name for name in other.keys() | one.keys() if one.get(name) != other.get(name)]
        assert not names, f"{what}: batch {step} differs in {', '.join(sorted(names)) or 'all'}"
    assert len(found) == len(expected), (
        f"{what}: {len(found)} batches come, and {len(expected)} should"
    )


def _compare_rows(found: Counter[Any], expected: Counter[Any], what: str) -> None:
    for text, rows in (("come too often", found - expected), ("are missing", expected - found)):
        some = ", ".join(map(repr, islice(rows, 3)))
        assert not rows, f"{what}: {rows.total():,} rows {text}, such as {some}"
