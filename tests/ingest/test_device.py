"""The device stage: what it copies when, by a lane that tells; and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from sluice.ingest.gpu import DeviceError, OnDevice, on_device
from sluice.ingest.loader import BatchLoader
from tests.raises import raises

WORDS = ("dense", "values", "lengths", "label", "weight")


class FakeMark:
    def __init__(self, lane: FakeLane, number: int):
        self.lane, self.number = lane, number

    def passed(self) -> bool:
        return self.number <= self.lane.arrived

    def before_use(self, tensors: list[torch.Tensor]) -> None:
        self.lane.told.append(("used", self.number))
        self.lane.arrived = max(self.lane.arrived, self.number)
        assert len(tensors) == len(WORDS)


class FakeLane:
    """Copies arrive when the consumer uses them, or when the test says so; only then is the source looked at."""

    def __init__(self):
        self.told, self.made, self.marks, self.arrived = [], 0, 0, 0
        self.sources: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pinned(self, size: int, kind: torch.dtype) -> torch.Tensor:
        self.made += 1
        return torch.empty(size, dtype=kind)

    def send(self, source: torch.Tensor) -> torch.Tensor:
        self.sources.append((source, source.clone()))
        return source.clone()

    def mark(self) -> FakeMark:
        self.marks += 1
        self.told.append(("sent", self.marks))
        return FakeMark(self, self.marks)


def same(one, other) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in WORDS) and (
        one.rows,
        one.epoch,
        one.step,
    ) == (other.rows, other.epoch, other.step)


def test_the_next_batch_is_under_way_before_the_consumer_asks(table):
    lane = FakeLane()
    with BatchLoader(table, batch_size=400) as plain, BatchLoader(table, batch_size=400) as loader:
        moved = OnDevice(loader, lane, ahead=2)
        assert len(moved) == len(loader) == 10
        for batch, expected in zip(moved, plain, strict=True):
            assert same(batch, expected)
            assert batch.dense.stride() == expected.dense.stride()
        assert loader.order_hash == plain.order_hash
    assert lane.told[:5] == [("sent", 1), ("sent", 2), ("sent", 3), ("used", 1), ("sent", 4)]
    assert lane.told[-3:] == [("used", 8), ("used", 9), ("used", 10)]


def test_pinned_memory_is_used_again_only_when_its_copy_has_arrived(table):
    lane = FakeLane()
    with BatchLoader(table, batch_size=400) as loader:
        for number, _batch in enumerate(OnDevice(loader, lane)):
            under_way = (
                lane.sources[-4 * (lane.marks - lane.arrived) :]
                if lane.marks > lane.arrived
                else []
            )
            assert all(torch.equal(source, then) for source, then in under_way)
            assert number < 10
    assert (
        8 <= lane.made <= 13
    )  # of some batches, not of all ten; and the lengths of all rows, which are one, once
    assert len(lane.sources) == 10 * 4 + 1


def test_the_state_is_of_the_batch_that_the_consumer_has(table):
    with BatchLoader(table, batch_size=400) as plain, BatchLoader(table, batch_size=400) as loader:
        expected = [plain.state_dict() for _ in plain]
        moved = OnDevice(loader, FakeLane(), ahead=3)
        assert moved.state_dict() == loader.state_dict()
        assert [moved.state_dict() for _ in moved] == expected
        moved.load_state_dict(expected[4])
        assert next(iter(moved)).step == 5


def test_without_a_gpu_the_loader_is_taken_as_it_is(table):
    with BatchLoader(table, batch_size=400) as loader:
        assert on_device(loader, "cpu") is loader
        with raises(DeviceError, "ahead", 0):
            OnDevice(loader, FakeLane(), ahead=0)
        with raises(DeviceError, "mps", "cpu"):
            on_device(loader, "mps")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_batches_arrive_on_a_gpu_as_they_are(table):
    with BatchLoader(table, batch_size=400) as plain, BatchLoader(table, batch_size=400) as loader:
        for batch, expected in zip(on_device(loader, "cuda", ahead=2), plain, strict=True):
            assert batch.dense.is_cuda
            assert all(
                torch.equal(getattr(batch, name).cpu(), getattr(expected, name)) for name in WORDS
            )
